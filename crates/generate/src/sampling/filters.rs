//! Temperature, top-k, top-p and min-p.

use std::cmp::Ordering;

use recant_core::{Candidate, Readout};

use super::left::Left;
use super::math;
use super::row::View;
use super::Sampling;

/// Logits that are looked at together.
const BLOCK: usize = 64;

/// Most tokens that top-k may keep for a model to be asked for those only.
const FEW: usize = 64;

/// Which tokens of a row may be chosen. Greedy is the top one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Filters {
    inverse: f32,
    top_k: Option<usize>,
    top_p: f32,
    /// The logarithm of min-p.
    floor: f32,
}

/// Memory that is used again for every row.
#[derive(Debug, Default)]
pub(super) struct Kept {
    picks: Vec<Candidate>,
    /// Picks of which some stay.
    border: Vec<Candidate>,
    ids: Vec<u32>,
    logits: Vec<f32>,
}

impl Filters {
    /// All of a row, as it is.
    pub(super) const NONE: Self = Self {
        inverse: 1.0,
        top_k: None,
        top_p: 1.0,
        floor: f32::NEG_INFINITY,
    };

    /// The largest.
    pub(super) const GREEDY: Self = Self {
        top_k: Some(1),
        ..Self::NONE
    };

    pub(super) fn new(sampling: &Sampling) -> Self {
        if sampling.is_greedy() {
            return Self::GREEDY;
        }
        Self {
            inverse: 1.0 / sampling.temperature,
            top_k: Some(sampling.top_k).filter(|k| *k > 0),
            top_p: sampling.top_p,
            floor: sampling.min_p.ln(),
        }
    }

    /// What to ask of logits that nothing changes before they come here, of which the first `width` count.
    pub(super) fn readout(&self, width: usize) -> Readout {
        match self.top_k {
            Some(count) if count <= FEW => Readout::Largest { count, among: width },
            _ => Readout::All,
        }
    }

    /// What is left of a row whose logits are of `ids`, if not each of its own place. None: no logit is a number above minus
    /// infinity. If only the largest are known, they are as many as [`readout`](Self::readout) asked for.
    pub(super) fn apply<'a>(
        &self,
        row: View<'a>,
        ids: Option<&'a [u32]>,
        kept: &'a mut Kept,
    ) -> Option<Left<'a>> {
        match row {
            View::All(logits) => self.apply_to_all(logits, ids, kept),
            View::Largest(largest) => {
                kept.picks.clear();
                let known = largest.iter().filter(|pick| pick.logit > f32::NEG_INFINITY);
                kept.picks.extend(known.take(self.top_k.unwrap_or(usize::MAX)));
                self.apply_to_picks(ids, kept)
            }
        }
    }

    fn apply_to_all<'a>(
        &self,
        row: &'a [f32],
        ids: Option<&'a [u32]>,
        kept: &'a mut Kept,
    ) -> Option<Left<'a>> {
        if let Some(k) = self.top_k.filter(|k| *k < row.len()) {
            select(row, k, &mut kept.picks);
            return self.apply_to_picks(ids, kept);
        }
        let max = math::largest(row);
        if max == f32::NEG_INFINITY {
            return None;
        }
        let x = |logit: f32| (logit - max) * self.inverse;
        // Whatever is less likely than this goes: by min-p, or because all of its kind together are what top-p drops.
        let mut floor = self.floor;
        let mut total = None;
        if self.top_p < 1.0 && max < f32::INFINITY {
            let sum = math::sum(row, |logit| math::exp(x(logit)));
            let spare = 0.5 * (1.0 - f64::from(self.top_p)) * sum / row.len() as f64;
            floor = floor.max(spare.ln() as f32);
            total = Some(sum);
        }
        if max == f32::INFINITY {
            pick(row, &mut kept.picks, |logit| logit == max);
        } else if floor > f32::NEG_INFINITY {
            pick(row, &mut kept.picks, |logit| x(logit) >= floor);
        } else {
            let inverse = self.inverse;
            return Some(Left {
                logits: row,
                ids,
                max,
                inverse,
            });
        }
        self.narrow(max, total, kept);
        Some(kept.left(ids))
    }

    fn apply_to_picks<'a>(&self, ids: Option<&[u32]>, kept: &'a mut Kept) -> Option<Left<'a>> {
        let logits = kept.picks.iter().map(|pick| pick.logit);
        let max = logits.fold(f32::NEG_INFINITY, f32::max);
        if max == f32::NEG_INFINITY {
            return None;
        }
        kept.picks.sort_unstable_by_key(|pick| pick.id);
        self.narrow(max, None, kept);
        Some(kept.left(ids))
    }

    /// Applies temperature, top-p and min-p to picks, whose order stays. `total` is the sum of all weights, if not all are picks.
    fn narrow(&self, max: f32, total: Option<f64>, kept: &mut Kept) {
        let picks = &mut kept.picks;
        for pick in picks.iter_mut() {
            // Beside infinity all others are infinitely far.
            pick.logit = if pick.logit == max {
                0.0
            } else {
                (pick.logit - max) * self.inverse
            };
        }
        if self.top_p < 1.0 {
            let total = total.unwrap_or_else(|| picks.iter().map(weight).sum());
            keep_mass(picks, f64::from(self.top_p) * total, &mut kept.border);
        }
        picks.retain(|pick| pick.logit >= self.floor);
    }
}

