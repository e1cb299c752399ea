//! A drafter that guesses right and wrong as it is told.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::Tensor;
use recant_core::ModelSpec;
use recant_generate::{Drafter, Result};

/// What to propose in one round: up to `length` tokens, of which the first `right` are what the target will choose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Draft {
    /// Most tokens, however many are asked for.
    pub length: usize,
    /// Right ones in front; the one after them is wrong.
    pub right: usize,
}

impl Draft {
    /// As many tokens as are asked for, all right.
    pub const RIGHT: Self = Self {
        length: usize::MAX,
        right: usize::MAX,
    };
    /// As many tokens as are asked for, the first of them wrong.
    pub const WRONG: Self = Self {
        length: usize::MAX,
        right: 0,
    };
    /// No tokens.
    pub const EMPTY: Self = Self { length: 0, right: 0 };

    /// As many tokens as are asked for, the first `right` of them right: that many are accepted.
    pub fn accept(right: usize) -> Self {
        Self {
            length: usize::MAX,
            right,
        }
    }
}

/// One round, as the drafter saw it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DraftRound {
    /// Tokens asked for.
    pub asked: usize,
    /// Tokens proposed.
    pub proposed: Vec<u32>,
    /// How many were accepted; none if the round was not observed.
    pub accepted: Option<usize>,
}

/// What a [`ScriptedDrafter`] was told.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DraftLog {
    /// The text so far, the pending token included.
    pub text: Vec<u32>,
    /// The rounds since the last reset.
    pub rounds: Vec<DraftRound>,
    /// What broke the drafter's contract: a round observed before there was a text, or in which the text did not grow.
    pub problems: Vec<String>,
}

/// Reads a drafter's log while a decoder owns the drafter.
#[derive(Debug, Clone, Default)]
pub struct DraftLogHandle(Arc<Mutex<DraftLog>>);

