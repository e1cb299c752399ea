//! A step of any number of sequences in one call of their model.

use std::sync::Arc;
use std::time::{Duration, Instant};

use recant_core::{Cache, CacheStack, Cancel, Output, Rows, Segment, SegmentOutput, Transaction};

use super::{Decoder, Done, Line, Phases, Round, Token};
use crate::depth::{Controller, Sample};
use crate::{Depth, Error, Proposed, Result};

/// What a decoder is to do in a step: to read on in its prompt, or if that is read, a round.
pub struct Step<'a> {
    /// The sequence.
    pub decoder: &'a mut Decoder,
    /// How many tokens to draft.
    pub depth: Depth,
    /// Most tokens that may come out, at least one.
    pub room: usize,
    /// Most tokens of a prompt to read, at least one.
    pub chunk: usize,
    /// Asked of every token that comes out, in order: true if nothing is to come after it.
    pub ends: &'a mut dyn FnMut(u32) -> Result<bool>,
    /// Stops the step between two layers, if all steps of the call are cancelled.
    pub cancel: Option<&'a Cancel>,
}

/// Carries out steps of decoders of one model in one call of it. Each result is, bit for bit, that of a step alone.
///
/// # Errors
/// One a step: there is no prompt, no room, or the model or the drafter fails. A round that failed leaves text and caches as
/// they were; a prompt that could not be read leaves an empty decoder. If the call fails for all, each step is tried
/// again by itself, so that one does not stop the others.
pub fn step(steps: &mut [Step<'_>]) -> Vec<Result<Done>> {
    let plans: Vec<Result<Plan>> = steps.iter_mut().map(Plan::new).collect();
    let mut results = Vec::with_capacity(steps.len());
    let mut open = Vec::with_capacity(steps.len());
    let model = steps.first().map(|step| Arc::clone(step.decoder.model()));
    for (index, (step, plan)) in steps.iter_mut().zip(plans).enumerate() {
        let begun = plan.and_then(|plan| {
            if !model
                .as_ref()
                .is_some_and(|model| Arc::ptr_eq(model, step.decoder.model()))
            {
                return Err(Error::OtherModel);
            }
            Open::new(step, plan)
        });
        match begun {
            Ok(begun) => {
                open.push((index, begun));
                results.push(None);
            }
            Err(error) => results.push(Some(Err(error))),
        }
    }
    let Some(model) = model.filter(|_| !open.is_empty()) else {
        return results.into_iter().flatten().collect();
    };

    let start = Instant::now();
    let mut segments: Vec<Segment<'_>> = open.iter_mut().map(|(_, open)| open.segment()).collect();
    let rows: usize = segments.iter().map(|segment| segment.tokens.len()).sum();
    let output = model
        .forward(&mut segments)
        .map_err(Error::from)
        .and_then(|output| {
            let Output { segments: outputs } = output;
            match outputs.len() == segments.len() {
                true => Ok(outputs),
                false => {
                    Err(
                        recant_core::Error::mismatch("outputs of a call", segments.len(), outputs.len())
                            .into(),
                    )
                }
            }
        });
    drop(segments);
    let each = start.elapsed().div_f64(rows as f64);

    match output {
        Ok(outputs) => {
            for ((index, open), output) in open.into_iter().zip(outputs) {
                results[index] = Some(open.finish(&output, each));
            }
        }
        Err(error) => match open.len() {
            1 => {
                if let Some((index, open)) = open.pop() {
                    open.fail();
                    results[index] = Some(Err(error));
                }
            }
            _ => {
                let failed: Vec<usize> = open.iter().map(|(index, _)| *index).collect();
                open.into_iter().for_each(|(_, open)| open.start_over());
                for index in failed {
                    results[index] = step(&mut steps[index..=index]).pop();
                }
            }
        },
    }
    results.into_iter().flatten().collect()
}

/// What one step feeds.
struct Plan {
    tokens: Vec<u32>,
    work: Work,
    draft: Duration,
}

enum Work {
    /// Tokens of the prompt become part of the text.
    Read,
    Round {
        proposed: Vec<Proposed>,
        asked: usize,
    },
}

impl Plan {
    fn new(step: &mut Step<'_>) -> Result<Self> {
        if let Some(cancel) = step.cancel {
            cancel.check()?;
        }
        let Decoder { caches, line } = &mut *step.decoder;
        let Some(&pending) = line.tokens.last() else {
            return Err(Error::EmptyPrompt);
        };
        let mut tokens = vec![pending];
        if !line.unread.is_empty() {
            let chunk = line.chunk(caches.len(), step.chunk);
            tokens.extend_from_slice(&line.unread[..chunk - 1]);
            return Ok(Self {
                tokens,
                work: Work::Read,
                draft: Duration::ZERO,
            });
        }
        if step.room == 0 {
            return Err(Error::NoRoom);
        }
        let start = Instant::now();
        let left = line.model.spec().max_positions.saturating_sub(caches.len() + 1);
        let depth = line.depth(step.depth);
        let asked = match &line.drafter {
            Some(_) => depth.min(step.room - 1).min(left),
            None => 0,
        };
        let mut proposed = Vec::new();
        if let (Some(drafter), true) = (&mut line.drafter, asked > 0) {
            let vocab = line.model.spec().vocab_size;
            proposed = drafter.draw(asked, &line.sampler.draws(&line.tokens))?;
            proposed.truncate(asked);
            let known = proposed.iter().position(|token| token.id as usize >= vocab);
            proposed.truncate(known.unwrap_or(asked));
        }
        tokens.extend(proposed.iter().map(|token| token.id));
        Ok(Self {
            tokens,
            work: Work::Round { proposed, asked },
            draft: start.elapsed(),
        })
    }
}

/// A step whose call is under way.
struct Open<'a> {
    caches: Held<'a>,
    line: &'a mut Line,
    plan: Plan,
    depth: Depth,
    ends: &'a mut dyn FnMut(u32) -> Result<bool>,
    cancel: Option<&'a Cancel>,
    /// Opening the checkpoint.
    opening: Duration,
}

