//! Drafters held against the law of drafters.

use std::sync::Arc;

use recant_core::candle::Tensor;
use recant_core::{CacheOptions, Hidden, LanguageModel, ModelSpec};
use recant_generate::{CombinedDrafter, Drafter, ModelDrafter, NgramDrafter, Result};
use recant_testkit::conformance::{self, Options};
use recant_testkit::{Draft, Failure, ScriptedDrafter, ScriptedModel};

#[test]
fn a_model_drafter_passes() -> std::result::Result<(), Failure> {
    let target = ScriptedModel::new(1, 32);
    let draft: Arc<dyn LanguageModel> = Arc::new(ScriptedModel::new(2, 32));
    let make = || ModelDrafter::new(Arc::clone(&draft), &CacheOptions::default());
    conformance::drafter(
        || Box::new(make().expect("a drafter")),
        &target,
        &Options::default(),
    )
}

#[test]
fn drafters_that_look_up_the_text_pass() -> std::result::Result<(), Failure> {
    // Few ids and a short least length, so that much repeats.
    let target = ScriptedModel::new(1, 3);
    let options = Options::default();
    for least in [1, 2, 3] {
        let ngram = || NgramDrafter::new().with_least(least);
        conformance::drafter(|| Box::new(ngram()), &target, &options)?;
        let draft: Arc<dyn LanguageModel> = Arc::new(ScriptedModel::new(2, 3));
        let make = || ModelDrafter::new(Arc::clone(&draft), &CacheOptions::default());
        conformance::drafter(
            || {
                Box::new(CombinedDrafter::new(
                    ngram(),
                    Box::new(make().expect("a drafter")),
                ))
            },
            &target,
            &options,
        )?;
    }
    Ok(())
}

#[test]
fn a_scripted_drafter_that_is_always_right_passes() -> std::result::Result<(), Failure> {
    let target = ScriptedModel::new(1, 32);
    let make = || -> Box<dyn Drafter> {
        let model = ScriptedModel::new(1, 32);
        Box::new(ScriptedDrafter::new(move |text| model.next(text), [Draft::RIGHT]))
    };
    conformance::drafter(make, &target, &Options::default())
}

#[derive(Debug, Clone, Copy)]
enum Flaw {
    None,
    /// As when the last accepted token never gets into a draft model's cache.
    MissesTheLastAccepted,
    /// As when a round without drafts returns before it takes in the text.
    SleepsThroughEmptyRounds,
    /// As when a drafter believes that what it did not guess was not kept.
    TakesInNoMoreThanItProposed,
    /// As when an old proposal is compared with what came rounds later.
    ComparesWithAnOldProposal,
    KeepsItsGuesses,
    /// As when a second proposal in a round continues the first.
    GoesOnWhenAskedAgain,
    SurvivesReset,
    ProposesTooMuch,
    ProposesBeyondTheVocabulary,
    TakesHiddenRowsOfTheWrongTokens,
}

/// Proposes a hash of the text it believes in, or of the hidden rows.
struct Hashing {
    flaw: Flaw,
    text: Vec<u32>,
    proposed: Vec<u32>,
    rows: Vec<f32>,
}

impl Hashing {
    fn next(&self, text: &[u32]) -> u32 {
        let rows = self.rows.iter().map(|x| *x as u32);
        text.iter()
            .copied()
            .chain(rows)
            .fold(17, |hash: u32, x| (hash * 31 + x + 1) % 32749)
            % 32
    }

    fn forget_guesses(&mut self) {
        if matches!(self.flaw, Flaw::GoesOnWhenAskedAgain) {
            self.rows.clear();
        }
    }

    fn take(&mut self, hidden: Option<&Tensor>, skip: usize) -> Result<()> {
        let Some(hidden) = hidden else { return Ok(()) };
        let rows = hidden.to_vec2::<f32>().map_err(recant_core::Error::from)?;
        self.rows.extend(rows.into_iter().skip(skip).flatten());
        Ok(())
    }
}

impl Drafter for Hashing {
    fn attach(&mut self, _target: &ModelSpec, _vocab: usize) -> Result<()> {
        Ok(())
    }

    fn prefill(&mut self, tokens: &[u32], hidden: Option<&Tensor>) -> Result<()> {
        self.text.extend_from_slice(tokens);
        self.take(hidden, 0)
    }

