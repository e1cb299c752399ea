//! Files in GGUF in a folder that goes away, and what is said of them.
#![allow(dead_code, unreachable_pub)]

#[path = "../../../../tests/common/gguf.rs"]
pub mod file;

use std::path::PathBuf;

use file::File;
use recant_weights::Folder;
use tempfile::TempDir;

/// A folder that goes away.
pub struct Dir(pub TempDir);

impl Dir {
    pub fn new() -> Self {
        Self(TempDir::new().unwrap())
    }

    pub fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }
}

/// Fails unless a file of these bytes is refused in words that hold all of these.
#[track_caller]
pub fn refused(bytes: &[u8], words: &[&str]) {
    let dir = Dir::new();
    let path = dir.write("model.gguf", bytes);
    says(&Folder::open(path).map(|_| ()), words);
}

#[track_caller]
pub fn says<T: std::fmt::Debug>(result: &recant_weights::Result<T>, words: &[&str]) {
    let error = result.as_ref().expect_err("a refusal").to_string();
    for word in words {
        assert!(error.contains(word), "{word:?} is not in: {error}");
    }
}

/// Fails unless the model is refused with these words once it was changed.
#[track_caller]
pub fn changed(change: impl FnOnce(&mut File), words: &[&str]) {
    let mut file = File::model();
    change(&mut file);
    refused(&file.bytes(), words);
}