enum Held<'a> {
    /// Tokens of a prompt stay in any case.
    Plain(&'a mut CacheStack),
    Guarded(Transaction<'a>),
}

impl<'a> Open<'a> {
    fn new(step: &'a mut Step<'_>, plan: Plan) -> Result<Self> {
        let start = Instant::now();
        let Decoder { caches, line } = &mut *step.decoder;
        let caches = match plan.work {
            Work::Read => Held::Plain(caches),
            Work::Round { .. } => Held::Guarded(Transaction::begin(caches)?),
        };
        let mut open = Self {
            caches,
            line,
            plan,
            depth: step.depth,
            ends: &mut *step.ends,
            cancel: step.cancel,
            opening: start.elapsed(),
        };
        // Alone, so that a step which the model would refuse does not stop the others.
        let model = Arc::clone(&open.line.model);
        model.spec().check(&[open.segment()])?;
        Ok(open)
    }

    fn segment(&mut self) -> Segment<'_> {
        let (caches, logits) = match &mut self.caches {
            Held::Plain(caches) => (&mut **caches, Rows::None),
            Held::Guarded(round) => (round.cache(), Rows::All),
        };
        let mut segment = Segment::new(&self.plan.tokens, caches, logits);
        segment.readout = self.line.sampler.readout();
        segment.hidden = self
            .line
            .drafter
            .as_ref()
            .and_then(|drafter| drafter.wants_hidden());
        segment.cancel = self.cancel;
        segment
    }

    /// Takes in what the call gave. Its time is `each` a row.
    fn finish(self, output: &SegmentOutput, each: Duration) -> Result<Done> {
        let forward = each * self.plan.tokens.len() as u32;
        let start = Instant::now();
        match (self.caches, self.plan.work) {
            (Held::Plain(caches), _) => {
                let tokens = self.plan.tokens.len();
                if let Err(error) = self.line.read(caches, tokens, output) {
                    self.line.forget(caches);
                    return Err(error);
                }
                Ok(Done::Read {
                    tokens,
                    time: forward + start.elapsed(),
                })
            }
            (Held::Guarded(round), Work::Round { proposed, asked }) => {
                let mut time = Phases {
                    draft: self.plan.draft,
                    verify: forward,
                    rollback: self.opening,
                    ..Phases::default()
                };
                let judged = self.line.judge(round, &proposed, output, self.ends, &mut time);
                let (tokens, ended) = match judged {
                    Ok(judged) => judged,
                    Err(error) => {
                        self.line.sampler.rewind(&self.line.tokens);
                        return Err(error);
                    }
                };
                let round = Round {
                    accepted: tokens.iter().filter(|token| token.drafted).count(),
                    tokens,
                    asked,
                    drafted: proposed.len(),
                    ended,
                    time,
                };
                self.line.learn(self.depth, &round);
                Ok(Done::Round(round))
            }
            (Held::Guarded(_), Work::Read) => Err(Error::EmptyPrompt),
        }
    }

    /// The call failed: what was read is unknown, and a round is taken back by its guard.
    fn fail(self) {
        if let Held::Plain(caches) = self.caches {
            self.line.forget(caches);
        }
    }

    /// The call failed, perhaps for another's sake: a prompt is read anew.
    fn start_over(self) {
        if let Held::Plain(caches) = self.caches {
            let mut prompt = std::mem::take(&mut self.line.tokens);
            prompt.append(&mut self.line.unread);
            self.line.forget(caches);
            let told = match (&mut self.line.drafter, prompt.first()) {
                (Some(drafter), Some(first)) => drafter.prefill(std::slice::from_ref(first), None),
                _ => Ok(()),
            };
            // A drafter that cannot be told leaves an empty decoder, which says so when it is tried again.
            if told.is_ok() && !prompt.is_empty() {
                self.line.unread = prompt.split_off(1);
                self.line.tokens = prompt;
            }
        }
    }
}