impl DraftLogHandle {
    /// The log so far.
    pub fn read(&self) -> DraftLog {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, DraftLog> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Tells what the target chooses after a text.
type Oracle = dyn Fn(&[u32]) -> u32 + Send;

/// A drafter that follows a schedule, one [`Draft`] a round and over again.
///
/// It knows what the target will choose from an oracle, so it can force any number of accepted tokens.
///
/// ```
/// use recant_generate::Drafter;
/// use recant_testkit::{Draft, ScriptedDrafter, ScriptedModel};
/// use recant_core::LanguageModel;
///
/// # fn main() -> recant_generate::Result<()> {
/// let model = ScriptedModel::new(1, 32);
/// let text = model.continuation(&[5, 6], 8);
/// let spec = model.spec().clone();
/// let mut drafter = ScriptedDrafter::new(move |text| model.next(text), [Draft::accept(2), Draft::EMPTY]);
/// drafter.attach(&spec, 32)?;
/// drafter.prefill(&[5, 6], None)?;
/// let proposed = drafter.propose(3)?;
/// assert_eq!(proposed[..2], text[..2]);
/// assert_ne!(proposed[2], text[2]);
/// # Ok(())
/// # }
/// ```
pub struct ScriptedDrafter {
    oracle: Box<Oracle>,
    schedule: Vec<Draft>,
    vocab: u32,
    log: DraftLogHandle,
}

impl ScriptedDrafter {
    /// A drafter that asks `oracle` what the target chooses after a text.
    ///
    /// An empty schedule proposes nothing.
    pub fn new(oracle: impl Fn(&[u32]) -> u32 + Send + 'static, schedule: impl Into<Vec<Draft>>) -> Self {
        Self {
            oracle: Box::new(oracle),
            schedule: schedule.into(),
            vocab: 0,
            log: DraftLogHandle::default(),
        }
    }

    /// A drafter that knows the whole text beforehand, prompt included, and proposes id 0 beyond its end.
    pub fn along(text: impl Into<Vec<u32>>, schedule: impl Into<Vec<Draft>>) -> Self {
        let text = text.into();
        let oracle = move |so_far: &[u32]| text.get(so_far.len()).copied().unwrap_or(0);
        Self::new(oracle, schedule)
    }

    /// What the drafter was told, readable from elsewhere.
    pub fn log(&self) -> DraftLogHandle {
        self.log.clone()
    }
}

impl Drafter for ScriptedDrafter {
    fn attach(&mut self, _target: &ModelSpec, vocab: usize) -> Result<()> {
        self.vocab = u32::try_from(vocab).unwrap_or(u32::MAX);
        Ok(())
    }

    fn prefill(&mut self, tokens: &[u32], _hidden: Option<&Tensor>) -> Result<()> {
        self.log.lock().text.extend_from_slice(tokens);
        Ok(())
    }

    fn propose(&mut self, k: usize) -> Result<Vec<u32>> {
        let mut log = self.log.lock();
        // A round that failed and was not observed is taken again.
        let observed = log.rounds.iter().filter(|round| round.accepted.is_some()).count();
        let draft = match self.schedule.len() {
            0 => Draft::EMPTY,
            rounds => self.schedule[observed % rounds],
        };
        let mut text = log.text.clone();
        let mut proposed = Vec::new();
        while proposed.len() < k.min(draft.length) {
            let mut id = (self.oracle)(&text);
            if proposed.len() == draft.right {
                id = (id + 1) % self.vocab.max(1);
            }
            // An id that may not be proposed ends the proposal.
            if id >= self.vocab {
                break;
            }
            proposed.push(id);
            text.push(id);
        }
        log.rounds.push(DraftRound {
            asked: k,
            proposed: proposed.clone(),
            accepted: None,
        });
        Ok(proposed)
    }

    fn observe(&mut self, tokens: &[u32], _hidden: Option<&Tensor>) {
        let log = &mut *self.log.lock();
        if log.text.is_empty() {
            log.problems
                .push(format!("observe({tokens:?}) before there is a text"));
        }
        let Some((_, before_pending)) = tokens.split_last() else {
            log.problems.push(String::from("observe() of no tokens"));
            return;
        };
        // Only the last proposal began where these tokens begin, and only if the text did not grow since.
        if let Some(round) = log.rounds.last_mut().filter(|round| round.accepted.is_none()) {
            let same = |(a, b): &(&u32, &u32)| a == b;
            let agreed = round.proposed.iter().zip(before_pending).take_while(same).count();
            round.accepted = Some(agreed);
        }
        log.text.extend_from_slice(tokens);
    }

    fn reset(&mut self) {
        *self.log.lock() = DraftLog::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ScriptedModel;
    use recant_core::LanguageModel;

    #[test]
    fn a_schedule_forces_what_is_accepted() -> Result<()> {
        let model = Arc::new(ScriptedModel::new(2, 16));
        let oracle = Arc::clone(&model);
        let schedule = [
            Draft::WRONG,
            Draft::accept(1),
            Draft::EMPTY,
            Draft { length: 2, right: 1 },
            Draft::RIGHT,
        ];
        let mut drafter = ScriptedDrafter::new(move |text| oracle.next(text), schedule);
        drafter.attach(model.spec(), 16)?;
        drafter.prefill(&[1, 2, 3], None)?;
        let mut text = vec![1, 2, 3];
        for (length, right) in [(4, 0), (4, 1), (0, 0), (2, 1), (4, 4), (4, 0)] {
            // A round that fails is not observed, and is proposed again.
            assert_eq!(drafter.propose(4)?, drafter.propose(4)?);
            let proposed = drafter.propose(4)?;
            let truth = model.continuation(&text, 5);
            let accepted = proposed.iter().zip(&truth).take_while(|(a, b)| a == b).count();
            assert_eq!((proposed.len(), accepted), (length, right));
            drafter.observe(&truth[..=accepted], None);
            text.extend(&truth[..=accepted]);
            let log = drafter.log().read();
            assert_eq!(log.text, text);
            assert_eq!(log.rounds.last().and_then(|round| round.accepted), Some(accepted));
        }
        // A round of somebody else's guesses is part of the text, and none of its own.
        let rounds = drafter.log().read().rounds;
        drafter.observe(&[1, 2], None);
        assert_eq!(drafter.log().read().rounds, rounds);
        assert!(drafter.log().read().problems.is_empty());
        drafter.observe(&[], None);
        drafter.reset();
        assert!(drafter.log().read().problems.is_empty());
        drafter.observe(&[1], None);
        assert_eq!(drafter.log().read().problems.len(), 1);
        Ok(())
    }
}
