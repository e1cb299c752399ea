//! Drafters: whatever guesses the next tokens.

use recant_core::candle::Tensor;
use recant_core::{Hidden, ModelSpec, Snapshot};

use crate::{Draws, Error, Proposed, Result};

/// Guesses the tokens that a target will choose.
///
/// A drafter may guess anything: wrong guesses cost time, never output. It follows the text through
/// [`prefill`](Drafter::prefill) and [`observe`](Drafter::observe), which together tell it every token of the text once
/// and in order, the pending one included.
///
/// A round is `propose`, then `observe`. A round need not ask: `observe` comes without a `propose` where nothing was to be
/// drafted or where another drafter's proposal was fed, and the drafter follows the text all the same. A round that fails
/// is not observed, and the next `propose` starts from the text as it was.
pub trait Drafter: Send {
    /// Refuses a target that this drafter cannot serve, before any token is made, and learns which ids it may propose:
    /// those below `vocab`.
    fn attach(&mut self, target: &ModelSpec, vocab: usize) -> Result<()>;

    /// Takes in tokens of the prompt. Called once or more; the last token of the last call is the pending one. The first
    /// token of a text comes in a call of its own.
    ///
    /// # Shapes
    /// `hidden`: `[tokens, hidden_size]`, the target's final hidden rows of the token before each of these; given when
    /// [`wants_hidden`](Drafter::wants_hidden), but for the first token of a text, which has none before it.
    fn prefill(&mut self, tokens: &[u32], hidden: Option<&Tensor>) -> Result<()>;

    /// Up to `k` tokens that may follow the pending one. Fewer, or none, is always right.
    ///
    /// # Errors
    /// The drafter is then as it was.
    fn propose(&mut self, k: usize) -> Result<Vec<u32>>;

    /// As [`propose`](Drafter::propose), drawn as the target will draw: where text is sampled, a drafter whose guesses are
    /// drawn with `draws` is accepted more often. Unless a drafter overrides it, its guesses are taken as certain.
    ///
    /// # Errors
    /// The drafter is then as it was.
    fn draw(&mut self, k: usize, draws: &Draws<'_>) -> Result<Vec<Proposed>> {
        let _ = draws;
        Ok(self.propose(k)?.into_iter().map(Proposed::guess).collect())
    }

    /// The text grew by `tokens`, at least one, of which the last is now pending.
    ///
    /// Nothing says whose guesses they were: a drafter with a proposal of its own compares the two, and what agrees before
    /// the last token was accepted. Where `propose` was called since the text last grew, its proposal began where
    /// `tokens` begin.
    ///
    /// # Shapes
    /// `hidden`: `[tokens, hidden_size]`, the target's final hidden rows of the formerly pending token and of all `tokens`
    /// but the last; given when [`wants_hidden`](Drafter::wants_hidden).
    fn observe(&mut self, tokens: &[u32], hidden: Option<&Tensor>);

    /// Which of the target's hidden rows are to be given, if any.
    fn wants_hidden(&self) -> Option<Hidden> {
        None
    }

    /// What it made of the text so far, for [`resume`](Drafter::resume): of a drafter that follows the text in caches of its
    /// own. Its kind names the weights that it depends on.
    fn snapshot(&mut self) -> Result<Option<Snapshot>> {
        Ok(None)
    }

    /// Takes up a text in place of being told it from the start. `state` is the [`snapshot`](Drafter::snapshot) of a
    /// drafter that was told the same tokens, if there is one. It proposes from here on what it would have proposed.
    ///
    /// # Errors
    /// It cannot do without a state, or this is not one of its own. It is then to be reset.
    fn resume(&mut self, tokens: &[u32], state: Option<&Snapshot>) -> Result<()> {
        let _ = state;
        if self.wants_hidden().is_some() {
            return Err(Error::Drafter(
                "it follows the target's hidden rows and cannot take up a text without them".to_owned(),
            ));
        }
        self.prefill(tokens, None)
    }

    /// Forgets the text.
    fn reset(&mut self);
}

/// The snapshot of the caches in the state of a drafter that keeps one stack, was told `told` tokens and holds all but the last: for
/// [`Drafter::resume`].
///
/// # Errors
/// A state of another kind or of another number of tokens.
pub fn caches_of<'a>(state: &'a Snapshot, kind: &str, told: usize) -> Result<&'a Snapshot> {
    state.expect_kind(kind)?;
    let [caches] = state.parts() else {
        return Err(
            recant_core::Error::mismatch("parts of a drafter's state", 1, state.parts().len()).into(),
        );
    };
    if (state.len(), caches.len() + 1) != (told, told) {
        return Err(recant_core::Error::mismatch("tokens of a drafter's state", told, state.len()).into());
    }
    Ok(caches)
}