impl Line {
    /// Tokens of the prompt to read now: up to `most`, and not beyond where a checkpoint is to be left.
    fn chunk(&self, held: usize, most: usize) -> usize {
        let chunk = most.max(1).min(self.unread.len());
        match &self.store {
            Some(store) => {
                let every = store.options().every.max(1);
                chunk.min(every - held % every)
            }
            None => chunk,
        }
    }

    fn depth(&mut self, depth: Depth) -> usize {
        match depth {
            Depth::Fixed(tokens) => tokens,
            Depth::Auto { most } => {
                let known = self
                    .controller
                    .take()
                    .filter(|controller| controller.serves(most));
                self.controller
                    .insert(known.unwrap_or_else(|| Controller::new(most)))
                    .choose()
            }
        }
    }

    /// Tells the controller what a round of a depth of its choice did.
    fn learn(&mut self, depth: Depth, round: &Round) {
        // An end cuts off the rest of a proposal, right or wrong: such a round teaches nothing.
        if let (Depth::Auto { .. }, Some(controller), false) = (depth, &mut self.controller, round.ended) {
            let time = &round.time;
            controller.record(&Sample {
                asked: round.asked,
                drafted: round.drafted,
                accepted: round.accepted,
                draft: time.draft.as_secs_f64(),
                verify: (time.verify + time.rollback + time.sample).as_secs_f64(),
            });
        }
    }

    /// The next `tokens` of the prompt were fed but for the last, which is pending now.
    fn read(&mut self, caches: &CacheStack, tokens: usize, output: &SegmentOutput) -> Result<()> {
        let read: Vec<u32> = self.unread.drain(..tokens).collect();
        if let Some(drafter) = &mut self.drafter {
            drafter.prefill(&read, output.hidden.as_ref())?;
        }
        self.tokens.extend(read);
        let every = self
            .store
            .as_ref()
            .map_or(1, |store| store.options().every.max(1));
        if self.unread.is_empty() || caches.len().is_multiple_of(every) {
            self.remember(caches)?;
        }
        Ok(())
    }

    /// Keeps what the target would have chosen itself, and one token more.
    fn judge(
        &mut self,
        round: Transaction<'_>,
        proposed: &[Proposed],
        output: &SegmentOutput,
        ends: &mut dyn FnMut(u32) -> Result<bool>,
        time: &mut Phases,
    ) -> Result<(Vec<Token>, bool)> {
        let start = Instant::now();
        let verdict = self.sampler.judge(&self.tokens, proposed, output, ends)?;
        let rows = match self.drafter.as_ref().and_then(|drafter| drafter.wants_hidden()) {
            Some(_) => Some(output.hidden()?.narrow(0, 0, verdict.tokens.len())?),
            None => None,
        };
        time.sample = start.elapsed();
        let start = Instant::now();
        round.keep(verdict.tokens.len())?;
        self.tokens.extend_from_slice(&verdict.tokens);
        if let Some(drafter) = &mut self.drafter {
            drafter.observe(&verdict.tokens, rows.as_ref());
        }
        time.rollback += start.elapsed();
        let mut logprobs = verdict.logprobs.into_iter();
        let tokens = verdict.tokens.iter().enumerate().map(|(i, &id)| Token {
            id,
            drafted: i < verdict.accepted,
            logprobs: logprobs.next(),
        });
        Ok((tokens.collect(), verdict.ended))
    }

    /// Forgets the text.
    fn forget(&mut self, caches: &mut CacheStack) {
        self.tokens.clear();
        self.unread.clear();
        caches.reset();
        if let Some(drafter) = &mut self.drafter {
            drafter.reset();
        }
    }
}
