//! Drafters: what they propose depends on the text alone.

use candle_core::Tensor;
use recant_core::{CacheOptions, LanguageModel, Rows, Segment};
use recant_generate::Drafter;

use super::Options;
use crate::rng::Rng;
use crate::Failure;

/// Most tokens asked for in a round.
const WIDEST: usize = 4;

pub(super) fn check(
    make: &dyn Fn() -> Box<dyn Drafter>,
    target: &dyn LanguageModel,
    options: &Options,
) -> Result<(), Failure> {
    let mut rng = Rng::new(options.seed);
    for run in 0..6 {
        let ids = target.spec().vocab_size.min(32) - 1;
        let draw = |rng: &mut Rng| u32::try_from(rng.between(0, ids)).unwrap_or(0);
        let prompt: Vec<u32> = (0..rng.between(1, options.tokens))
            .map(|_| draw(&mut rng))
            .collect();
        let mut followed = Followed::new(make(), target)?;
        if run % 2 == 1 {
            followed.prefill(&[7 % target.spec().vocab_size as u32; 9])?;
            followed.propose(WIDEST)?;
            followed.drafter.reset();
            followed.text.clear();
        }
        followed.prefill(&prompt)?;
        for round in 0..20 {
            // Spells without drafts, as when depth adapts or another drafter is asked.
            let spell = (5..9).contains(&round);
            let k = if spell { 0 } else { rng.between(0, WIDEST) };
            let proposed = if spell && run % 2 == 0 {
                Vec::new()
            } else {
                let proposed = followed.propose(k)?;
                if rng.between(0, 3) == 0 && followed.propose(k)? != proposed {
                    return Err(followed.broken("a round that was not observed changed the next proposal"));
                }
                let mut fresh = Followed::new(make(), target)?;
                fresh.prefill(&followed.text)?;
                let expected = fresh.propose(k)?;
                if proposed != expected {
                    return Err(followed.broken(&format!(
                        "it proposes {proposed:?}, and a new drafter that is given the same text proposes {expected:?}"
                    )));
                }
                proposed
            };
            // The first of its own guesses, then others', then the token that is pending; sometimes that is its own too.
            let mut tokens = proposed[..rng.between(0, proposed.len())].to_vec();
            if rng.between(0, 2) == 0 {
                tokens.extend((0..rng.between(1, WIDEST)).map(|_| draw(&mut rng)));
            }
            if tokens.is_empty() || rng.between(0, 3) > 0 {
                tokens.push(draw(&mut rng));
            }
            followed.observe(&tokens)?;
        }
    }
    Ok(())
}

/// A drafter, and the text it was told.
struct Followed<'a> {
    drafter: Box<dyn Drafter>,
    target: &'a dyn LanguageModel,
    text: Vec<u32>,
    scene: String,
}

impl<'a> Followed<'a> {
    fn new(drafter: Box<dyn Drafter>, target: &'a dyn LanguageModel) -> Result<Self, Failure> {
        let mut followed = Self {
            drafter,
            target,
            text: Vec::new(),
            scene: String::from("a new drafter"),
        };
        let attached = followed.drafter.attach(target.spec(), target.spec().vocab_size);
        followed.done("attach()", attached)?;
        Ok(followed)
    }

    fn prefill(&mut self, tokens: &[u32]) -> Result<(), Failure> {
        self.scene.push_str(&format!(", told {} tokens", tokens.len()));
        self.text.extend_from_slice(tokens);
        // The first token has none before it, so no hidden row comes with it.
        let (first, later) = tokens.split_at(1);
        for (part, known) in [(first, false), (later, true)] {
            if part.is_empty() {
                continue;
            }
            let hidden = if known {
                self.hidden(self.text.len() - tokens.len(), part.len())?
            } else {
                None
            };
            let result = self.drafter.prefill(part, hidden.as_ref());
            self.done("prefill()", result)?;
        }
        Ok(())
    }

    fn propose(&mut self, k: usize) -> Result<Vec<u32>, Failure> {
        self.scene.push_str(&format!(", asked for {k}"));
        let result = self.drafter.propose(k);
        let proposed = self.done("propose()", result)?;
        self.scene.push_str(&format!(", proposed {proposed:?}"));
        let vocab = self.target.spec().vocab_size;
        if proposed.len() > k || proposed.iter().any(|id| *id as usize >= vocab) {
            return Err(self.broken(&format!(
                "it proposes {proposed:?}, with ids below {vocab} allowed"
            )));
        }
        Ok(proposed)
    }

    fn observe(&mut self, tokens: &[u32]) -> Result<(), Failure> {
        self.scene.push_str(&format!(", grew by {tokens:?}"));
        let start = self.text.len() - 1;
        self.text.extend(tokens);
        let hidden = self.hidden(start, tokens.len())?;
        self.drafter.observe(tokens, hidden.as_ref());
        Ok(())
    }

    /// The target's hidden rows for `rows` tokens of the text from `start` on, if the drafter wants them.
    fn hidden(&self, start: usize, rows: usize) -> Result<Option<Tensor>, Failure> {
        let Some(kind) = self.drafter.wants_hidden() else {
            return Ok(None);
        };
        let run = || -> recant_core::Result<Tensor> {
            let mut caches = self.target.new_caches(&CacheOptions::default())?;
            let mut segment = Segment::new(&self.text[..start + rows], &mut caches, Rows::None);
            segment.hidden = Some(kind);
            let output = self.target.forward(&mut [segment])?;
            let hidden = output
                .segments
                .first()
                .and_then(|segment| segment.hidden.as_ref());
            let hidden =
                hidden.ok_or_else(|| recant_core::Error::mismatch("output", "hidden rows", "none"))?;
            Ok(hidden.narrow(0, start, rows)?.contiguous()?)
        };
        let result = run().map_err(Into::into);
        self.done("the target's forward()", result).map(Some)
    }

    fn broken(&self, detail: &str) -> Failure {
        Failure::Broken {
            law: LAW,
            scene: self.scene.clone(),
            detail: detail.to_owned(),
        }
    }

    fn done<T>(&self, step: &str, result: recant_generate::Result<T>) -> Result<T, Failure> {
        result.map_err(|error| Failure::Refused {
            law: LAW,
            scene: self.scene.clone(),
            step: step.to_owned(),
            source: Box::new(recant_core::Error::other(error)),
        })
    }
}

const LAW: &str =
    "what a drafter proposes depends on the text alone: guesses that were not kept leave no trace";