impl Kept {
    fn left<'a>(&'a mut self, ids: Option<&[u32]>) -> Left<'a> {
        let id = |pick: &Candidate| ids.map_or(pick.id, |ids| ids[pick.id as usize]);
        self.ids.clear();
        self.ids.extend(self.picks.iter().map(id));
        self.logits.clear();
        self.logits.extend(self.picks.iter().map(|pick| pick.logit));
        Left {
            logits: &self.logits,
            ids: Some(&self.ids),
            max: 0.0,
            inverse: 1.0,
        }
    }
}

fn weight(pick: &Candidate) -> f64 {
    f64::from(math::exp(pick.logit))
}

/// The largest first, the lowest id among equals. Zeros of either sign are equal, as they are in comparisons elsewhere.
pub(super) fn order(a: &Candidate, b: &Candidate) -> Ordering {
    let larger = b.logit.partial_cmp(&a.logit);
    larger.unwrap_or(Ordering::Equal).then(a.id.cmp(&b.id))
}

/// The `k` largest logits above minus infinity, at least one being asked for, in no order; the lowest ids among equals.
pub(super) fn select(row: &[f32], k: usize, picks: &mut Vec<Candidate>) {
    let shrink = |picks: &mut Vec<Candidate>| {
        if picks.len() >= k {
            picks.select_nth_unstable_by(k - 1, order);
            picks.truncate(k);
        }
        picks.last().map_or(f32::NEG_INFINITY, |last| last.logit)
    };
    picks.clear();
    let room = (2 * k).max(BLOCK);
    let mut least = f32::NEG_INFINITY;
    let mut first = 0;
    for block in row.chunks(BLOCK) {
        if math::any_above(block, least) {
            let candidates = (first..).zip(block).map(|(id, &logit)| Candidate { id, logit });
            picks.extend(candidates.filter(|candidate| candidate.logit > least));
            if picks.len() >= room {
                least = shrink(picks);
            }
        }
        first += BLOCK as u32;
    }
    shrink(picks);
}

/// The logits that pass, in ascending order of their ids.
fn pick(row: &[f32], picks: &mut Vec<Candidate>, passes: impl Fn(f32) -> bool) {
    picks.clear();
    let mut first = 0;
    for block in row.chunks(BLOCK) {
        if block.iter().fold(false, |any, logit| any | passes(*logit)) {
            let candidates = (first..).zip(block).map(|(id, &logit)| Candidate { id, logit });
            picks.extend(candidates.filter(|candidate| passes(candidate.logit)));
        }
        first += BLOCK as u32;
    }
}

/// Keeps the fewest largest picks whose weights sum to at least `mass`. Their order stays.
///
/// Weights are summed by classes of nearly equal logits first. Only those of the class that holds the border are then
/// put in order, and those only as far as needed.
fn keep_mass(picks: &mut Vec<Candidate>, mass: f64, border: &mut Vec<Candidate>) {
    const CLASSES: usize = 512;
    let class = |pick: &Candidate| ((-pick.logit * 32.0) as usize).min(CLASSES - 1);
    let mut sums = [0.0; CLASSES];
    for pick in picks.iter() {
        sums[class(pick)] += weight(pick);
    }
    let mut before = 0.0;
    let reaches = |sum: &f64| {
        let reached = before + sum >= mass;
        if !reached {
            before += sum;
        }
        reached
    };
    let Some(last) = sums.iter().position(reaches) else {
        // Rounding: all weights together are what is asked for.
        return;
    };
    border.clear();
    border.extend(picks.iter().filter(|pick| class(pick) == last));
    let Some(worst) = worst_kept(border, mass - before) else {
        return;
    };
    picks.retain(|pick| order(pick, &worst) != Ordering::Greater);
}

/// The last one needed for the fewest largest picks whose weights sum to at least `mass`.
///
/// A search by halves: each step looks at half as many as the one before, and nothing is sorted.
fn worst_kept(picks: &mut [Candidate], mut mass: f64) -> Option<Candidate> {
    let mut rest = picks;
    while rest.len() > 1 {
        let middle = rest.len() / 2;
        rest.select_nth_unstable_by(middle, order);
        let (better, worse) = rest.split_at_mut(middle);
        let sum: f64 = better.iter().map(weight).sum();
        if sum >= mass {
            rest = better;
        } else {
            mass -= sum;
            rest = worse;
        }
    }
    rest.first().copied()
}
