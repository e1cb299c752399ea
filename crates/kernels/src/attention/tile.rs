//! Which scores a task keeps and where, and the keys or values that it works on.

use std::ops::Range;

use half::{bf16, f16};

use crate::simd::{Simd, LANES};

use super::kernel::Segment;

/// Positions whose keys or values are passed over by all queries of a task before the next: 32 KB at a width of 256.
pub(super) const TILE: usize = 32;

/// Where the score of a position lies, lane by position modulo 8.
///
/// Sinks come first; then, from a multiple of 8 on, what the window of the oldest row shows.
#[derive(Clone, Copy)]
pub(super) struct Index {
    sinks: usize,
    /// First position by the oldest row's window.
    first: usize,
    /// Position from which on scores lie at `position - base + offset`; before, at `position`.
    base: usize,
    offset: usize,
    /// One more than the newest position.
    end: usize,
    pub(super) len: usize,
}

impl Index {
    pub(super) fn new(segment: &Segment<'_>, rows: &Range<usize>) -> Self {
        let first = segment.sight.first(segment.position + rows.start);
        let end = segment.position + rows.end;
        let sinks = segment.sight.sink.min(first);
        let base = first - first % LANES;
        let (base, offset) = if base <= sinks {
            (0, 0)
        } else {
            (base, sinks.next_multiple_of(LANES))
        };
        Self {
            sinks,
            first,
            base,
            offset,
            end,
            len: (end - base + offset).next_multiple_of(LANES),
        }
    }

    pub(super) fn at(self, position: usize) -> usize {
        if position < self.base {
            position
        } else {
            position - self.base + self.offset
        }
    }

    /// Runs of at most [`TILE`] positions of a block that some row may see, in order.
    pub(super) fn tiles(self, block: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        [0..self.sinks, self.first..self.end]
            .into_iter()
            .flat_map(move |seen| {
                let (start, end) = (seen.start.max(block.start), seen.end.min(block.end));
                (start..end)
                    .step_by(TILE)
                    .map(move |tile| tile..end.min(tile + TILE))
            })
    }
}

/// Keys or values of one head at the positions of a tile, padded to whole vectors.
#[derive(Clone, Copy)]
pub(super) struct Tile<'a> {
    pub(super) data: &'a [f32],
    pub(super) stride: usize,
    pub(super) width: usize,
    /// Whether it lies in the block itself, so that the next tile follows it.
    pub(super) in_place: bool,
}

impl<'a> Tile<'a> {
    #[inline(always)]
    pub(super) fn row(self, row: usize) -> &'a [[f32; LANES]] {
        self.data[row * self.stride..][..self.width].as_chunks().0
    }

    /// Rows in it, at least.
    #[inline(always)]
    pub(super) fn rows(self) -> usize {
        (self.data.len() + self.stride - self.width) / self.stride
    }

    /// Vector `chunk` of a row.
    ///
    /// # Safety
    /// `row < self.rows()` and `chunk < self.width / LANES`.
    #[inline(always)]
    pub(super) unsafe fn chunk(self, row: usize, chunk: usize) -> &'a [f32; LANES] {
        let at = row * self.stride + chunk * LANES;
        // SAFETY: by the caller's promise the vector ends within the row, and the row within the data.
        unsafe { &*self.data.as_ptr().add(at).cast() }
    }

    /// Asks for vector `chunk` of the row that the next tile will have at `row`: rows of one head do not follow each
    /// other closely enough for the machine to guess it.
    #[inline(always)]
    pub(super) fn ask<S: Simd>(self, s: S, row: usize, chunk: usize) {
        let at = (row + TILE) * self.stride + chunk * LANES;
        s.prefetch(self.data.as_ptr().wrapping_add(at));
    }
}

/// A type that keys and values are cached in.
pub(super) trait Cached: Copy {
    const ZERO: Self;

    fn widen<S: Simd>(s: S, from: &[Self; LANES]) -> S::F;
}

impl Cached for f32 {
    const ZERO: Self = 0.0;

    #[inline(always)]
    fn widen<S: Simd>(s: S, from: &[Self; LANES]) -> S::F {
        s.load(from)
    }
}

impl Cached for f16 {
    const ZERO: Self = f16::ZERO;

    #[inline(always)]
    fn widen<S: Simd>(s: S, from: &[Self; LANES]) -> S::F {
        s.f16(from)
    }
}

impl Cached for bf16 {
    const ZERO: Self = bf16::ZERO;

    #[inline(always)]
    fn widen<S: Simd>(s: S, from: &[Self; LANES]) -> S::F {
        s.bf16(from)
    }
}

/// Rows of `width` elements, `stride` apart, to rows of `wide` numbers with zeros at their ends.
#[inline(always)]
pub(super) fn copy_rows<S: Simd, T: Cached>(
    s: S,
    x: &[T],
    (stride, width, wide): (usize, usize, usize),
    count: usize,
    to: &mut [f32],
) {
    for (to, from) in to.chunks_exact_mut(wide).zip(x.chunks(stride)).take(count) {
        // The same row of the next tile.
        for at in (0..width).step_by(64 / size_of::<T>()) {
            s.prefetch(from.as_ptr().wrapping_add(TILE * stride + at));
        }
        let (full, tail) = from[..width].as_chunks();
        let to = to.as_chunks_mut().0;
        for (to, from) in to.iter_mut().zip(full) {
            s.store(T::widen(s, from), to);
        }
        if let (false, Some(to)) = (tail.is_empty(), to.last_mut()) {
            let mut lanes = [T::ZERO; LANES];
            lanes[..tail.len()].copy_from_slice(tail);
            s.store(T::widen(s, &lanes), to);
        }
    }
}
