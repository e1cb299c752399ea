//! Activations in the order in which kernels read them: rows in groups, a group's values of one feature side by side.

use std::cell::RefCell;
use std::ops::Range;
use std::thread::LocalKey;

use crate::pool::{self, Shared};
use crate::simd::{self, Isa, Kernel, Simd};

/// Features that share a scale when they are rounded to bytes, and a partial sum of grouped weights.
pub(super) const CHUNK: usize = 32;

/// Sizes of groups that kernels are made for. Each costs a kernel for every kind of weight and every instruction set.
pub(super) const SIZES: [usize; 7] = [1, 2, 4, 5, 6, 8, 12];

/// How rows are grouped: all groups have one size, and rows of zeros fill the last.
#[derive(Clone, Copy)]
pub(super) struct Grouping {
    pub(super) rows: usize,
    /// One of [`SIZES`].
    pub(super) size: usize,
}

impl Grouping {
    /// As few groups as `most` rows in each allow, and as small.
    pub(super) fn new(rows: usize, most: usize) -> Self {
        let even = rows.div_ceil(rows.div_ceil(most).max(1));
        let size = SIZES.into_iter().find(|size| *size >= even).unwrap_or(most);
        Self { rows, size }
    }

    pub(super) fn groups(self) -> usize {
        self.rows.div_ceil(self.size)
    }

    /// Rows of a group.
    pub(super) fn members(self, group: usize) -> Range<usize> {
        group * self.size..self.rows.min((group + 1) * self.size)
    }
}

/// Vectors of 32-bit numbers that are lent to one call after the other, so that a decode step does not ask the system for
/// memory.
struct Lent<T: 'static>(Vec<T>, &'static LocalKey<RefCell<Vec<Vec<T>>>>);

thread_local! {
    static FLOATS: RefCell<Vec<Vec<f32>>> = const { RefCell::new(Vec::new()) };
    static WHOLES: RefCell<Vec<Vec<i32>>> = const { RefCell::new(Vec::new()) };
}

impl<T: Copy + Default> Lent<T> {
    /// At least `len` numbers, whatever they are.
    fn new(from: &'static LocalKey<RefCell<Vec<Vec<T>>>>, len: usize) -> Self {
        let mut lent = from.with_borrow_mut(Vec::pop).unwrap_or_default();
        if lent.len() < len {
            lent.resize(len, T::default());
        }
        Self(lent, from)
    }
}

impl<T> Drop for Lent<T> {
    fn drop(&mut self) {
        let lent = std::mem::take(&mut self.0);
        // A thread that is ending keeps nothing.
        let _ = self.1.try_with(|store| store.borrow_mut().push(lent));
    }
}

/// Rows of f32.
pub(super) struct FloatRows {
    /// `[group][feature, to an even number][row of the group]`
    values: Lent<f32>,
    /// `[group][chunk][row of the group]`: sums of the chunks, in order, if asked for.
    sums: Lent<f32>,
    features: usize,
}

impl FloatRows {
    pub(super) fn new(grouping: Grouping, x: &[f32], features: usize, with_sums: bool) -> Self {
        let (size, even) = (grouping.size, features.next_multiple_of(2));
        let chunks = if with_sums { features / CHUNK } else { 0 };
        let mut new = Self {
            values: Lent::new(&FLOATS, grouping.groups() * even * size),
            sums: Lent::new(&FLOATS, grouping.groups() * chunks * size),
            features: even,
        };
        let (values, sums) = (Shared::new(&mut new.values.0), Shared::new(&mut new.sums.0));
        pool::for_each(grouping.groups(), x.len(), &|group| {
            // SAFETY: one task a group, and groups do not overlap.
            let values = unsafe { values.part(group * even * size..(group + 1) * even * size) };
            if size != grouping.members(group).len() || even != features {
                values.fill(0.0);
            }
            // SAFETY: as above.
            let sums = unsafe { sums.part(group * chunks * size..(group + 1) * chunks * size) };
            sums.fill(0.0);
            for (r, row) in grouping.members(group).enumerate() {
                let x = &x[row * features..(row + 1) * features];
                for (to, x) in values.iter_mut().skip(r).step_by(size).zip(x) {
                    *to = *x;
                }
                for (to, x) in sums.iter_mut().skip(r).step_by(size).zip(x.chunks_exact(CHUNK)) {
                    *to = x.iter().fold(0.0, |sum, x| sum + x);
                }
            }
        });
        new
    }

    /// The values of some features of a group of `R`.
    #[inline(always)]
    pub(super) fn group<const R: usize>(&self, group: usize, features: Range<usize>) -> &[[f32; R]] {
        let at = group * self.features;
        &self.values.0.as_chunks().0[at + features.start..at + features.end]
    }

    /// The sums of a chunk of a group of `R`.
    #[inline(always)]
    pub(super) fn sums<const R: usize>(&self, group: usize, chunk: usize) -> &[f32; R] {
        &self.sums.0.as_chunks().0[group * (self.features / CHUNK) + chunk]
    }
}

