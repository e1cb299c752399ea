//! Chooses the tokens of one sequence.

use std::cell::Cell;

use recant_core::{Readout, SegmentOutput};

use super::filters::{Filters, Kept};
use super::history::{adjust, History};
use super::row::{on_host, rows_differ, Rows, View};
use super::rules::{by_block, by_token, Noise};
use super::{Distribution, Draws, Logprobs, LogprobsOf, LogprobsOptions};
use super::{LogitsProcessor, Proposed, Rule, Sampling};
use crate::{Error, Result};

/// What a round decided.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Verdict {
    /// Tokens that stay: accepted drafts, then one that the target chose, unless the text ended before.
    pub tokens: Vec<u32>,
    /// How many of them are accepted drafts.
    pub accepted: usize,
    /// The last token ends the text.
    pub ended: bool,
    /// How likely each token was; empty if that was not asked for.
    pub logprobs: Vec<Logprobs>,
}

/// Chooses the tokens of one sequence, and judges drafts.
///
/// [`begin`](Self::begin) with a prompt; then round by round [`draws`](Self::draws) for the drafter, and
/// [`judge`](Self::judge) with the target's logits. What it gives depends on the text, the logits and the proposals, and on
/// nothing that happened in earlier rounds; only processors of the caller's have a state, which is why a round that
/// failed is made undone with [`rewind`](Self::rewind).
///
/// # Example
/// ```
/// use recant_core::candle::{Device, Tensor};
/// use recant_core::SegmentOutput;
/// use recant_generate::{Proposed, Sampler, Sampling};
///
/// let sampling = Sampling {
///     temperature: 0.7,
///     top_k: 2,
///     seed: 1,
///     ..Sampling::default()
/// };
/// let mut sampler = Sampler::new(sampling, Vec::new(), None, 4)?;
/// let text = [0, 3];
/// sampler.begin(&text);
/// // The target's logits after the pending token, 3, and after the draft of a drafter that guesses.
/// let logits = [[0.0, 4.0, 5.0, 1.0], [9.0, 8.0, 0.0, 0.0f32]];
/// let output = SegmentOutput {
///     logits: Some(Tensor::new(&logits, &Device::Cpu)?),
///     largest: None,
///     hidden: None,
/// };
/// let verdict = sampler.judge(&text, &[Proposed::guess(2)], &output, &mut |token| Ok(token == 0))?;
/// match verdict.accepted {
///     0 => assert_eq!(verdict.tokens, [1]),
///     _ => assert!(verdict.tokens == [2, 0] || verdict.tokens == [2, 1]),
/// }
/// # Ok::<(), recant_generate::Error>(())
/// ```
pub struct Sampler {
    sampling: Sampling,
    filters: Filters,
    /// The rule that applies: greedy choices are coupled ones among one token.
    rule: Rule,
    processors: Vec<Box<dyn LogitsProcessor>>,
    logprobs: Option<LogprobsOptions>,
    vocab: usize,
    /// Tokens of the prompt.
    prompt: usize,
    /// Drafters, who have the sampler by reference, use it too.
    work: Cell<Work>,
}

/// Memory that is used again for every row. Nothing is lost when it is lost.
#[derive(Debug, Default)]
pub(super) struct Work {
    pub(super) history: History,
    /// A row that is being changed.
    pub(super) copy: Vec<f32>,
    pub(super) kept: Kept,
}

impl Sampler {
    /// A sampler of ids below `vocab`. Processors are applied in their order.
    ///
    /// # Errors
    /// [`Error::Parameter`], as [`Sampling::check`] says.
    pub fn new(
        sampling: Sampling,
        processors: Vec<Box<dyn LogitsProcessor>>,
        logprobs: Option<LogprobsOptions>,
        vocab: usize,
    ) -> Result<Self> {
        sampling.check(vocab)?;
        let rule = match sampling.rule {
            _ if sampling.is_greedy() => Rule::Coupled,
            Rule::Block if !processors.is_empty() => Rule::Token,
            rule => rule,
        };
        Ok(Self {
            filters: Filters::new(&sampling),
            rule,
            sampling,
            processors,
            logprobs,
            vocab,
            prompt: 0,
            work: Cell::default(),
        })
    }