    fn propose(&mut self, k: usize) -> Result<Vec<u32>> {
        let mut text = self.text.clone();
        let k = if matches!(self.flaw, Flaw::ProposesTooMuch) {
            k + 1
        } else {
            k
        };
        for _ in 0..k {
            text.push(self.next(&text));
        }
        self.proposed = text.split_off(self.text.len());
        match self.flaw {
            Flaw::KeepsItsGuesses => self.text.extend(&self.proposed),
            Flaw::GoesOnWhenAskedAgain => self.rows = self.proposed.iter().map(|id| *id as f32).collect(),
            _ => {}
        }
        match self.flaw {
            Flaw::ProposesBeyondTheVocabulary => Ok(self.proposed.iter().map(|id| id + 32).collect()),
            _ => Ok(self.proposed.clone()),
        }
    }

    fn observe(&mut self, tokens: &[u32], hidden: Option<&Tensor>) {
        let Some((next, kept)) = tokens.split_last() else {
            return;
        };
        let agreed = self.proposed.iter().zip(kept).take_while(|(a, b)| a == b).count();
        let mut kept = kept.to_vec();
        match self.flaw {
            Flaw::MissesTheLastAccepted if agreed > 0 => drop(kept.remove(agreed - 1)),
            Flaw::SleepsThroughEmptyRounds if self.proposed.is_empty() => return,
            Flaw::TakesInNoMoreThanItProposed => kept.truncate(agreed),
            Flaw::ComparesWithAnOldProposal if !self.proposed.is_empty() && agreed == 0 => {
                kept.truncate(self.proposed.len());
            }
            _ => {}
        }
        self.text.extend(kept);
        self.text.push(*next);
        if !matches!(self.flaw, Flaw::ComparesWithAnOldProposal) {
            self.proposed.clear();
        }
        self.forget_guesses();
        let skip =
            usize::from(matches!(self.flaw, Flaw::TakesHiddenRowsOfTheWrongTokens) && tokens.len() > 1);
        self.take(hidden, skip).expect("rows of f32");
    }

    fn wants_hidden(&self) -> Option<Hidden> {
        let wants = matches!(self.flaw, Flaw::None | Flaw::TakesHiddenRowsOfTheWrongTokens);
        wants.then_some(Hidden::PostNorm)
    }

    fn reset(&mut self) {
        self.rows.clear();
        if !matches!(self.flaw, Flaw::SurvivesReset) {
            self.text.clear();
        }
    }
}

#[test]
fn c010_c013_c015_every_flaw_of_a_drafter_is_found() {
    let target = ScriptedModel::new(1, 32);
    for (flaw, says) in [
        (Flaw::None, ""),
        (
            Flaw::MissesTheLastAccepted,
            "a new drafter that is given the same text",
        ),
        (
            Flaw::SleepsThroughEmptyRounds,
            "a new drafter that is given the same text",
        ),
        (
            Flaw::TakesInNoMoreThanItProposed,
            "a new drafter that is given the same text",
        ),
        (
            Flaw::ComparesWithAnOldProposal,
            "a new drafter that is given the same text",
        ),
        (Flaw::KeepsItsGuesses, "guesses that were not kept leave no trace"),
        (Flaw::GoesOnWhenAskedAgain, "changed the next proposal"),
        (Flaw::SurvivesReset, "a new drafter that is given the same text"),
        (Flaw::ProposesTooMuch, "with ids below 32 allowed"),
        (Flaw::ProposesBeyondTheVocabulary, "with ids below 32 allowed"),
        (
            Flaw::TakesHiddenRowsOfTheWrongTokens,
            "a new drafter that is given the same text",
        ),
    ] {
        let make = || -> Box<dyn Drafter> {
            Box::new(Hashing {
                flaw,
                text: Vec::new(),
                proposed: Vec::new(),
                rows: Vec::new(),
            })
        };
        let result = conformance::drafter(make, &target, &Options::default());
        let found = result
            .err()
            .map_or_else(String::new, |failure| failure.to_string());
        assert!(
            found.contains(says) && found.is_empty() == says.is_empty(),
            "{flaw:?}: {found}"
        );
    }
}
