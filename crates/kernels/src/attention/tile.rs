//! Rows of keys or values of one head.

use half::{bf16, f16};

use crate::simd::{Simd, LANES};

/// Positions whose keys or values are passed over by all queries of a group before the next: 32 KB at a width of 256.
pub(super) const TILE: usize = 32;

/// Rows of one head, of whole vectors.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a, T> {
    data: &'a [T],
    stride: usize,
    width: usize,
    /// Whether they lie in the block itself, so that the next tile follows.
    pub(super) in_place: bool,
}

impl<'a, T: Cached> Rows<'a, T> {
    /// `width` is of whole vectors.
    #[inline(always)]
    pub(super) fn new(data: &'a [T], stride: usize, width: usize, in_place: bool) -> Self {
        Self {
            data,
            stride,
            width,
            in_place,
        }
    }

    #[inline(always)]
    pub(super) fn row(self, row: usize) -> &'a [[T; LANES]] {
        self.data[row * self.stride..][..self.width].as_chunks().0
    }

    /// Panics if there are fewer than `count` rows.
    #[inline(always)]
    pub(super) fn assert_holds(self, count: usize) {
        assert!((self.data.len() + self.stride - self.width) / self.stride >= count);
    }

    /// Vector `chunk` of a row.
    ///
    /// # Safety
    /// The rows hold `row`, and `chunk < width / LANES`.
    #[inline(always)]
    pub(super) unsafe fn chunk(self, row: usize, chunk: usize) -> &'a [T; LANES] {
        let at = row * self.stride + chunk * LANES;
        // SAFETY: by the caller's promise the vector ends within the row, and the row within the data.
        unsafe { &*self.data.as_ptr().add(at).cast() }
    }

    /// Asks for the row that the next tile will have in the place of `row`: rows of one head do not follow each other
    /// closely enough for the machine to guess it.
    #[inline(always)]
    pub(super) fn ask_row<S: Simd>(self, s: S, row: usize) {
        for chunk in (0..self.width / LANES).step_by(T::LINE) {
            self.ask(s, row, chunk);
        }
    }

    /// Asks likewise for the lines that begin in `W` vectors from `chunk` on.
    #[inline(always)]
    pub(super) fn ask_chunks<S: Simd, const W: usize>(self, s: S, row: usize, chunk: usize) {
        for chunk in chunk..chunk + W {
            if chunk % T::LINE == 0 {
                self.ask(s, row, chunk);
            }
        }
    }

    #[inline(always)]
    fn ask<S: Simd>(self, s: S, row: usize, chunk: usize) {
        let at = (row + TILE) * self.stride + chunk * LANES;
        s.prefetch(self.data.as_ptr().wrapping_add(at));
    }
}

/// A type that keys and values are cached in.
pub(super) trait Cached: Copy {
    const ZERO: Self;

    /// Vectors in a line of the cache.
    const LINE: usize = 64 / (LANES * size_of::<Self>());

    /// Most queries of a group for which rows are read in place. More of them read rows that were widened once and lie
    /// together: rows that lie a power of two apart share few of the cache's sets.
    const IN_PLACE: usize;

    fn widen<S: Simd>(s: S, from: &[Self; LANES]) -> S::F;
}

impl Cached for f32 {
    const ZERO: Self = 0.0;
    const IN_PLACE: usize = 8;

    #[inline(always)]
    fn widen<S: Simd>(s: S, from: &[Self; LANES]) -> S::F {
        s.load(from)
    }
}

impl Cached for f16 {
    const ZERO: Self = f16::ZERO;
    const IN_PLACE: usize = 8;

    #[inline(always)]
    fn widen<S: Simd>(s: S, from: &[Self; LANES]) -> S::F {
        s.f16(from)
    }
}

impl Cached for bf16 {
    const ZERO: Self = bf16::ZERO;
    const IN_PLACE: usize = 8;

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
