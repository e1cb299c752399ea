//! Probabilities of tokens.

use super::math;
use crate::{Error, Result};

/// Probabilities that are summed together.
const BLOCK: usize = 256;

/// Probabilities of the next token: ids ascending, each probability above 0; what is not in it has none.
///
/// The probabilities, rounded to f32, sum to 1 up to that rounding.
#[derive(Debug, Clone, PartialEq)]
pub struct Distribution {
    ids: Vec<u32>,
    probabilities: Vec<f32>,
}

impl Distribution {
    /// The distribution of these weights, one for each id, which need not sum to 1.
    ///
    /// # Errors
    /// [`Error::Parameter`]: ids that do not ascend, another number of weights than of ids, a weight that is negative or not
    /// finite, or none above 0.
    pub fn new(ids: Vec<u32>, mut weights: Vec<f32>) -> Result<Self> {
        let wrong = |found: String, expected: &str| Err(Error::parameter("distribution", found, expected));
        if ids.len() != weights.len() {
            let found = format!("of {} ids and {} weights", ids.len(), weights.len());
            return wrong(found, "as many of each");
        }
        if let Some(pair) = ids.windows(2).find(|pair| pair[0] >= pair[1]) {
            return wrong(format!("with id {} after {}", pair[1], pair[0]), "ascending ids");
        }
        if let Some(weight) = weights
            .iter()
            .find(|weight| !weight.is_finite() || **weight < 0.0)
        {
            return wrong(format!("with a weight of {weight}"), "numbers from 0");
        }
        let max = math::largest(&weights);
        if max <= 0.0 {
            return wrong("without a weight above 0".to_owned(), "at least one");
        }
        weights.iter_mut().for_each(|weight| *weight /= max);
        Ok(Self::of_weights(ids, weights))
    }

    /// As [`new`](Self::new), of weights that it does not refuse and the largest of which is 1.
    pub(super) fn of_weights(mut ids: Vec<u32>, mut probabilities: Vec<f32>) -> Self {
        let share = (1.0 / math::sum(&probabilities, |weight| weight)) as f32;
        probabilities.iter_mut().for_each(|weight| *weight *= share);
        if probabilities.contains(&0.0) {
            let mut kept = probabilities.iter().map(|p| *p > 0.0);
            ids.retain(|_| kept.next() == Some(true));
            probabilities.retain(|p| *p > 0.0);
        }
        Self { ids, probabilities }
    }

    /// The ids, ascending.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Their probabilities.
    pub fn probabilities(&self) -> &[f32] {
        &self.probabilities
    }

    /// The probability of one token.
    pub fn of(&self, id: u32) -> f32 {
        self.ids
            .binary_search(&id)
            .map_or(0.0, |place| self.probabilities[place])
    }

    /// Ids and probabilities.
    pub fn iter(&self) -> impl Iterator<Item = (u32, f32)> + Clone + '_ {
        self.ids.iter().copied().zip(self.probabilities.iter().copied())
    }

    /// The token at `uniform`, a number from 0 to 1, of the way through all probability.
    pub(super) fn pick(&self, uniform: f64) -> Option<u32> {
        let sums = || {
            self.probabilities
                .chunks(BLOCK)
                .map(|block| math::sum(block, |p| p))
        };
        let mut left = uniform * sums().sum::<f64>();
        let mut place = 0;
        for sum in sums() {
            if left < sum {
                break;
            }
            left -= sum;
            place += BLOCK;
        }
        let inside = self.iter().skip(place).find(|(_, p)| {
            left -= f64::from(*p);
            left < 0.0
        });
        // Rounding may leave a little at the end.
        inside.map(|(id, _)| id).or(self.ids.last().copied())
    }

    /// The token at `uniform` of the way through what `scale` times this distribution has in excess of `from`; none
    /// if there is no excess.
    pub(super) fn pick_excess(&self, scale: f64, from: &Proposed, uniform: f64) -> Option<u32> {
        pick(self.excess(scale, from), uniform)
    }

    /// How much `scale` times this distribution has in excess of the one that a proposal was drawn from.
    pub(super) fn total_excess(&self, scale: f64, from: &Proposed) -> f64 {
        self.excess(scale, from).map(|(_, mass)| mass).sum()
    }

    fn excess<'a>(&'a self, scale: f64, from: &'a Proposed) -> impl Iterator<Item = (u32, f64)> + Clone + 'a {
        let mut others = from.masses().peekable();
        self.iter().map(move |(id, p)| {
            while others.next_if(|(other, _)| *other < id).is_some() {}
            let other = others.next_if(|(other, _)| *other == id).map_or(0.0, |(_, q)| q);
            (id, (scale * f64::from(p) - f64::from(other)).max(0.0))
        })
    }
}

/// The token at `uniform` of the way through all mass.
fn pick(masses: impl Iterator<Item = (u32, f64)> + Clone, uniform: f64) -> Option<u32> {
    let total: f64 = masses.clone().map(|(_, mass)| mass).sum();
    let mut left = uniform * total;
    let mut last = None;
    for (id, mass) in masses.filter(|(_, mass)| *mass > 0.0) {
        last = Some(id);
        left -= mass;
        if left < 0.0 {
            break;
        }
    }
    last
}

/// A drafted token, and what it was drawn from.
///
/// Rules rely on it: the token must be a draw from exactly this distribution, independent of the target's numbers. Whether
/// a token is proposed at all may depend on the tokens before it, never on the token itself.
#[derive(Debug, Clone, PartialEq)]
pub struct Proposed {
    /// The token.
    pub id: u32,
    /// What it was drawn from. None: a guess that chance had no part in, or whose chance the rule already knows.
    pub from: Option<Distribution>,
}

impl Proposed {
    /// A guess that chance had no part in.
    pub fn guess(id: u32) -> Self {
        Self { id, from: None }
    }

    /// The probability with which this token was drafted.
    ///
    /// # Errors
    /// There was none, though the token was drafted.
    pub(super) fn probability(&self) -> Result<f32> {
        match self.from.as_ref().map(|from| from.of(self.id)) {
            None => Ok(1.0),
            Some(q) if q > 0.0 => Ok(q),
            Some(_) => Err(Error::Drafter(format!(
                "it proposed token {} as drawn from a distribution that does not hold it",
                self.id
            ))),
        }
    }

    /// Ids, ascending, and their probabilities of being drafted.
    fn masses(&self) -> impl Iterator<Item = (u32, f32)> + Clone + '_ {
        let (ids, probabilities) = match &self.from {
            Some(from) => (from.ids(), from.probabilities()),
            None => (std::slice::from_ref(&self.id), [1.0].as_slice()),
        };
        ids.iter().copied().zip(probabilities.iter().copied())
    }
}
