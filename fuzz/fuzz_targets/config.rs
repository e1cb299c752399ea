//! The small files of a checkpoint folder. The first byte says which file the others are; the rest of the folder is right.
#![no_main]

use libfuzzer_sys::fuzz_target;
use recant_fuzz::{inspect, CONFIG, EMPTY};

const FILES: [&str; 5] = [
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "chat_template.json",
    "chat_template.jinja",
];

fuzz_target!(|data: &[u8]| {
    let Some((which, data)) = data.split_first() else {
        return;
    };
    let chosen = usize::from(*which) % FILES.len();
    let mut files = FILES.map(|name| (name, &b"null"[..]));
    files[0].1 = CONFIG;
    files[chosen].1 = data;
    inspect(&[&files[..], &[("model.safetensors", EMPTY)]].concat());
});
