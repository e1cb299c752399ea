//! A GGUF file: header, names, configuration, vocabulary; and the model that is made of it.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let file = recant_fuzz::write("model.gguf", data);
    recant::inspect(&file);
    let _ = recant::load(&file);
});
