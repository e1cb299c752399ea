//! Memory for packed weights.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use memmap2::{MmapMut, MmapRaw};

use crate::simd::Line;

/// Lines below which the heap will do.
const FEW: usize = 1024;

/// Lines of a mapping that several matrices share: 64 MB.
const SHARED: usize = 1 << 20;

/// Lines that are read from end to end, in huge pages where the system gives them: prefetching stops at the end of a page,
/// and the addresses of small pages do not stay in the processor.
///
/// A huge page has room for several small matrices, so they share mappings. One goes back to the system when all in it are
/// dropped; what one of them held is not used again before.
pub(crate) struct Lines(Memory);

enum Memory {
    Heap(Vec<Line>),
    Mapped(Part),
}

/// Lines of a mapping that nobody else has.
struct Part {
    mapping: Arc<MmapRaw>,
    first: usize,
    count: usize,
}

/// The mapping with room left, and how many of its lines are given away.
static OPEN: Mutex<(Weak<MmapRaw>, usize)> = Mutex::new((Weak::new(), 0));

impl Part {
    fn new(count: usize) -> Option<Self> {
        if count > SHARED / 2 {
            return Some(Self {
                mapping: map(count)?,
                first: 0,
                count,
            });
        }
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let (mapping, first) = match open.0.upgrade() {
            Some(mapping) if open.1 + count <= SHARED => (mapping, open.1),
            _ => (map(SHARED)?, 0),
        };
        *open = (Arc::downgrade(&mapping), first + count);
        Some(Self {
            mapping,
            first,
            count,
        })
    }

    fn start(&self) -> *mut Line {
        self.mapping.as_mut_ptr().cast::<Line>().wrapping_add(self.first)
    }
}

/// Zeros from the system.
fn map(count: usize) -> Option<Arc<MmapRaw>> {
    let mapping = MmapMut::map_anon(count.checked_mul(size_of::<Line>())?).ok()?;
    // Only advice: without it the pages are small ones.
    #[cfg(target_os = "linux")]
    let _ = mapping.advise(memmap2::Advice::HugePage);
    Some(Arc::new(mapping.into()))
}

impl Lines {
    /// Zeros.
    pub(crate) fn new(count: usize) -> Self {
        let part = if count < FEW { None } else { Part::new(count) };
        Self(match part {
            Some(part) => Memory::Mapped(part),
            None => Memory::Heap(vec![Line::ZERO; count]),
        })
    }
}

impl Deref for Lines {
    type Target = [Line];

    #[inline(always)]
    fn deref(&self) -> &[Line] {
        match &self.0 {
            Memory::Heap(lines) => lines,
            // SAFETY: a mapping begins at a page, any bytes are lines, and the part lies in it and was given to nobody else.
            Memory::Mapped(part) => unsafe { std::slice::from_raw_parts(part.start(), part.count) },
        }
    }
}

impl DerefMut for Lines {
    fn deref_mut(&mut self) -> &mut [Line] {
        match &mut self.0 {
            Memory::Heap(lines) => lines,
            // SAFETY: as above.
            Memory::Mapped(part) => unsafe { std::slice::from_raw_parts_mut(part.start(), part.count) },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_in_a_mapping_do_not_overlap_and_begin_as_zeros() {
        let sizes = [
            1,
            FEW,
            3 * FEW,
            SHARED / 2,
            SHARED / 2 + 1,
            FEW,
            SHARED / 2,
            5 * FEW,
        ];
        let mut all: Vec<Lines> = Vec::new();
        for (i, size) in sizes.into_iter().enumerate() {
            let mut lines = Lines::new(size);
            assert_eq!(lines.len(), size);
            assert!(lines.iter().all(|line| line.0 == [0; 64]), "{size}");
            lines.fill(Line([i as u8 + 1; 64]));
            all.push(lines);
        }
        for (i, lines) in all.iter().enumerate() {
            assert!(lines.iter().all(|line| line.0 == [i as u8 + 1; 64]), "{i}");
        }
    }
}
