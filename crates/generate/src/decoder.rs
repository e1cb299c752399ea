//! One sequence under generation, and the speculative step.

use std::sync::Arc;
use std::time::{Duration, Instant};

use recant_core::candle::Tensor;
use recant_core::{Cache, CacheStack, LanguageModel, Readout, Rows, Segment, Transaction};

use crate::depth::{Controller, Sample};
use crate::greedy::choose;
use crate::{Depth, Drafter, Error, Result};

/// Most prompt tokens fed in one call.
const CHUNK: usize = 256;

/// Seconds by phase.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Phases {
    /// Reading the prompt, the drafter's reading included.
    pub prefill: Duration,
    /// The drafter's proposals.
    pub draft: Duration,
    /// The target's forward over the pending token and the proposals.
    pub verify: Duration,
    /// Opening the checkpoint, taking rejected tokens out of the target's and the drafter's caches, and committing.
    pub rollback: Duration,
    /// Choosing tokens from logits.
    pub sample: Duration,
}

impl Phases {
    /// Adds another's seconds.
    pub fn add(&mut self, other: &Self) {
        self.prefill += other.prefill;
        self.draft += other.draft;
        self.verify += other.verify;
        self.rollback += other.rollback;
        self.sample += other.sample;
    }
}

/// A token of the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// Whether the drafter guessed it. Otherwise the target chose it itself.
    pub drafted: bool,
}

/// Why generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// The last token is one that ends a text.
    Eos,
    /// As many tokens as asked for were generated.
    Length,
    /// The sequence is as long as the model takes.
    Context,
}

/// What one round did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Round {
    /// Tokens generated: those accepted, then one that the target chose. At least one.
    pub tokens: Vec<Token>,
    /// Tokens asked of the drafter: as many as were to be drafted, but near a limit no more than it leaves room for; 0
    /// without a drafter.
    pub asked: usize,
    /// Tokens proposed.
    pub drafted: usize,
    /// Proposals that stayed in the text.
    pub accepted: usize,
    /// The last token ends the text.
    pub eos: bool,
    /// Seconds by phase.
    pub time: Phases,
}

/// When to stop, and how far to look ahead.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Most tokens to generate.
    pub max_tokens: usize,
    /// How many tokens to draft in a round.
    pub depth: Depth,
    /// Ids that end the text. The one found is part of the output.
    pub eos: Vec<u32>,
}

/// One sequence: its tokens, its caches and, if there is one, its drafter. Greedy.
///
/// After every call, failed or not, the caches hold [`tokens`](Decoder::tokens) but the last one, which is *pending*: it is
/// part of the text and is fed by the next round.
///
/// The text does not depend on the drafter or on the number of tokens drafted: each round keeps exactly the proposals that
/// the target would have chosen, and takes the others out of every cache.
pub struct Decoder {
    model: Arc<dyn LanguageModel>,
    caches: CacheStack,
    drafter: Option<Box<dyn Drafter>>,
    /// Chooses how far to look ahead, where nobody else does. What it learned outlives a text.
    controller: Option<Controller>,
    vocab: usize,
    tokens: Vec<u32>,
}

impl Decoder {
    /// A decoder that feeds `caches`, which must be empty. Ids from `vocab` on are padding of the model's head and are
    /// never chosen.
    ///
    /// # Errors
    /// The caches are another model's, or hold tokens.
    pub fn new(model: Arc<dyn LanguageModel>, caches: CacheStack, vocab: usize) -> Result<Self> {
        caches.belongs_to(&model.spec().layout)?;
        if !caches.is_empty() {
            return Err(Error::NotEmpty { held: caches.len() });
        }
        let vocab = vocab.min(model.spec().vocab_size);
        Ok(Self {
            model,
            caches,
            drafter: None,
            controller: None,
            vocab,
            tokens: Vec::new(),
        })
    }

    /// Drafts with `drafter` from here on, up to `most` tokens a round.
    ///
    /// # Errors
    /// The drafter refuses the target, a prompt was read already, or the target's caches cannot take back that many tokens:
    /// this is found out here, not in the first round.
    pub fn with_drafter(mut self, mut drafter: Box<dyn Drafter>, most: usize) -> Result<Self> {
        if !self.tokens.is_empty() {
            return Err(Error::NotEmpty {
                held: self.tokens.len(),
            });
        }
        drafter.attach(self.model.spec(), self.vocab)?;
        Transaction::begin(&mut self.caches)?
            .cache()
            .admit(most.saturating_add(1))?;
        self.drafter = Some(drafter);
        Ok(self)
    }

