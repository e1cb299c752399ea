//! A saved prompt cache, as it is and with a digest that is right.
#![no_main]

use libfuzzer_sys::fuzz_target;
use recant::core::persist::CacheFile;
use recant_fuzz::write;

#[path = "../../tests/common/sealed.rs"]
mod sealed;

fuzz_target!(|data: &[u8]| {
    let _ = CacheFile::read(write("cache", data));
    if let Some(sealed) = sealed::sealed(data) {
        let _ = CacheFile::read(write("cache", &sealed));
    }
});
