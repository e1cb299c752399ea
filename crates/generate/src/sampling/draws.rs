//! How drafters choose.

use super::filters::Filters;
use super::noise::Stream;
use super::row::{on_host, rows_differ, View};
use super::rules::Noise;
use super::sampler::{nothing, Sampler, Work};
use super::{Proposed, Row, Rule};
use crate::{Error, Result};
use recant_core::Readout;

/// How a drafter chooses its tokens in one round: as the target will, over its own logits.
///
/// Bias, penalties, temperature and filters apply as they do to the target's, with the drafted tokens counted. Processors
/// of the caller's do not: they may see only tokens that stay.
#[derive(Clone, Copy)]
pub struct Draws<'a> {
    /// None: greedy.
    sampler: Option<&'a Sampler>,
    text: &'a [u32],
}

impl<'a> Draws<'a> {
    /// Greedy draws, for whoever drafts without a sampler.
    pub fn greedy() -> Self {
        Self {
            sampler: None,
            text: &[],
        }
    }

    pub(super) fn new(sampler: &'a Sampler, text: &'a [u32]) -> Self {
        Self {
            sampler: Some(sampler),
            text,
        }
    }

    /// What to ask of the drafter's model, of whose logits the first `width` count.
    pub fn readout(&self, width: usize) -> Readout {
        match self.sampler {
            None => Filters::GREEDY.readout(width),
            Some(sampler) if sampler.sampling().adjusts() => Readout::All,
            Some(sampler) => sampler.filters().readout(width),
        }
    }

    /// Chooses the token after `drafted`, the tokens that were proposed before it in this round.
    ///
    /// `logits` is a row that was asked for with [`readout`](Self::readout) of this `width`. They are of `ids`, which
    /// ascend, if not each of its own place.
    ///
    /// # Errors
    /// No logit is a number, or the row is not one row of this width.
    pub fn choose(
        &self,
        drafted: &[u32],
        logits: Row<'_>,
        ids: Option<&[u32]>,
        width: usize,
    ) -> Result<Proposed> {
        let known = ids.map_or(width, <[u32]>::len);
        if known < width {
            return Err(recant_core::Error::mismatch("ids of a row of logits", width, known).into());
        }
        let mut work = self.sampler.map(Sampler::take_work).unwrap_or_default();
        let chosen = match logits {
            Row::Largest(largest) => match largest.iter().find(|candidate| candidate.id as usize >= width) {
                None => self.choose_from(View::Largest(largest), drafted, ids, &mut work),
                Some(candidate) => {
                    let expected = format!("below {width}");
                    Err(
                        recant_core::Error::mismatch("places in a row of logits", expected, candidate.id)
                            .into(),
                    )
                }
            },
            Row::All(tensor) => on_host(tensor, |rows| match rows.count() {
                1 => self.choose_from(rows.row(0, width), drafted, ids, &mut work),
                count => Err(rows_differ(1, count)),
            }),
        };
        if let Some(sampler) = self.sampler {
            sampler.put_work(work);
        }
        chosen
    }

    fn choose_from(
        &self,
        raw: View<'_>,
        drafted: &[u32],
        ids: Option<&[u32]>,
        work: &mut Work,
    ) -> Result<Proposed> {
        let Work { history, copy, kept } = work;
        let row = match (raw, self.sampler) {
            (View::All(logits), Some(sampler)) if sampler.sampling().adjusts() => {
                copy.clear();
                copy.extend_from_slice(logits);
                sampler.adjust(history, self.text, drafted, ids, copy);
                View::All(copy)
            }
            _ => raw,
        };
        let (filters, rule, seed) = match self.sampler {
            Some(sampler) => (sampler.filters(), sampler.rule(), sampler.sampling().seed),
            None => (Filters::GREEDY, Rule::Coupled, 0),
        };
        let start = self.text.len();
        let noise = Noise { seed, start };
        let Some(left) = filters.apply(row, ids, kept) else {
            return match nothing(raw, start + drafted.len()) {
                // All that this drafter knows is banned. Any guess will do: it will be rejected.
                Error::Banned { .. } => Ok(Proposed::guess(
                    ids.and_then(|ids| ids.first().copied()).unwrap_or(0),
                )),
                error => Err(error),
            };
        };
        if rule == Rule::Coupled {
            return Ok(Proposed::guess(left.race(noise.race(start + drafted.len()))));
        }
        let from = left.distribution();
        let id = from.pick(noise.uniform(Stream::Draft, drafted.len()));
        Ok(Proposed {
            id: id.unwrap_or_default(),
            from: Some(from),
        })
    }
}
