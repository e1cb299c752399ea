//! Drafting with a smaller model.

use std::sync::Arc;

use recant_core::candle::Tensor;
use recant_core::{
    Cache, CacheOptions, CacheStack, Checkpoint, LanguageModel, ModelSpec, Rows, Segment, Snapshot,
};

use crate::drafter::caches_of;
use crate::{DraftHead, DraftVocabulary, Drafter, Draws, Error, Proposed, Result};

/// Most tokens fed in one call while the drafter reads a prompt.
const CHUNK: usize = 256;

/// Drafts with another, smaller model, hybrids included.
///
/// Its caches are rolled back as the target's are: the tokens of a round are fed under a checkpoint and trimmed to what
/// was accepted.
pub struct ModelDrafter {
    model: Arc<dyn LanguageModel>,
    caches: CacheStack,
    record_limit: usize,
    vocabulary: Option<DraftVocabulary>,
    /// What proposes: the model, or the same with a head of fewer rows. Known once there is a target.
    head: DraftHead,
    /// Tokens of the text that the caches do not hold yet, oldest first.
    behind: Vec<u32>,
    round: Option<Round>,
    /// A round that was observed but whose tokens a cache would not give back: its checkpoint is to be restored.
    undo: Option<Checkpoint>,
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
            vocabulary: None,
            head: DraftHead::whole(Arc::clone(&model)),
            record_limit: options.record_limit,
            model,
            caches,
            behind: Vec::new(),
            round: None,
            undo: None,
        })
    }

    /// Drafts only tokens of a vocabulary, and computes only their logits. A target whose ids and the vocabulary's have none
    /// in common, and a model that does not offer [`LanguageModel::with_head_rows`], are refused by
    /// [`attach`](Drafter::attach).
    #[must_use]
    pub fn with_vocabulary(mut self, vocabulary: DraftVocabulary) -> Self {
        self.vocabulary = Some(vocabulary);
        self
    }

    /// Its caches. After a round was observed they hold a prefix of the text.
    pub fn caches(&self) -> &CacheStack {
        &self.caches
    }

    /// Goes back to before a round that was never observed, or that could not be taken back in part.
    fn abandon_round(&mut self) -> Result<()> {
        let open = self.round.take().map(|round| round.checkpoint);
        match open.or(self.undo.take()) {
            Some(checkpoint) => self.go_back(checkpoint),
            None => Ok(()),
        }
    }

    fn go_back(&mut self, checkpoint: Checkpoint) -> Result<()> {
        let restored = self.caches.restore(&checkpoint);
        self.caches.commit(checkpoint);
        Ok(restored?)
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

    /// Feeds `tokens` and chooses the one after them and after those proposed.
    fn next(&mut self, tokens: &[u32], draws: &Draws<'_>, proposed: &[Proposed]) -> Result<Proposed> {
        let mut segment = Segment::new(tokens, &mut self.caches, Rows::Last);
        segment.readout = self.head.readout(draws);
        let output = self.head.model().forward(&mut [segment])?;
        self.head.choose(output.only()?, draws, proposed)
    }

    fn chain(&mut self, k: usize, draws: &Draws<'_>) -> Result<Vec<Proposed>> {
        let behind = std::mem::take(&mut self.behind);
        let first = self.next(&behind, draws, &[]);
        self.behind = behind;
        let mut proposed = vec![first?];
        while proposed.len() < k {
            let last = proposed[proposed.len() - 1].id;
            proposed.push(self.next(&[last], draws, &proposed)?);
        }
        Ok(proposed)
    }

    /// What a snapshot of its caches is called: those of another model are none.
    fn state(&self) -> String {
        format!("model-drafter {}", self.model.spec().layout.fingerprint)
    }
}

impl Drafter for ModelDrafter {
    fn attach(&mut self, target: &ModelSpec, vocab: usize) -> Result<()> {
        if self.record_limit < 2 {
            return Err(Error::Drafter(format!(
                "its caches record {} tokens; at least 2 are needed to draft one",
                self.record_limit
            )));
        }
        self.head = DraftHead::of(&self.model, self.vocabulary.as_ref(), target, vocab)?;
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
        let proposed = self.draw(k, &Draws::greedy())?;
        Ok(proposed.into_iter().map(|token| token.id).collect())
    }

    fn draw(&mut self, k: usize, draws: &Draws<'_>) -> Result<Vec<Proposed>> {
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
        match self.chain(k, draws) {
            Ok(proposed) => {
                self.round = Some(Round {
                    checkpoint,
                    proposed: proposed.iter().map(|token| token.id).collect(),
                });
                Ok(proposed)
            }
            Err(error) => {
                self.go_back(checkpoint)?;
                Err(error)
            }
        }
    }

    fn observe(&mut self, tokens: &[u32], _hidden: Option<&Tensor>) {
        let Some(round) = self.round.take() else {
            self.behind.extend_from_slice(tokens);
            return;
        };
        // The last proposal was never fed, and the pending token stays out of the caches.
        let fed = round.proposed.len() - 1;
        let agreed = round
            .proposed
            .iter()
            .zip(tokens)
            .take_while(|(a, b)| a == b)
            .count();
        let kept = agreed.min(fed).min(tokens.len().saturating_sub(1));
        if self.caches.trim(fed - kept).is_ok() {
            self.caches.commit(round.checkpoint);
            self.behind.clear();
            self.behind.extend_from_slice(&tokens[kept..]);
        } else {
            // A cache from elsewhere broke its word: go back to the checkpoint, and feed the text again.
            self.undo = Some(round.checkpoint);
            self.behind.extend_from_slice(tokens);
        }
    }

    fn snapshot(&mut self) -> Result<Option<Snapshot>> {
        self.abandon_round()?;
        let told = self.caches.len() + self.behind.len();
        if told > self.model.spec().max_positions {
            return Ok(None);
        }
        self.catch_up(1)?;
        Ok(Some(
            Snapshot::new(self.state(), told).with_parts(vec![self.caches.snapshot()?]),
        ))
    }

    fn resume(&mut self, tokens: &[u32], state: Option<&Snapshot>) -> Result<()> {
        self.reset();
        let Some(state) = state else {
            return self.prefill(tokens, None);
        };
        let caches = caches_of(state, &self.state(), tokens.len())?;
        self.caches.load(caches)?;
        self.behind.extend_from_slice(&tokens[caches.len()..]);
        Ok(())
    }

    fn reset(&mut self) {
        self.round = None;
        self.undo = None;
        self.behind.clear();
        self.caches.reset();
    }
}