    /// The text so far, prompt included. The last token is pending: the caches do not hold it yet.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The token that the next round feeds first.
    pub fn pending(&self) -> Option<u32> {
        self.tokens.last().copied()
    }

    /// The caches: they hold all tokens but the pending one.
    pub fn caches(&self) -> &CacheStack {
        &self.caches
    }

    /// The model.
    pub fn model(&self) -> &Arc<dyn LanguageModel> {
        &self.model
    }

    /// Forgets the text. Allocations are kept.
    pub fn reset(&mut self) {
        self.tokens.clear();
        self.caches.reset();
        if let Some(drafter) = &mut self.drafter {
            drafter.reset();
        }
    }

    /// Reads a prompt: all tokens but the last are fed, the last is pending. `progress` is told how many of how many
    /// tokens are read.
    ///
    /// # Errors
    /// The prompt is empty or too long, a token is unknown, or tokens are held already. After an error the decoder is
    /// empty.
    pub fn prefill(&mut self, prompt: &[u32], progress: &mut dyn FnMut(usize, usize)) -> Result<Duration> {
        if !self.tokens.is_empty() {
            return Err(Error::NotEmpty {
                held: self.tokens.len(),
            });
        }
        let max = self.model.spec().max_positions;
        let Some((&pending, fed)) = prompt.split_last() else {
            return Err(Error::EmptyPrompt);
        };
        if prompt.len() > max {
            return Err(Error::PromptTooLong {
                tokens: prompt.len(),
                max,
            });
        }
        let start = Instant::now();
        let read = self.read(fed, pending, progress);
        match read {
            Ok(()) => self.tokens.extend_from_slice(prompt),
            Err(_) => self.reset(),
        }
        read.map(|()| start.elapsed())
    }

    fn read(&mut self, fed: &[u32], pending: u32, progress: &mut dyn FnMut(usize, usize)) -> Result<()> {
        let total = fed.len() + 1;
        let hidden = self.drafter.as_ref().and_then(|d| d.wants_hidden());
        let mut done = 0;
        for chunk in fed.chunks(CHUNK) {
            let mut segment = Segment::new(chunk, &mut self.caches, Rows::None);
            segment.hidden = hidden;
            let output = self.model.forward(&mut [segment])?;
            if let Some(drafter) = &mut self.drafter {
                drafter.prefill(chunk, output.only()?.hidden.as_ref())?;
            }
            done += chunk.len();
            progress(done, total);
        }
        if pending as usize >= self.model.spec().vocab_size {
            return Err(recant_core::Error::Token {
                id: pending,
                position: fed.len(),
                vocab_size: self.model.spec().vocab_size,
            }
            .into());
        }
        if let Some(drafter) = &mut self.drafter {
            drafter.prefill(&[pending], None)?;
        }
        progress(total, total);
        Ok(())
    }

