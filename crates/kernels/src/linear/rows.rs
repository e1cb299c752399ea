//! Activations in the order in which kernels read them: rows in groups, a group's values of one feature side by side.

use std::cell::RefCell;
use std::ops::Range;
use std::thread::LocalKey;

use crate::pool::{self, Shared};
use crate::simd::{self, Isa, Kernel, Simd};

/// Features that share a scale when they are rounded to bytes, and a partial sum of grouped weights, unless a group is smaller:
/// see [`step`].
pub(super) const CHUNK: usize = 32;

/// Features of a partial sum of weights in groups of this size: a chunk, or the half of one where a group is not made of whole
/// chunks.
pub(super) fn step(group: usize) -> usize {
    if group.is_multiple_of(CHUNK) {
        CHUNK
    } else {
        CHUNK / 2
    }
}

/// Sizes of groups that kernels are made for. Each costs a kernel for every kind of weight and every instruction set.
pub(super) const SIZES: [usize; 7] = [1, 2, 4, 5, 6, 8, 12];

/// How rows are grouped: all groups have one size, and the last is filled with rows that nobody asks for.
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
    /// `[group][feature, to an even number][row of the group]`. Rows that are missing in a group are copies of its last.
    values: Lent<f32>,
    /// `[group][step][row of the group]`: sums of the steps, in order, if asked for.
    sums: Lent<f32>,
    features: usize,
    steps: usize,
}

