//! The one place that needs `unsafe`: mapping a file into memory.

use std::fs::File;
use std::path::Path;

use memmap2::Mmap;

use crate::error::{Error, Result};

/// A weight file's bytes, mapped read-only.
pub(crate) fn map(path: &Path) -> Result<Mmap> {
    let file = File::open(path).map_err(|source| Error::io(path, source))?;
    if file
        .metadata()
        .map_err(|source| Error::io(path, source))?
        .is_dir()
    {
        return Err(Error::header(path, "it is a folder; a weight file was expected"));
    }
    map_file(&file).map_err(|source| Error::io(path, source))
}

#[allow(unsafe_code)]
fn map_file(file: &File) -> std::io::Result<Mmap> {
    // SAFETY: the map is private to this crate, read-only, and only ever seen as bytes, for which every value is
    // valid. The remaining danger is another process that changes or truncates the file while it is mapped, which no
    // program can rule out; the crate's documentation makes it the user's duty not to.
    unsafe { Mmap::map(file) }
}
