//! A saved prompt cache.
#![no_main]

use libfuzzer_sys::fuzz_target;
use recant::core::persist::CacheFile;

fuzz_target!(|data: &[u8]| {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("cache");
    std::fs::write(&path, data).expect("written");
    let _ = CacheFile::read(&path);
});
