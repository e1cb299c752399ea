//! What the targets share: a folder that inputs are written into, one a process.

use std::path::PathBuf;
use std::sync::LazyLock;

use tempfile::TempDir;

static FOLDER: LazyLock<TempDir> = LazyLock::new(|| tempfile::tempdir().expect("a folder"));

/// Writes a file into the folder, in the place of one of that name, and gives its path.
pub fn write(name: &str, bytes: &[u8]) -> PathBuf {
    let path = FOLDER.path().join(name);
    std::fs::write(&path, bytes).expect("written");
    path
}

/// Reads all that is read of a folder whose files these are, and those written before.
pub fn inspect(files: &[(&str, &[u8])]) {
    for (name, bytes) in files {
        write(name, bytes);
    }
    recant::inspect(FOLDER.path());
}

/// A configuration that nothing is wrong with.
pub const CONFIG: &[u8] = include_bytes!("../../examples/models/demo-draft/config.json");

/// A weight file without tensors.
pub const EMPTY: &[u8] = b"\x02\0\0\0\0\0\0\0{}";