    /// One round: drafts up to `draft` tokens, checks them in one pass, keeps those that the target would have chosen and
    /// adds one more. At most `room` tokens come out, and none after one of `eos`.
    ///
    /// # Errors
    /// There is no prompt, no room, or the model or the drafter fails. Text and caches are as they were before.
    pub fn round(&mut self, draft: usize, room: usize, eos: &[u32]) -> Result<Round> {
        let Some(pending) = self.pending() else {
            return Err(Error::EmptyPrompt);
        };
        let held = self.caches.len();
        let left = self.model.spec().max_positions.saturating_sub(held + 1);
        let asked = match &self.drafter {
            Some(_) => draft.min(room.saturating_sub(1)).min(left),
            None => 0,
        };
        let mut time = Phases::default();

        let mut clock = Instant::now();
        let mut lap = |phase: &mut Duration| {
            let now = Instant::now();
            *phase += now - clock;
            clock = now;
        };

        let mut block = vec![pending];
        if let (Some(drafter), true) = (&mut self.drafter, asked > 0) {
            let vocab = self.model.spec().vocab_size;
            let proposed = drafter.propose(asked)?;
            block.extend(
                proposed
                    .into_iter()
                    .take(asked)
                    .take_while(|&id| (id as usize) < vocab),
            );
        }
        lap(&mut time.draft);

        let hidden = self.drafter.as_ref().and_then(|d| d.wants_hidden());
        let mut round = Transaction::begin(&mut self.caches)?;
        lap(&mut time.rollback);
        let mut segment = Segment::new(&block, round.cache(), Rows::All);
        segment.readout = Readout::Largest {
            count: 1,
            among: self.vocab,
        };
        segment.hidden = hidden;
        let output = self.model.forward(&mut [segment])?;
        lap(&mut time.verify);

        let output = output.only()?;
        let chosen = choose(&output.largest(1, self.vocab)?, held + 1)?;
        if chosen.len() != block.len() {
            return Err(recant_core::Error::mismatch("rows of logits", block.len(), chosen.len()).into());
        }
        let proposed = &block[1..];
        let agreed = proposed.iter().zip(&chosen).take_while(|(a, b)| a == b).count();
        let generated = &chosen[..=agreed];
        let end = generated.iter().position(|id| eos.contains(id));
        let generated = &generated[..end.map_or(generated.len(), |at| at + 1)];
        let rows: Option<Tensor> = match hidden {
            Some(_) => Some(output.hidden()?.narrow(0, 0, generated.len())?),
            None => None,
        };
        lap(&mut time.sample);

        round.keep(generated.len())?;
        self.tokens.extend_from_slice(generated);
        if let Some(drafter) = &mut self.drafter {
            drafter.observe(generated, rows.as_ref());
        }
        lap(&mut time.rollback);
        Ok(Round {
            tokens: generated
                .iter()
                .enumerate()
                .map(|(i, &id)| Token {
                    id,
                    drafted: proposed.get(i) == Some(&id),
                })
                .collect(),
            asked,
            drafted: proposed.len(),
            accepted: generated.iter().zip(proposed).filter(|(a, b)| a == b).count(),
            eos: end.is_some(),
            time,
        })
    }

    /// A round of a depth that is chosen by what earlier rounds taught, and that teaches in turn.
    fn adaptive_round(&mut self, most: usize, room: usize, eos: &[u32]) -> Result<Round> {
        let mut controller = self
            .controller
            .take()
            .filter(|controller| controller.serves(most))
            .unwrap_or_else(|| Controller::new(most));
        let round = self.round(controller.choose(), room, eos);
        // An end token cuts off the rest of a proposal, right or wrong: such a round teaches nothing.
        if let Some(round) = round.as_ref().ok().filter(|round| !round.eos) {
            let time = &round.time;
            controller.record(&Sample {
                asked: round.asked,
                drafted: round.drafted,
                accepted: round.accepted,
                draft: time.draft.as_secs_f64(),
                verify: (time.verify + time.rollback + time.sample).as_secs_f64(),
            });
        }
        self.controller = Some(controller);
        round
    }

    /// Generates until one of the limits is met, a round at a time. Dropping the iterator between rounds leaves text and
    /// caches in step.
    pub fn generate(&mut self, limits: Limits) -> Generation<'_> {
        Generation {
            decoder: self,
            left: limits.max_tokens,
            limits,
            finish: None,
        }
    }
}

/// Rounds of one generation: see [`Decoder::generate`].
pub struct Generation<'a> {
    decoder: &'a mut Decoder,
    limits: Limits,
    left: usize,
    finish: Option<Finish>,
}

impl Generation<'_> {
    /// Why it ended; `None` while it goes on or after an error.
    pub fn finish(&self) -> Option<Finish> {
        self.finish
    }

    /// The decoder.
    pub fn decoder(&self) -> &Decoder {
        self.decoder
    }
}

impl Iterator for Generation<'_> {
    type Item = Result<Round>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.finish.is_some() {
            return None;
        }
        if self.left == 0 {
            self.finish = Some(Finish::Length);
            return None;
        }
        if self.decoder.caches.len() >= self.decoder.model.spec().max_positions {
            self.finish = Some(Finish::Context);
            return None;
        }
        let (decoder, room, eos) = (&mut self.decoder, self.left, &self.limits.eos);
        let round = match self.limits.depth {
            Depth::Fixed(tokens) => decoder.round(tokens, room, eos),
            Depth::Auto { most } => decoder.adaptive_round(most, room, eos),
        };
        if let Ok(round) = &round {
            self.left -= round.tokens.len();
            if round.eos {
                self.finish = Some(Finish::Eos);
            }
        }
        Some(round)
    }
}
