//! Two drafters for one text.

use recant_core::candle::Tensor;
use recant_core::{Hidden, ModelSpec, Snapshot};

use crate::{Drafter, Draws, NgramDrafter, Proposed, Result};

/// Drafts from the text itself where it repeats itself, and with another drafter where it does not. Both follow the whole
/// text.
///
/// A repetition costs nothing to look up, so where it is long enough to be trusted the other need not be asked. How long that
/// is, [`NgramDrafter::with_least`] says: beside a good model it should be more than alone.
pub struct CombinedDrafter {
    ngram: NgramDrafter,
    other: Box<dyn Drafter>,
}

impl CombinedDrafter {
    /// Least length of a repetition that goes before a model's own guess, in tokens: a good choice for
    /// [`NgramDrafter::with_least`].
    pub const LEAST: usize = 8;

    /// A drafter that asks `ngram` first.
    pub fn new(ngram: NgramDrafter, other: Box<dyn Drafter>) -> Self {
        Self { ngram, other }
    }
}

impl Drafter for CombinedDrafter {
    fn attach(&mut self, target: &ModelSpec, vocab: usize) -> Result<()> {
        self.ngram.attach(target, vocab)?;
        self.other.attach(target, vocab)
    }

    fn prefill(&mut self, tokens: &[u32], hidden: Option<&Tensor>) -> Result<()> {
        self.ngram.prefill(tokens, hidden)?;
        self.other.prefill(tokens, hidden)
    }

    fn propose(&mut self, k: usize) -> Result<Vec<u32>> {
        let repeated = self.ngram.propose(k)?;
        if repeated.is_empty() {
            return self.other.propose(k);
        }
        Ok(repeated)
    }

    fn draw(&mut self, k: usize, draws: &Draws<'_>) -> Result<Vec<Proposed>> {
        let repeated = self.ngram.draw(k, draws)?;
        if repeated.is_empty() {
            return self.other.draw(k, draws);
        }
        Ok(repeated)
    }

    fn observe(&mut self, tokens: &[u32], hidden: Option<&Tensor>) {
        self.ngram.observe(tokens, hidden);
        self.other.observe(tokens, hidden);
    }

    fn wants_hidden(&self) -> Option<Hidden> {
        self.other.wants_hidden()
    }

    fn snapshot(&mut self) -> Result<Option<Snapshot>> {
        self.other.snapshot()
    }

    fn resume(&mut self, tokens: &[u32], state: Option<&Snapshot>) -> Result<()> {
        self.ngram.reset();
        self.ngram.resume(tokens, None)?;
        self.other.resume(tokens, state)
    }

    fn reset(&mut self) {
        self.ngram.reset();
        self.other.reset();
    }
}