    /// How tokens are chosen.
    pub fn sampling(&self) -> &Sampling {
        &self.sampling
    }

    /// What to ask of the target's rows: the largest few where no other can be chosen.
    pub fn readout(&self) -> Readout {
        if self.adjusts() || self.logprobs.is_some() {
            return Readout::All;
        }
        self.filters.readout(self.vocab)
    }

    /// Begins a text: what follows `prompt` is output.
    pub fn begin(&mut self, prompt: &[u32]) {
        self.prompt = prompt.len();
        self.rewind(prompt);
    }

    /// Goes back to `text` after a round that failed: processors begin again with it. What the prompt was stays.
    pub fn rewind(&mut self, text: &[u32]) {
        for processor in &mut self.processors {
            processor.begin(text);
        }
    }

    /// How the drafter chooses in the round that begins after `text`.
    pub fn draws<'a>(&'a self, text: &'a [u32]) -> Draws<'a> {
        Draws::new(self, text)
    }

    /// Decides a round. `text` is all of it so far, the pending token last; `output` holds the target's rows after the
    /// pending token and after each proposal, asked for with [`readout`](Self::readout).
    ///
    /// Tokens are decided in order. `ends` is asked of each one that stays; if it says so, nothing comes after that
    /// one.
    ///
    /// # Errors
    /// A row without a number or with every token banned, another number of rows, a proposal that cannot have been drawn from
    /// what it says, or what a processor or `ends` says. Then the round is void: [`rewind`](Self::rewind) to `text`.
    pub fn judge(
        &mut self,
        text: &[u32],
        proposed: &[Proposed],
        output: &SegmentOutput,
        ends: &mut dyn FnMut(u32) -> Result<bool>,
    ) -> Result<Verdict> {
        let mut work = self.work.take();
        let verdict = match (&output.largest, self.readout()) {
            (Some(largest), Readout::Largest { .. }) => {
                self.decide(&mut work, text, proposed, &Rows::Largest(largest), ends)
            }
            _ => output.logits().map_err(Error::from).and_then(|logits| {
                on_host(logits, |rows| self.decide(&mut work, text, proposed, rows, ends))
            }),
        };
        self.work.set(work);
        verdict
    }

    fn decide(
        &mut self,
        work: &mut Work,
        text: &[u32],
        proposed: &[Proposed],
        rows: &Rows<'_>,
        ends: &mut dyn FnMut(u32) -> Result<bool>,
    ) -> Result<Verdict> {
        if rows.count() != proposed.len() + 1 {
            return Err(rows_differ(proposed.len() + 1, rows.count()));
        }
        let noise = Noise {
            seed: self.sampling.seed,
            start: text.len(),
        };
        let block = match self.rule {
            Rule::Block => {
                let targets = self.targets(work, text, proposed, rows)?;
                Some(by_block(&targets, proposed, noise)?)
            }
            Rule::Coupled | Rule::Token => None,
        };
        let mut verdict = Verdict::default();
        for place in 0..rows.count() {
            let draft = proposed.get(place);
            let position = text.len() + place;
            let raw = rows.row(place, self.vocab);
            let Work { history, copy, kept } = &mut *work;
            let row = match block {
                // It is decided, and nobody asks how likely it was.
                Some(_) if self.logprobs.is_none() => raw,
                _ => self.process(history, copy, text, &verdict.tokens, raw)?,
            };
            let (token, accepted) = match &block {
                Some((accepted, last)) => match draft {
                    Some(draft) if place < *accepted => (draft.id, true),
                    _ => (*last, false),
                },
                None => {
                    let left = self.filters.apply(row, None, kept);
                    let left = left.ok_or_else(|| nothing(raw, position))?;
                    if self.rule == Rule::Coupled {
                        let token = left.race(noise.race(position));
                        (token, draft.is_some_and(|draft| draft.id == token))
                    } else {
                        by_token(&left.distribution(), draft, noise, place)?
                    }
                }
            };
            if let Some(options) = self.logprobs {
                let (filters, row) = match options.of {
                    LogprobsOf::Raw => (Filters::NONE, raw),
                    LogprobsOf::Processed if self.sampling.is_greedy() => (Filters::NONE, row),
                    LogprobsOf::Processed => (self.filters, row),
                };
                let left = filters.apply(row, None, kept);
                let left = left.ok_or_else(|| nothing(raw, position))?;
                verdict.logprobs.push(Logprobs::new(&left, token, options.top));
            }
            verdict.tokens.push(token);
            verdict.accepted += usize::from(accepted);
            for processor in &mut self.processors {
                processor.accept(token);
            }
            verdict.ended = ends(token)?;
            if verdict.ended || !accepted {
                break;
            }
        }
        Ok(verdict)
    }

