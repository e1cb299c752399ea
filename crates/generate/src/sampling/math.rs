//! Loops over whole rows, in forms that become vector code.

const LANES: usize = 16;

/// Below this `exp` gives 0: the least normal number is not far.
const LEAST: f32 = -87.0;

/// The exponential of a number that is not above 0, to a relative 1.5e-7. Numbers below -87, and NaN, give 0.
///
/// Without calls or branches, unlike `f32::exp`, and the same on every machine.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    /// Adding it rounds to a whole number and leaves that in the low bits.
    const ROUND: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let inside = if x > LEAST { x } else { LEAST };
    let shifted = inside * std::f32::consts::LOG2_E + ROUND;
    let whole = shifted - ROUND;
    let r = inside - whole * LN2_HIGH - whole * LN2_LOW;
    let mut sum = 1.0 / 5040.0;
    for term in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        sum = sum * r + term;
    }
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(1.0f32.to_bits()));
    if x >= LEAST {
        sum * power
    } else {
        0.0
    }
}

/// The largest number; minus infinity if there is none.
pub(super) fn largest(row: &[f32]) -> f32 {
    let greater = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let mut chunks = row.chunks_exact(LANES);
    for chunk in &mut chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane = greater(*lane, *x);
        }
    }
    let rest = chunks.remainder().iter().copied();
    lanes.into_iter().chain(rest).fold(f32::NEG_INFINITY, greater)
}

/// The sum of `f` over a row, in f64.
#[inline(always)]
pub(super) fn sum(row: &[f32], f: impl Fn(f32) -> f32) -> f64 {
    let mut lanes = [0.0f64; LANES];
    let mut chunks = row.chunks_exact(LANES);
    for chunk in &mut chunks {
        // All values before any sum: otherwise this does not become vector code.
        let mut values = [0.0; LANES];
        for (value, x) in values.iter_mut().zip(chunk) {
            *value = f(*x);
        }
        for (lane, value) in lanes.iter_mut().zip(values) {
            *lane += f64::from(value);
        }
    }
    let rest: f64 = chunks.remainder().iter().map(|x| f64::from(f(*x))).sum();
    lanes.into_iter().sum::<f64>() + rest
}

/// Whether any number of a row is greater than `least`, without a branch for each.
#[inline(always)]
pub(super) fn any_above(row: &[f32], least: f32) -> bool {
    row.iter().fold(false, |any, x| any | (*x > least))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponentials_are_right_to_the_last_bits() {
        for step in 0..870_000 {
            let x = -(step as f32) / 10_000.0;
            let exact = f64::from(x).exp();
            let error = (f64::from(exp(x)) - exact).abs() / exact;
            assert!(error < 1.5e-7, "{x}: {error}");
        }
        assert_eq!(exp(0.0), 1.0);
        for x in [-87.1, -1e30, f32::NEG_INFINITY, f32::NAN] {
            assert_eq!(exp(x), 0.0);
        }
    }

    #[test]
    fn whole_rows_are_looked_at() {
        for length in 0..70 {
            let mut row = vec![0.0; length];
            assert_eq!(sum(&row, |x| x + 1.0), length as f64);
            for place in 0..length {
                row[place] = 1.0;
                assert_eq!(largest(&row), 1.0);
                assert!(any_above(&row, 0.5));
                row[place] = f32::NAN;
            }
            assert_eq!(largest(&row), f32::NEG_INFINITY);
            assert!(!any_above(&row, f32::NEG_INFINITY));
        }
    }
}
