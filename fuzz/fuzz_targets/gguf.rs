//! A GGUF file: header, names, configuration, vocabulary.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("model.gguf");
    std::fs::write(&file, data).expect("written");
    recant::inspect(&file);
});