    /// The target's distributions after the pending token and after each draft, though not all of them may stay.
    fn targets(
        &mut self,
        work: &mut Work,
        text: &[u32],
        proposed: &[Proposed],
        rows: &Rows<'_>,
    ) -> Result<Vec<Distribution>> {
        let drafts: Vec<u32> = proposed.iter().map(|draft| draft.id).collect();
        let Work { history, copy, kept } = work;
        let target = |place: usize| {
            let raw = rows.row(place, self.vocab);
            let row = self.process(history, copy, text, &drafts[..place], raw)?;
            let left = self.filters.apply(row, None, kept);
            let left = left.ok_or_else(|| nothing(raw, text.len() + place))?;
            Ok(left.distribution())
        };
        (0..rows.count()).map(target).collect()
    }

    /// A row after bias, penalties and processors: that of the token after `text` and `more`.
    fn process<'a>(
        &mut self,
        history: &mut History,
        copy: &'a mut Vec<f32>,
        text: &[u32],
        more: &[u32],
        row: View<'a>,
    ) -> Result<View<'a>> {
        let View::All(logits) = row else {
            // What was not asked for cannot be changed: see `readout`.
            return Ok(row);
        };
        if !self.adjusts() {
            return Ok(row);
        }
        copy.clear();
        copy.extend_from_slice(logits);
        self.adjust(history, text, more, None, copy);
        if !self.processors.is_empty() {
            history.follow(self.prompt, self.sampling.penalty_window, text, more);
            for processor in &mut self.processors {
                processor.process(history.tokens(), copy)?;
            }
        }
        Ok(View::All(copy))
    }

    /// Whether logits change before the temperature is applied.
    fn adjusts(&self) -> bool {
        self.sampling.adjusts() || !self.processors.is_empty()
    }

    /// Applies bias and penalties to the logits of the token after `text` and `more`. They are of `ids`, if not each of its
    /// own place.
    pub(super) fn adjust(
        &self,
        history: &mut History,
        text: &[u32],
        more: &[u32],
        ids: Option<&[u32]>,
        logits: &mut [f32],
    ) {
        if self.sampling.penalises() {
            history.follow(self.prompt, self.sampling.penalty_window, text, more);
        }
        adjust(&self.sampling, history, ids, logits);
    }

    pub(super) fn filters(&self) -> Filters {
        self.filters
    }

    pub(super) fn rule(&self) -> Rule {
        self.rule
    }

    pub(super) fn take_work(&self) -> Work {
        self.work.take()
    }

    pub(super) fn put_work(&self, work: Work) {
        self.work.set(work);
    }
}

/// Why nothing can be chosen from a row, which a model gave like this.
pub(super) fn nothing(row: View<'_>, position: usize) -> Error {
    if row.is_nan() {
        Error::NoNumber { position }
    } else {
        Error::Banned { position }
    }
}
