//! How likely chosen tokens were.

use super::filters::{order, select};
use super::left::Left;
use recant_core::Candidate;

/// Which distribution log-probabilities are of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogprobsOf {
    /// The model's own, at temperature 1, before bias, penalties and processors.
    Raw,
    /// The one that tokens are drawn from. At temperature 0, where that is one token: the one after bias, penalties and
    /// processors, at temperature 1 and without filters.
    Processed,
}

/// Which log-probabilities are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogprobsOptions {
    /// How many of the most likely tokens to name beside the chosen one.
    pub top: usize,
    /// The distribution.
    pub of: LogprobsOf,
}

/// How likely a chosen token was, and which tokens were most likely. Natural logarithms.
#[derive(Debug, Clone, PartialEq)]
pub struct Logprobs {
    /// Of the chosen token.
    pub logprob: f32,
    /// The most likely tokens, the most likely first, the lowest id among equals. Fewer than asked for where filters left fewer.
    pub top: Vec<(u32, f32)>,
}

impl Logprobs {
    pub(super) fn new(left: &Left<'_>, chosen: u32, top: usize) -> Self {
        let log_sum = left.log_sum();
        let logprob = |log_weight: f32| (f64::from(log_weight) - log_sum) as f32;
        let mut largest: Vec<Candidate> = Vec::new();
        let top = top.min(left.logits.len());
        if top > 0 {
            select(left.logits, top, &mut largest);
            largest.sort_unstable_by(order);
        }
        let id = |place: u32| left.ids.map_or(place, |ids| ids[place as usize]);
        Self {
            logprob: logprob(left.log_weight(chosen)),
            top: largest
                .into_iter()
                .map(|candidate| (id(candidate.id), logprob(left.scaled(candidate.logit))))
                .collect(),
        }
    }
}
