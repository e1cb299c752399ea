//! What filters leave of a row, and draws from it.

use super::math;
use super::noise::Key;
use super::Distribution;

/// Ids looked at together: most such blocks are passed over by one comparison.
const BLOCK: usize = 64;

/// The tokens that may be chosen at a position, in ascending order of their ids.
///
/// A token's weight is the exponential of `(logit - max) * inverse`, its probability the weight's share of their sum.
#[derive(Debug, Clone, Copy)]
pub(super) struct Left<'a> {
    /// At least one is `max`. NaN and minus infinity have no weight.
    pub(super) logits: &'a [f32],
    /// The ids that the logits are of, if not each of its own place.
    pub(super) ids: Option<&'a [u32]>,
    /// The largest logit, which is finite.
    pub(super) max: f32,
    /// One by the temperature.
    pub(super) inverse: f32,
}

impl Left<'_> {
    #[inline(always)]
    pub(super) fn scaled(&self, logit: f32) -> f32 {
        (logit - self.max) * self.inverse
    }

    /// The logarithm of the sum of all weights.
    pub(super) fn log_sum(&self) -> f64 {
        math::sum(self.logits, |logit| math::exp(self.scaled(logit))).ln()
    }

    /// The logarithm of a token's weight.
    pub(super) fn log_weight(&self, id: u32) -> f32 {
        let place = match self.ids {
            None => Some(id as usize),
            Some(ids) => ids.binary_search(&id).ok(),
        };
        let logit = place.and_then(|place| self.logits.get(place));
        logit.map_or(f32::NEG_INFINITY, |logit| self.scaled(*logit))
    }

    /// The probabilities.
    pub(super) fn distribution(&self) -> Distribution {
        let weights: Vec<f32> = self.logits.iter().map(|l| math::exp(self.scaled(*l))).collect();
        let ids = match self.ids {
            Some(ids) => ids.to_vec(),
            None => (0..).take(weights.len()).collect(),
        };
        Distribution::of_weights(ids, weights)
    }

    /// Draws a token: the one whose exponentially distributed arrival, as its number from `key` has it, comes first when
    /// it is hurried by the token's weight. The lowest id, should two come at once.
    ///
    /// Two distributions that draw with one key agree often, and always if they are equal.
    pub(super) fn race(&self, key: Key) -> u32 {
        let mut winner = self.ids.and_then(|ids| ids.first().copied()).unwrap_or(0);
        let mut best = f64::NEG_INFINITY;
        // What a bound has to exceed: less than `best` by what rounding may take off a bound.
        let mut least = f32::NEG_INFINITY;
        let mut first = 0;
        for logits in self.logits.chunks(BLOCK) {
            let mut ids = [0; BLOCK];
            match self.ids {
                Some(all) => ids[..logits.len()].copy_from_slice(&all[first..first + logits.len()]),
                None => (first as u32..).zip(&mut ids).for_each(|(id, place)| *place = id),
            }
            first += logits.len();
            let mut bounds = [f32::NEG_INFINITY; BLOCK];
            for ((bound, id), logit) in bounds.iter_mut().zip(&ids).zip(logits) {
                *bound = self.scaled(*logit) + earliest(key.coarse(*id));
            }
            if !math::any_above(&bounds, least) {
                continue;
            }
            for ((bound, id), logit) in bounds.iter().zip(&ids).zip(logits) {
                if *bound > least {
                    let arrival = -(-key.fine(*id)).ln_1p();
                    let score = f64::from(self.scaled(*logit)) - arrival.ln();
                    if score > best {
                        (winner, best) = (*id, score);
                        least = (best - best.abs() * 1e-6 - 1e-3) as f32;
                    }
                }
            }
        }
        winner
    }
}

/// At least minus the logarithm of the arrival whose number begins with these bits.
///
/// An arrival `-ln(1 - v)` is at least `v`, and `v` at least what its first 24 bits say. The logarithm of those is read off
/// their form as a floating-point number, with the mantissa for the logarithm of the fraction, which is never too much.
#[inline(always)]
fn earliest(coarse: u32) -> f32 {
    let number = (coarse >> 8) as i32 as f32;
    let log2 = number.to_bits() as i32 as f32 * (1.0 / (1 << 23) as f32);
    (127.0 + 24.0 - log2) * std::f32::consts::LN_2
}

#[cfg(test)]
mod tests {
    use super::super::noise::Stream;
    use super::*;

    #[test]
    fn the_bound_of_an_arrival_is_never_below_it() {
        let edges = (0..=40).flat_map(|shift| {
            let bits = (u64::from(u32::MAX) + 1) >> shift;
            [bits.saturating_sub(1), bits, bits + 1]
        });
        let spread = (0..20_000u64).map(|i| i * 214_748);
        for coarse in edges.chain(spread).filter_map(|bits| u32::try_from(bits).ok()) {
            // The least number that begins so.
            let v = (u64::from(coarse) << 21 | 1) as f64 / (1u64 << 53) as f64;
            let exact = -(-(-v).ln_1p()).ln();
            let bound = f64::from(earliest(coarse));
            assert!(bound + 1e-3 > exact, "{coarse}: {bound} and {exact}");
            assert!(
                !(1 << 20..1 << 30).contains(&coarse) || bound < exact + 0.3,
                "{coarse}"
            );
        }
    }

    #[test]
    fn a_race_skips_nobody_who_would_win() {
        let logits: Vec<f32> = (0..5_000u32)
            .map(|i| (i.wrapping_mul(2_654_435_761) >> 20) as f32 / 400.0)
            .collect();
        let max = math::largest(&logits);
        for inverse in [0.2, 1.0, 3.0] {
            let left = Left {
                logits: &logits,
                ids: None,
                max,
                inverse,
            };
            for position in 0..200 {
                let key = Key::new(5, Stream::Race, position, 0);
                let score =
                    |id: u32| f64::from(left.scaled(logits[id as usize])) - (-(-key.fine(id)).ln_1p()).ln();
                let best = (0..5_000).max_by(|a, b| score(*a).total_cmp(&score(*b)));
                assert_eq!(Some(left.race(key)), best);
            }
        }
    }
    /// Many tokens, many positions: no token and no pair of neighbours is favoured.
    #[test]
    fn a_race_among_many_is_fair() {
        let logits = vec![0.0; 30_000];
        let left = Left {
            logits: &logits,
            ids: None,
            max: 0.0,
            inverse: 1.0,
        };
        for seed in 0..3 {
            let winner = |position| left.race(Key::new(seed, Stream::Race, position, 0)) as usize;
            let winners: Vec<usize> = (0..8_000).map(winner).collect();
            let counts = |cells: usize, cell: &dyn Fn(usize) -> usize| {
                let mut counts = vec![0; cells];
                (1..winners.len()).for_each(|position| counts[cell(position)] += 1);
                counts
            };
            for counts in [
                counts(60, &|position| winners[position] / 500),
                counts(60, &|position| winners[position] % 60),
                counts(64, &|position| {
                    winners[position] % 8 * 8 + winners[position - 1] % 8
                }),
            ] {
                let expected = 7_999.0 / counts.len() as f64;
                let square: f64 = counts
                    .iter()
                    .map(|count| (f64::from(*count) - expected).powi(2) / expected)
                    .sum();
                // Less than once in 10,000 times by chance.
                assert!(square < 112.0, "seed {seed}: {square} of {} cells", counts.len());
            }
        }
    }
}
