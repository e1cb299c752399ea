//! The files of a checkpoint folder. The first byte says which file the others are; the rest of the folder is right.
#![no_main]

use libfuzzer_sys::fuzz_target;

const CONFIG: &[u8] = include_bytes!("../../examples/models/demo-draft/config.json");
const FILES: [&str; 5] = [
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "model.safetensors",
    "tokenizer_config.json",
];

fuzz_target!(|data: &[u8]| {
    let Some((which, data)) = data.split_first() else {
        return;
    };
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("config.json"), CONFIG).expect("written");
    let file = FILES[usize::from(*which) % FILES.len()];
    std::fs::write(folder.path().join(file), data).expect("written");
    recant::inspect(folder.path());
});
