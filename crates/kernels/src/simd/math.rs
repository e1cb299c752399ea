//! Functions made of the eight-lane operations.

use super::{Simd, LANES};

/// e to the power of x, to 2 units in the last place. Below about -103.97 it is 0, above about 88.72 infinite; NaN stays.
///
/// x = n ln 2 + r with |r| <= ln 2 / 2, and e^r by its Taylor series to r^7 / 7!, whose remainder is 2^-27.
#[inline(always)]
pub(crate) fn exp<S: Simd>(s: S, x: S::F) -> S::F {
    /// Adding and subtracting it rounds to a whole number.
    const ROUND: f32 = 12_582_912.0;
    /// ln 2, with trailing zeros so that n LN2_HIGH is exact, and the rest of it.
    const LN2_HIGH: f32 = 0.693_145_75;
    const LN2_LOW: f32 = 1.428_606_8e-6;
    const FACTORIALS: [f32; 6] = [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0];

    // In this order of operands NaN passes.
    let x = s.min(s.splat(89.0), s.max(s.splat(-104.0), x));
    let round = s.splat(ROUND);
    let n = s.sub(s.fma(x, s.splat(std::f32::consts::LOG2_E), round), round);
    let r = s.fma(n, s.splat(-LN2_HIGH), x);
    let r = s.fma(n, s.splat(-LN2_LOW), r);
    let mut series = s.splat(1.0 / 5040.0);
    for coefficient in FACTORIALS {
        series = s.fma(series, r, s.splat(coefficient));
    }
    let e = s.fma(series, r, s.splat(1.0));
    // In two factors, so that results below the smallest normal number and above the largest are rounded only once.
    let half = s.sub(s.fma(n, s.splat(0.5), round), round);
    s.mul(s.mul(e, s.pow2(half)), s.pow2(s.sub(n, half)))
}

/// 1 / (1 + e^-x)
#[inline(always)]
pub(crate) fn sigmoid<S: Simd>(s: S, x: S::F) -> S::F {
    let one = s.splat(1.0);
    s.div(one, s.add(one, exp(s, s.sub(s.zero(), x))))
}

/// x / (1 + e^-x)
#[inline(always)]
pub(crate) fn silu<S: Simd>(s: S, x: S::F) -> S::F {
    s.div(x, s.add(s.splat(1.0), exp(s, s.sub(s.zero(), x))))
}

/// Sum of squares: four vectors of lanes by index modulo 32, in order.
#[inline(always)]
pub(crate) fn sum_of_squares<S: Simd>(s: S, x: &[f32]) -> f32 {
    let mut sums = [s.zero(); 4];
    let (x8, tail) = x.as_chunks::<LANES>();
    let (quads, rest) = x8.as_chunks::<4>();
    for quad in quads {
        for (sum, x) in sums.iter_mut().zip(quad) {
            let x = s.load(x);
            *sum = s.fma(x, x, *sum);
        }
    }
    for (sum, x) in sums.iter_mut().zip(rest) {
        let x = s.load(x);
        *sum = s.fma(x, x, *sum);
    }
    if !tail.is_empty() {
        let x = s.load_part(tail);
        sums[rest.len()] = s.fma(x, x, sums[rest.len()]);
    }
    s.sum(s.add(s.add(sums[0], sums[1]), s.add(sums[2], sums[3])))
}
