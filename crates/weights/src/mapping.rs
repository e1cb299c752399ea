//! The one place that needs `unsafe`: mapping a file into memory.

use std::fs::File;
use std::ops::Range;
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

/// Bytes around one that is read whose pages the system may put into the map as well: the largest unit of its cache.
const AROUND: usize = 2 << 20;

/// Lets go of the pages that hold some bytes, and of those around them, where the system can be told to. They stay in its cache
/// of files, which it makes room in by itself.
#[allow(unsafe_code)]
pub(crate) fn release(map: &Mmap, bytes: Range<usize>) {
    let bytes = bytes.start.saturating_sub(AROUND)..map.len().min(bytes.end.saturating_add(AROUND));
    #[cfg(unix)]
    {
        // SAFETY: the map is shared and read-only, so a page of it that is let go holds nothing but what is in the file, and
        // is there again, with the same bytes, when it is next read, whoever is reading it.
        let _ = unsafe {
            map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, bytes.start, bytes.len())
        };
    }
    #[cfg(not(unix))]
    let _ = (map, bytes);
}
