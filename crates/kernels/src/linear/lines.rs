//! Memory for packed weights.

use std::ops::{Deref, DerefMut};

use memmap2::MmapMut;

use crate::simd::Line;

/// Bytes of a huge page on the systems that have them.
const HUGE: usize = 2 << 20;

/// Lines that are read from end to end, in huge pages where the system gives them: prefetching stops at the end of a page,
/// and with 4 KB pages a matrix is read at two thirds of the speed.
pub(crate) struct Lines(Memory);

enum Memory {
    Heap(Vec<Line>),
    Mapped(MmapMut),
}

impl Lines {
    /// Zeros.
    pub(crate) fn new(count: usize) -> Self {
        let bytes = count * size_of::<Line>();
        if bytes >= HUGE {
            if let Ok(map) = MmapMut::map_anon(bytes) {
                // Only advice: without it the pages are small ones.
                #[cfg(target_os = "linux")]
                let _ = map.advise(memmap2::Advice::HugePage);
                return Self(Memory::Mapped(map));
            }
        }
        Self(Memory::Heap(vec![Line::ZERO; count]))
    }
}

impl Deref for Lines {
    type Target = [Line];

    #[inline(always)]
    fn deref(&self) -> &[Line] {
        match &self.0 {
            Memory::Heap(lines) => lines,
            // SAFETY: a mapping begins at a page, and any bytes are lines.
            Memory::Mapped(map) => unsafe {
                std::slice::from_raw_parts(map.as_ptr().cast(), map.len() / size_of::<Line>())
            },
        }
    }
}

impl DerefMut for Lines {
    fn deref_mut(&mut self) -> &mut [Line] {
        match &mut self.0 {
            Memory::Heap(lines) => lines,
            // SAFETY: as above.
            Memory::Mapped(map) => unsafe {
                std::slice::from_raw_parts_mut(map.as_mut_ptr().cast(), map.len() / size_of::<Line>())
            },
        }
    }
}
