//! The index of a checkpoint in shards. The first bytes of an input, up to a line feed, are the header of a shard, the others are
//! the index.
#![no_main]

use libfuzzer_sys::fuzz_target;
use recant_fuzz::{inspect, CONFIG};

fuzz_target!(|data: &[u8]| {
    let Some(end) = data.iter().position(|byte| *byte == b'\n') else {
        return;
    };
    let (header, index) = (&data[..end], &data[end + 1..]);
    let shard = [&(header.len() as u64).to_le_bytes(), header].concat();
    inspect(&[
        ("config.json", CONFIG),
        ("model.safetensors.index.json", index),
        ("a.safetensors", &shard),
    ]);
});
