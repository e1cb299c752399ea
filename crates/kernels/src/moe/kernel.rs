//! One row of each operation.

use crate::simd::{self, Kernel, Simd, LANES};

/// Probabilities of a row's logits.
pub(super) struct Softmax<'a> {
    pub(super) logits: &'a [f32],
    pub(super) p: &'a mut [f32],
}

impl Kernel for Softmax<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { logits, p } = self;
        // A logit that is no number is passed over here, and makes every probability none below.
        let max = logits.iter().fold(f32::NEG_INFINITY, |max, x| max.max(*x));
        let max = s.splat(max);
        let mut sums = s.zero();
        for (x, p) in logits.chunks(LANES).zip(p.chunks_mut(LANES)) {
            s.store_part(simd::exp(s, s.sub(s.load_part(x), max)), p);
            sums = s.add(sums, s.load_part(p));
        }
        let sum = s.splat(s.sum(sums));
        for p in p.chunks_mut(LANES) {
            s.store_part(s.div(s.load_part(p), sum), p);
        }
    }
}

/// `y = sum over i of weights[i] * parts[i]`, in order.
pub(super) struct WeightedSum<'a> {
    pub(super) weights: &'a [f32],
    /// All parts, of the length of `y` each, end to end.
    pub(super) parts: &'a [f32],
    /// Which of them go with the weights.
    pub(super) places: &'a [usize],
    pub(super) y: &'a mut [f32],
}

impl Kernel for WeightedSum<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let width = self.y.len();
        self.y.fill(0.0);
        for (weight, place) in self.weights.iter().zip(self.places) {
            let part = &self.parts[place * width..][..width];
            axpy(s, *weight, part, self.y);
        }
    }
}

/// `y = sum + sigmoid(gate) * x`
pub(super) struct AddGated<'a> {
    pub(super) sum: &'a [f32],
    pub(super) x: &'a [f32],
    pub(super) gate: f32,
    pub(super) y: &'a mut [f32],
}

impl Kernel for AddGated<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let gate = s.lanes(simd::sigmoid(s, s.splat(self.gate)))[0];
        self.y.copy_from_slice(self.sum);
        axpy(s, gate, self.x, self.y);
    }
}

/// `y += a * x`, rounded once an element.
#[inline(always)]
fn axpy<S: Simd>(s: S, a: f32, x: &[f32], y: &mut [f32]) {
    let a = s.splat(a);
    let (x8, x_tail) = x.as_chunks::<LANES>();
    let (y8, y_tail) = y.as_chunks_mut::<LANES>();
    for (x, y) in x8.iter().zip(y8) {
        s.store(s.fma(a, s.load(x), s.load(y)), y);
    }
    if !x_tail.is_empty() {
        s.store_part(s.fma(a, s.load_part(x_tail), s.load_part(y_tail)), y_tail);
    }
}
