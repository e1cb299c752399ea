//! Drafters: whatever guesses the next tokens.

use std::sync::Arc;

use recant_core::candle::Tensor;
use recant_core::{Cache, CacheOptions, CacheStack, Checkpoint, LanguageModel, ModelSpec, Rows, Segment};

use crate::greedy::choose;
use crate::{Error, Result};

/// Guesses the tokens that a target will choose.
///
/// A drafter may guess anything: wrong guesses cost time, never output. It follows the text through
/// [`prefill`](Drafter::prefill) and [`observe`](Drafter::observe), which together tell it every token of the text once
/// and in order, the pending one included.
///
/// A round is `propose`, then `observe`. A round that fails in between is not observed: the next `propose` starts from
/// the text as it was.
pub trait Drafter: Send {
    /// Refuses a target that this drafter cannot serve, before any token is made, and learns which ids it may propose:
    /// those below `vocab`.
    fn attach(&mut self, target: &ModelSpec, vocab: usize) -> Result<()>;

    /// Takes in tokens of the prompt. Called once or more; the last token of the last call is the pending one.
    ///
    /// # Shapes
    /// `hidden`: `[tokens, hidden_size]`, the target's final hidden rows of these tokens; given when
    /// [`wants_hidden`](Drafter::wants_hidden) and the target has been fed them, so never for the pending token.
    fn prefill(&mut self, tokens: &[u32], hidden: Option<&Tensor>) -> Result<()>;

    /// Up to `k` tokens that may follow the pending one. Fewer, or none, is always right.
    ///
    /// # Errors
    /// The drafter is then as it was.
    fn propose(&mut self, k: usize) -> Result<Vec<u32>>;

    /// The text grew by the first `accepted` tokens of the last proposal, then by `next`, which is now pending.
    ///
    /// # Shapes
    /// `hidden`: `[accepted + 1, hidden_size]`, the target's final hidden rows of the formerly pending token and of the
    /// accepted ones; given when [`wants_hidden`](Drafter::wants_hidden).
    fn observe(&mut self, accepted: usize, next: u32, hidden: Option<&Tensor>);

    /// Whether the target's hidden rows are to be given.
    fn wants_hidden(&self) -> bool {
        false
    }

    /// Forgets the text.
    fn reset(&mut self);
}

/// Most tokens fed in one call while the drafter reads a prompt.
const CHUNK: usize = 256;

/// Drafts with another, smaller model, hybrids included, choosing greedily.
///
/// Its caches are rolled back as the target's are: the tokens of a round are fed under a checkpoint and trimmed to what
/// was accepted.
pub struct ModelDrafter {
    model: Arc<dyn LanguageModel>,
    caches: CacheStack,
    record_limit: usize,
    /// Ids from here on are not proposed.
    vocab: usize,
    /// Tokens of the text that the caches do not hold yet, oldest first.
    behind: Vec<u32>,
    round: Option<Round>,
}

/// A proposal that was not observed yet.
struct Round {
    checkpoint: Checkpoint,
    proposed: Vec<u32>,
}

impl ModelDrafter {
    /// A drafter with caches of its own, made with `options`.
    pub fn new(model: Arc<dyn LanguageModel>, options: &CacheOptions) -> Result<Self> {
        let caches = model.new_caches(options)?;
        Ok(Self {
            vocab: model.spec().vocab_size,
            record_limit: options.record_limit,
            model,
            caches,
            behind: Vec::new(),
            round: None,
        })
    }

    /// Its caches. After a round was observed they hold a prefix of the text.
    pub fn caches(&self) -> &CacheStack {
        &self.caches
    }

    /// Goes back to before a round that was never observed.
    fn abandon_round(&mut self) -> Result<()> {
        if let Some(round) = self.round.take() {
            let restored = self.caches.restore(&round.checkpoint);
            self.caches.commit(round.checkpoint);
            restored?;
        }
        Ok(())
    }