impl FloatRows {
    /// `step`: features of a sum, of which `features` is a multiple.
    pub(super) fn new(grouping: Grouping, x: &[f32], features: usize, step: Option<usize>) -> Self {
        let (size, even) = (grouping.size, features.next_multiple_of(2));
        let steps = step.map_or(0, |step| features / step);
        let mut new = Self {
            values: Lent::new(&FLOATS, grouping.groups() * even * size),
            sums: Lent::new(&FLOATS, grouping.groups() * steps * size),
            features: even,
            steps,
        };
        let (values, sums) = (Shared::new(&mut new.values.0), Shared::new(&mut new.sums.0));
        pool::for_each(grouping.groups(), x.len(), &|group| {
            // SAFETY: one task a group, and groups do not overlap.
            let values = unsafe { values.part(group * even * size..(group + 1) * even * size) };
            values[features * size..].fill(0.0);
            // SAFETY: as above.
            let sums = unsafe { sums.part(group * steps * size..(group + 1) * steps * size) };
            sums.fill(0.0);
            let members = grouping.members(group);
            let x = &x[members.start * features..members.end * features];
            match size {
                1 => interleave::<1>(x, features, values),
                2 => interleave::<2>(x, features, values),
                4 => interleave::<4>(x, features, values),
                5 => interleave::<5>(x, features, values),
                6 => interleave::<6>(x, features, values),
                8 => interleave::<8>(x, features, values),
                12 => interleave::<12>(x, features, values),
                size => unreachable!("groups of {size} rows"),
            }
            for (r, x) in x.chunks_exact(features).enumerate() {
                let sums = sums.iter_mut().skip(r).step_by(size);
                for (to, x) in sums.zip(x.chunks_exact(step.unwrap_or(CHUNK))) {
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

    /// The sums of some steps of a group of `R`.
    #[inline(always)]
    pub(super) fn sums<const R: usize>(&self, group: usize, steps: Range<usize>) -> &[[f32; R]] {
        let at = group * self.steps;
        &self.sums.0.as_chunks().0[at + steps.start..at + steps.end]
    }
}

/// Puts rows of one feature side by side, `R` of them or fewer and copies of the last.
fn interleave<const R: usize>(x: &[f32], features: usize, values: &mut [f32]) {
    let rows: [&[f32]; R] = std::array::from_fn(|r| {
        let row = r.min(x.len() / features - 1);
        &x[row * features..][..features]
    });
    for (feature, to) in values
        .as_chunks_mut::<R>()
        .0
        .iter_mut()
        .take(features)
        .enumerate()
    {
        for (to, row) in to.iter_mut().zip(rows) {
            *to = row[feature];
        }
    }
}

/// Rows of signed bytes. A chunk of a row with largest magnitude `m` has scale `d = m / 127`, and byte `i` is `x_i (127 / m)`
/// rounded to the nearest, ties to even.
pub(super) struct ByteRows {
    /// `[group][four features][row of the group]`: four bytes, the first feature's in front in memory.
    quads: Lent<i32>,
    /// `[group][step][row of the group]`: d.
    scales: Lent<f32>,
    /// `[group][step][row of the group]`: d times the sum of the bytes.
    sums: Lent<f32>,
    /// `[group][step][row of the group]`: the sum of the bytes, times `start`.
    starts: Lent<i32>,
    steps: usize,
    /// Features of a step.
    step: usize,
}

impl ByteRows {
    /// `features` is a multiple of [`CHUNK`], which is one of `step`.
    pub(super) fn new(
        isa: Isa,
        grouping: Grouping,
        x: &[f32],
        features: usize,
        start: i32,
        step: usize,
    ) -> Self {
        let (size, steps) = (grouping.size, features / step);
        let count = grouping.groups() * steps * size;
        let mut new = Self {
            quads: Lent::new(&WHOLES, count * step / 4),
            scales: Lent::new(&FLOATS, count),
            sums: Lent::new(&FLOATS, count),
            starts: Lent::new(&WHOLES, count),
            steps,
            step,
        };
        let (quads, starts) = (Shared::new(&mut new.quads.0), Shared::new(&mut new.starts.0));
        let (scales, sums) = (Shared::new(&mut new.scales.0), Shared::new(&mut new.sums.0));
        pool::for_each(grouping.groups(), 2 * x.len(), &|group| {
            let part = group * steps * size..(group + 1) * steps * size;
            let quad_part = part.start * step / 4..part.end * step / 4;
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
                    features,
                    step,
                    quads,
                    scales,
                    sums,
                    starts,
                },
            );
        });
        new
    }

    /// Some steps of a group of `R`.
    #[inline(always)]
    pub(super) fn steps<const R: usize>(
        &self,
        group: usize,
        steps: Range<usize>,
    ) -> impl Iterator<Item = ByteStep<'_, R>> {
        let at = group * self.steps;
        let steps = at + steps.start..at + steps.end;
        let quads = self.step / 4;
        self.quads.0.as_chunks().0[steps.start * quads..steps.end * quads]
            .chunks_exact(quads)
            .zip(&self.scales.0.as_chunks().0[steps.clone()])
            .zip(&self.sums.0.as_chunks().0[steps.clone()])
            .zip(&self.starts.0.as_chunks().0[steps])
            .map(|(((quads, scales), sums), starts)| ByteStep {
                quads,
                scales,
                sums,
                starts,
            })
    }
}

/// What [`ByteRows`] says of one step.
pub(super) struct ByteStep<'a, const R: usize> {
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
    features: usize,
    step: usize,
    quads: &'a mut [i32],
    scales: &'a mut [f32],
    sums: &'a mut [f32],
    starts: &'a mut [i32],
}

impl Kernel for Round<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (r, x) in self.x.chunks_exact(self.features).enumerate() {
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
                for (part, bytes) in bytes.chunks_exact(self.step).enumerate() {
                    let sum = match bytes.len() {
                        CHUNK => sum,
                        _ => bytes.iter().map(|x| i32::from(*x)).sum(),
                    };
                    let at = chunk * (CHUNK / self.step) + part;
                    let row = at * self.size + r;
                    self.scales[row] = scale;
                    self.sums[row] = scale * sum as f32;
                    self.starts[row] = sum * self.start;
                    for (i, four) in bytes.as_chunks::<4>().0.iter().enumerate() {
                        let quad = i32::from_ne_bytes(four.map(|x| x as u8));
                        self.quads[(at * (self.step / 4) + i) * self.size + r] = quad;
                    }
                }
            }
        }
    }
}
