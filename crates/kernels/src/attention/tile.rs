//! Rows of keys or values of one head.

use half::{bf16, f16};

use crate::simd::{Simd, LANES, WIDE};

/// Positions whose keys or values are passed over by all queries of a group before the next: 32 KB at a width of 256.
pub(super) const TILE: usize = 32;

/// Most queries of a group for which rows are read in place. More of them read rows that were widened once and lie together:
/// rows that lie a power of two apart share few of the cache's sets, and widening them for each quad costs more than a copy.
pub(super) const IN_PLACE: usize = 16;

/// Rows of one head, of whole wide vectors.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a, T> {
    data: &'a [T],
    stride: usize,
    width: usize,
    /// Where the next tile's begin, if it is worth asking for them: only an address, which need not be a valid one.
    pub(super) next: Option<*const T>,
}

impl<'a, T: Cached> Rows<'a, T> {
    /// `width` is of whole wide vectors.
    #[inline(always)]
    pub(super) fn new(data: &'a [T], stride: usize, width: usize, next: Option<*const T>) -> Self {
        Self {
            data,
            stride,
            width,
            next,
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

    /// Wide vector `strip` of a row.
    ///
    /// # Safety
    /// The rows hold `row`, and `strip < width / WIDE`.
    #[inline(always)]
    pub(super) unsafe fn strip(self, row: usize, strip: usize) -> &'a [T; WIDE] {
        let at = row * self.stride + strip * WIDE;
        // SAFETY: by the caller's promise the vector ends within the row, and the row within the data.
        unsafe { &*self.data.as_ptr().add(at).cast() }
    }

    /// Asks for the row that the next tile will have in the place of `row`: rows of one head do not follow each other
    /// closely enough for the machine to guess it.
    #[inline(always)]
    pub(super) fn ask_row<S: Simd>(self, s: S, row: usize) {
        for at in (0..self.width).step_by(64 / size_of::<T>()) {
            self.ask(s, row, at);
        }
    }

    /// Asks likewise for what lies in its wide vector `strip`.
    #[inline(always)]
    pub(super) fn ask_strip<S: Simd>(self, s: S, row: usize, strip: usize) {
        if (strip * WIDE).is_multiple_of(64 / size_of::<T>()) {
            self.ask(s, row, strip * WIDE);
        }
    }

    #[inline(always)]
    fn ask<S: Simd>(self, s: S, row: usize, at: usize) {
        if let Some(next) = self.next {
            s.prefetch_early(next.wrapping_add(row * self.stride + at));
        }
    }
}

/// A type that keys and values are cached in.
pub(super) trait Cached: Copy {
    const ZERO: Self;

    fn widen<S: Simd>(s: S, from: &[Self; LANES]) -> S::F;
    fn widen_wide<S: Simd>(s: S, from: &[Self; WIDE]) -> S::W;
}

impl Cached for f32 {
    const ZERO: Self = 0.0;

    #[inline(always)]
    fn widen<S: Simd>(s: S, from: &[Self; LANES]) -> S::F {
        s.load(from)
    }

    #[inline(always)]
    fn widen_wide<S: Simd>(s: S, from: &[Self; WIDE]) -> S::W {
        s.wide_load(from)
    }
}

impl Cached for f16 {
    const ZERO: Self = f16::ZERO;

    #[inline(always)]
    fn widen<S: Simd>(s: S, from: &[Self; LANES]) -> S::F {
        s.f16(from)
    }

    #[inline(always)]
    fn widen_wide<S: Simd>(s: S, from: &[Self; WIDE]) -> S::W {
        s.wide_f16(from)
    }
}

impl Cached for bf16 {
    const ZERO: Self = bf16::ZERO;

    #[inline(always)]
    fn widen<S: Simd>(s: S, from: &[Self; LANES]) -> S::F {
        s.bf16(from)
    }

    #[inline(always)]
    fn widen_wide<S: Simd>(s: S, from: &[Self; WIDE]) -> S::W {
        s.wide_bf16(from)
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
        let (to, pad) = to.split_at_mut(full.len() * WIDE);
        for (to, from) in to.as_chunks_mut().0.iter_mut().zip(full) {
            s.wide_store(T::widen_wide(s, from), to);
        }
        if let Some(to) = pad.first_chunk_mut() {
            let mut lanes = [T::ZERO; WIDE];
            lanes[..tail.len()].copy_from_slice(tail);
            s.wide_store(T::widen_wide(s, &lanes), to);
        }
    }
}