    /// Feeds what the caches lack, for good, until at most `keep` tokens are left.
    fn catch_up(&mut self, keep: usize) -> Result<()> {
        while self.behind.len() > keep {
            let rows = (self.behind.len() - keep).min(CHUNK);
            let segment = Segment::new(&self.behind[..rows], &mut self.caches, Rows::None);
            self.model.forward(&mut [segment])?;
            self.behind.drain(..rows);
        }
        Ok(())
    }

    /// Feeds `tokens` and chooses the one after them.
    fn next(&mut self, tokens: &[u32]) -> Result<u32> {
        let segment = Segment::new(tokens, &mut self.caches, Rows::Last);
        let output = self.model.forward(&mut [segment])?;
        let position = self.caches.len();
        match output.segments.first() {
            Some(segment) => Ok(choose(segment.logits()?, self.vocab, position)?[0]),
            None => Err(recant_core::Error::mismatch("segments of a model's output", 1, 0).into()),
        }
    }

    fn chain(&mut self, k: usize) -> Result<Vec<u32>> {
        let behind = std::mem::take(&mut self.behind);
        let first = self.next(&behind);
        self.behind = behind;
        let mut proposed = vec![first?];
        while proposed.len() < k {
            let last = proposed[proposed.len() - 1];
            proposed.push(self.next(&[last])?);
        }
        Ok(proposed)
    }
}

impl Drafter for ModelDrafter {
    fn attach(&mut self, _target: &ModelSpec, vocab: usize) -> Result<()> {
        let draft = self.model.spec();
        if self.record_limit < 2 {
            return Err(Error::Drafter(format!(
                "its caches record {} tokens; at least 2 are needed to draft one",
                self.record_limit
            )));
        }
        self.vocab = draft.vocab_size.min(vocab);
        Ok(())
    }

    fn prefill(&mut self, tokens: &[u32], _hidden: Option<&Tensor>) -> Result<()> {
        self.abandon_round()?;
        self.behind.extend_from_slice(tokens);
        if self.behind.len() + self.caches.len() > self.model.spec().max_positions {
            // Too long for this model: it proposes nothing from here on.
            return Ok(());
        }
        self.catch_up(1)
    }

    fn propose(&mut self, k: usize) -> Result<Vec<u32>> {
        self.abandon_round()?;
        let room = self.model.spec().max_positions.saturating_sub(self.caches.len());
        if k == 0 || self.behind.is_empty() || self.behind.len() > room {
            return Ok(Vec::new());
        }
        // Rounds without drafting leave tokens behind; all but a few are fed without records.
        self.catch_up((self.record_limit / 2).max(1))?;
        let room = self.model.spec().max_positions - self.caches.len();
        let k = k.min(room.min(self.record_limit) + 1 - self.behind.len());
        let checkpoint = self.caches.checkpoint()?;
        match self.chain(k) {
            Ok(proposed) => {
                self.round = Some(Round {
                    checkpoint,
                    proposed: proposed.clone(),
                });
                Ok(proposed)
            }
            Err(error) => {
                let restored = self.caches.restore(&checkpoint);
                self.caches.commit(checkpoint);
                restored?;
                Err(error)
            }
        }
    }

    fn observe(&mut self, accepted: usize, next: u32, _hidden: Option<&Tensor>) {
        if let Some(round) = self.round.take() {
            // The last proposal was never fed.
            let fed = round.proposed.len() - 1;
            let kept = accepted.min(fed);
            if self.caches.trim(fed - kept).is_ok() {
                self.behind.clear();
                self.behind
                    .extend(round.proposed.iter().take(accepted).skip(kept));
                self.caches.commit(round.checkpoint);
            } else {
                // A cache from elsewhere broke its word: go back to the checkpoint, and feed the text again.
                self.behind.extend(round.proposed.iter().take(accepted));
                self.round = Some(round);
            }
        }
        self.behind.push(next);
    }

    fn reset(&mut self) {
        self.round = None;
        self.behind.clear();
        self.caches.reset();
    }
}