/// Rows of signed bytes. A chunk of a row with largest magnitude `m` has scale `d = m / 127`, and byte `i` is `x_i (127 / m)`
/// rounded to the nearest, ties to even.
pub(super) struct ByteRows {
    /// `[group][four features][row of the group]`: four bytes, the first feature's in front in memory.
    quads: Lent<i32>,
    /// `[group][chunk][row of the group]`: d.
    scales: Lent<f32>,
    /// `[group][chunk][row of the group]`: d times the sum of the bytes.
    sums: Lent<f32>,
    /// `[group][chunk][row of the group]`: the sum of the bytes, times `start`.
    starts: Lent<i32>,
    chunks: usize,
}

impl ByteRows {
    /// `features` is a multiple of [`CHUNK`].
    pub(super) fn new(isa: Isa, grouping: Grouping, x: &[f32], features: usize, start: i32) -> Self {
        let (size, chunks) = (grouping.size, features / CHUNK);
        let count = grouping.groups() * chunks * size;
        let mut new = Self {
            quads: Lent::new(&WHOLES, count * CHUNK / 4),
            scales: Lent::new(&FLOATS, count),
            sums: Lent::new(&FLOATS, count),
            starts: Lent::new(&WHOLES, count),
            chunks,
        };
        let (quads, starts) = (Shared::new(&mut new.quads.0), Shared::new(&mut new.starts.0));
        let (scales, sums) = (Shared::new(&mut new.scales.0), Shared::new(&mut new.sums.0));
        pool::for_each(grouping.groups(), 2 * x.len(), &|group| {
            let part = group * chunks * size..(group + 1) * chunks * size;
            let quad_part = part.start * CHUNK / 4..part.end * CHUNK / 4;
            // SAFETY: one task a group, and groups do not overlap.
            let quads = unsafe { quads.part(quad_part) };
            // SAFETY: as above.
            let [scales, sums] = unsafe { [scales.part(part.clone()), sums.part(part.clone())] };
            // SAFETY: as above.
            let starts = unsafe { starts.part(part) };
            if size != grouping.members(group).len() {
                quads.fill(0);
                starts.fill(0);
                scales.fill(0.0);
                sums.fill(0.0);
            }
            let first = grouping.members(group).start * features;
            simd::run(
                isa,
                Round {
                    x: &x[first..first + grouping.members(group).len() * features],
                    start,
                    size,
                    chunks,
                    quads,
                    scales,
                    sums,
                    starts,
                },
            );
        });
        new
    }

    /// A chunk of a group of `R`.
    #[inline(always)]
    pub(super) fn chunk<const R: usize>(&self, group: usize, chunk: usize) -> ByteChunk<'_, R> {
        let at = group * self.chunks + chunk;
        ByteChunk {
            quads: &self.quads.0.as_chunks().0[at * (CHUNK / 4)..],
            scales: &self.scales.0.as_chunks().0[at],
            sums: &self.sums.0.as_chunks().0[at],
            starts: &self.starts.0.as_chunks().0[at],
        }
    }
}

/// What [`ByteRows`] says of one chunk.
pub(super) struct ByteChunk<'a, const R: usize> {
    /// Its own first, and those of the chunks after it.
    pub(super) quads: &'a [[i32; R]],
    pub(super) scales: &'a [f32; R],
    pub(super) sums: &'a [f32; R],
    pub(super) starts: &'a [i32; R],
}

/// Rounds the rows of a group.
struct Round<'a> {
    x: &'a [f32],
    start: i32,
    size: usize,
    chunks: usize,
    quads: &'a mut [i32],
    scales: &'a mut [f32],
    sums: &'a mut [f32],
    starts: &'a mut [i32],
}

impl Kernel for Round<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (r, x) in self.x.chunks_exact(self.chunks * CHUNK).enumerate() {
            for (chunk, x) in x.as_chunks::<CHUNK>().0.iter().enumerate() {
                let most = f32::from_bits(s.magnitude(x));
                let inverse = 127.0 / most;
                let (scale, (bytes, sum)) = if !most.is_finite() {
                    // Nothing that comes of it is a number.
                    (f32::NAN, ([0; CHUNK], 0))
                } else if inverse.is_infinite() {
                    // The smallest numbers have no reciprocal and count as zeros.
                    (0.0, ([0; CHUNK], 0))
                } else {
                    (most / 127.0, s.to_bytes(x, inverse))
                };
                let at = chunk * self.size + r;
                self.scales[at] = scale;
                self.sums[at] = scale * sum as f32;
                self.starts[at] = sum * self.start;
                for (i, four) in bytes.as_chunks::<4>().0.iter().enumerate() {
                    let quad = i32::from_ne_bytes(four.map(|x| x as u8));
                    self.quads[(chunk * (CHUNK / 4) + i) * self.size + r] = quad;
                }
            }
        }
    }
}
