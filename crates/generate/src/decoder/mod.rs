//! One sequence under generation.

mod figures;
mod generation;
mod step;

use std::sync::Arc;
use std::time::{Duration, Instant};

use recant_core::{Cache, CacheStack, LanguageModel, Transaction};

pub use figures::{Done, Finish, Phases, Round, Token};
pub use generation::{Generation, Limits};
pub use step::{step, Step};

use crate::depth::Controller;
use crate::store::{DrafterState, PromptStore, StoredState};
use crate::{Depth, Drafter, Error, Result, Sampler, Sampling};

/// Most prompt tokens fed in one call, unless told otherwise.
const CHUNK: usize = 256;

/// One sequence: its tokens, its caches and, if there is one, its drafter. Greedy unless given another [`Sampler`].
///
/// After every call, failed or not, the caches hold [`tokens`](Decoder::tokens) but the last one, which is *pending*: it is
/// part of the text and is fed by the next step.
///
/// The text does not depend on the drafter or on the number of tokens drafted, unless a [`Rule`](crate::Rule) says so: each
/// round keeps exactly the proposals that the target would have chosen, and takes the others out of every cache.
pub struct Decoder {
    caches: CacheStack,
    line: Line,
}

/// All of a decoder but its caches.
struct Line {
    model: Arc<dyn LanguageModel>,
    drafter: Option<Box<dyn Drafter>>,
    /// Chooses how far to look ahead, where nobody else does. What it learned outlives a text.
    controller: Option<Controller>,
    sampler: Sampler,
    store: Option<PromptStore>,
    vocab: usize,
    tokens: Vec<u32>,
    /// Tokens of the prompt that are not read yet: they come after `tokens`.
    unread: Vec<u32>,
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
            caches,
            line: Line {
                model,
                drafter: None,
                controller: None,
                sampler: Sampler::new(Sampling::default(), Vec::new(), None, vocab)?,
                store: None,
                vocab,
                tokens: Vec::new(),
                unread: Vec::new(),
            },
        })
    }

    /// Drafts with `drafter` from here on, up to `most` tokens a round.
    ///
    /// # Errors
    /// The drafter refuses the target, a prompt was read already, or the target's caches cannot take back that many tokens:
    /// this is found out here, not in the first round.
    pub fn with_drafter(mut self, mut drafter: Box<dyn Drafter>, most: usize) -> Result<Self> {
        self.check_empty()?;
        drafter.attach(self.line.model.spec(), self.line.vocab)?;
        Transaction::begin(&mut self.caches)?
            .cache()
            .admit(most.saturating_add(1))?;
        self.line.drafter = Some(drafter);
        Ok(self)
    }

    /// Chooses tokens with a sampler, which is to be made for [`vocab`](Self::vocab) ids.
    ///
    /// # Errors
    /// A prompt was read already.
    pub fn with_sampler(mut self, sampler: Sampler) -> Result<Self> {
        self.check_empty()?;
        self.line.sampler = sampler;
        Ok(self)
    }

    /// Begins prompts where `store` holds a beginning of theirs, and leaves checkpoints there.
    pub fn with_store(mut self, store: PromptStore) -> Self {
        self.line.store = Some(store);
        self
    }

    fn check_empty(&self) -> Result<()> {
        match self.line.tokens.len() {
            0 => Ok(()),
            held => Err(Error::NotEmpty { held }),
        }
    }

    /// The text so far: the prompt, as far as it is read, and what was generated. The last token is pending: the caches do
    /// not hold it yet.
    pub fn tokens(&self) -> &[u32] {
        &self.line.tokens
    }

    /// Tokens of the prompt that are still to be read.
    pub fn unread(&self) -> usize {
        self.line.unread.len()
    }

    /// The token that the next step feeds first.
    pub fn pending(&self) -> Option<u32> {
        self.line.tokens.last().copied()
    }

    /// The caches: they hold all tokens but the pending one.
    pub fn caches(&self) -> &CacheStack {
        &self.caches
    }

    /// The model.
    pub fn model(&self) -> &Arc<dyn LanguageModel> {
        &self.line.model
    }

    /// Ids from here on are never chosen.
    pub fn vocab(&self) -> usize {
        self.line.vocab
    }

    /// Whether the text is as long as the model takes.
    pub fn is_full(&self) -> bool {
        self.line.tokens.len() > self.line.model.spec().max_positions
    }

    /// Forgets the text. Allocations are kept.
    pub fn reset(&mut self) {
        self.line.tokens.clear();
        self.line.unread.clear();
        self.caches.reset();
        if let Some(drafter) = &mut self.line.drafter {
            drafter.reset();
        }
    }

    /// Takes up a prompt, to be read by [`step`]s, and says how many of its tokens the caches hold already.
    ///
    /// If the prompt begins with the text so far, it is gone on with. Otherwise that is forgotten, and the prompt begins
    /// where a [store](Self::with_store) holds the longest beginning of it. Neither changes any result: by the law the
    /// caches are those of a cold start.
    ///
    /// # Errors
    /// The prompt is empty or too long, or a token is unknown: nothing has changed then.
    pub fn begin(&mut self, prompt: &[u32]) -> Result<usize> {
        let spec = self.line.model.spec();
        let Some(&first) = prompt.first() else {
            return Err(Error::EmptyPrompt);
        };
        if prompt.len() > spec.max_positions {
            return Err(Error::PromptTooLong {
                tokens: prompt.len(),
                max: spec.max_positions,
            });
        }
        if let Some(position) = prompt.iter().position(|&id| id as usize >= spec.vocab_size) {
            return Err(recant_core::Error::Token {
                id: prompt[position],
                position,
                vocab_size: spec.vocab_size,
            }
            .into());
        }
        let continues = !self.line.tokens.is_empty() && prompt.starts_with(&self.line.tokens);
        if !continues {
            self.reset();
            if !self.begin_from_store(prompt)? {
                self.reset();
                if let Some(drafter) = &mut self.line.drafter {
                    drafter.prefill(&[first], None)?;
                }
                self.line.tokens.push(first);
            }
        }
        self.line.unread = prompt[self.line.tokens.len()..].to_vec();
        self.line.sampler.begin(prompt);
        Ok(self.caches.len())
    }

    /// Takes over the longest beginning of a prompt that the store holds; false if there is none to be used.
    fn begin_from_store(&mut self, prompt: &[u32]) -> Result<bool> {
        let Self { caches, line } = self;
        let Some(store) = &line.store else {
            return Ok(false);
        };
        let model = &line.model.spec().layout.fingerprint;
        let drafter = &mut line.drafter;
        let hit = store.longest(model, prompt, prompt.len() - 1, &mut |hit| {
            let state = hit.state.drafter.as_ref().map(|state| &state.snapshot);
            let resumes =
                |drafter: &mut Box<dyn Drafter>| drafter.resume(&prompt[..=hit.tokens], state).is_ok();
            // The state of another drafter is no use to this one; some can do without any.
            caches.fits(&hit.state.caches).is_ok() && drafter.as_mut().is_none_or(resumes)
        })?;
        let Some(hit) = hit else {
            return Ok(false);
        };
        caches.load(&hit.state.caches)?;
        line.tokens.extend_from_slice(&prompt[..=hit.tokens]);
        Ok(true)
    }

    /// Leaves a checkpoint of the text so far in the [store](Self::with_store), if there is one: where a turn ends, so that the
    /// next one begins here.
    pub fn remember(&mut self) -> Result<()> {
        self.line.remember(&self.caches)
    }

    /// Reads a prompt: all tokens but the last are fed, the last is pending. `progress` is told how many of how many
    /// tokens are read. See [`begin`](Self::begin).
    ///
    /// # Errors
    /// As [`begin`](Self::begin) says; or the model or the drafter fails, and the decoder is then empty.
    pub fn prefill(&mut self, prompt: &[u32], progress: &mut dyn FnMut(usize, usize)) -> Result<Duration> {
        let start = Instant::now();
        self.begin(prompt)?;
        progress(self.tokens().len(), prompt.len());
        while self.unread() > 0 {
            self.advance(Depth::Fixed(0), 0, &[])?;
            progress(self.tokens().len(), prompt.len());
        }
        Ok(start.elapsed())
    }

    /// One round: drafts up to `draft` tokens, checks them in one pass, keeps those that the target would have chosen and
    /// adds one more. At most `room` tokens come out, and none after one of `eos`. What is unread of the prompt is read first.
    ///
    /// # Errors
    /// There is no prompt, no room, or the model or the drafter fails. Text and caches are as they were before.
    pub fn round(&mut self, draft: usize, room: usize, eos: &[u32]) -> Result<Round> {
        self.next_round(Depth::Fixed(draft), room, eos)
    }

    fn next_round(&mut self, depth: Depth, room: usize, eos: &[u32]) -> Result<Round> {
        loop {
            if let Done::Round(round) = self.advance(depth, room, eos)? {
                return Ok(round);
            }
        }
    }

    fn advance(&mut self, depth: Depth, room: usize, eos: &[u32]) -> Result<Done> {
        let mut step_of_one = [Step {
            decoder: self,
            depth,
            room,
            chunk: CHUNK,
            ends: &mut |id| Ok(eos.contains(&id)),
            cancel: None,
        }];
        step(&mut step_of_one).pop().unwrap_or(Err(Error::EmptyPrompt))
    }

    /// Generates until one of the limits is met, a round at a time. Dropping the iterator between rounds leaves text and
    /// caches in step.
    pub fn generate(&mut self, limits: Limits) -> Generation<'_> {
        Generation::new(self, limits)
    }
}

impl Line {
    fn remember(&mut self, caches: &CacheStack) -> Result<()> {
        let (Some(store), Some(&pending)) = (&self.store, self.tokens.last()) else {
            return Ok(());
        };
        let model = &self.model.spec().layout.fingerprint;
        let fed = &self.tokens[..caches.len()];
        if fed.is_empty() {
            return Ok(());
        }
        let drafter = match &mut self.drafter {
            Some(drafter) => drafter.snapshot()?,
            None => None,
        };
        let state = StoredState {
            caches: caches.snapshot()?,
            drafter: drafter.map(|snapshot| DrafterState {
                snapshot,
                ahead: vec![pending],
            }),
        };
        store.put(model, fed, state)
    }
}
