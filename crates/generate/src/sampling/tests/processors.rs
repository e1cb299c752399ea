//! Processors of the caller's see every token that stays, once and in order, and no other.

use std::sync::{Arc, Mutex};

use proptest::prelude::*;

use super::*;
use crate::Error;

/// What a processor was told and shown.
#[derive(Debug, Default)]
struct Seen {
    /// The text, by what `begin` and `accept` told.
    told: Vec<u32>,
    /// Lengths of the texts that were shown.
    shown: Vec<usize>,
    /// Texts shown that are not what was told.
    stale: usize,
}

/// C083: bans the token that came last, and takes down what it sees.
struct NoRepeat(Arc<Mutex<Seen>>);

impl LogitsProcessor for NoRepeat {
    fn begin(&mut self, text: &[u32]) {
        let mut seen = self.0.lock().expect("a lock");
        seen.told = text.to_vec();
    }

    fn accept(&mut self, token: u32) {
        self.0.lock().expect("a lock").told.push(token);
    }

    fn process(&mut self, text: &[u32], logits: &mut [f32]) -> crate::Result<()> {
        let mut seen = self.0.lock().expect("a lock");
        seen.stale += usize::from(seen.told != text);
        seen.shown.push(text.len());
        logits[text[text.len() - 1] as usize] = f32::NEG_INFINITY;
        Ok(())
    }
}

fn watched(sampling: &Sampling) -> (Sampler, Arc<Mutex<Seen>>) {
    let seen = Arc::new(Mutex::new(Seen::default()));
    let processor = Box::new(NoRepeat(Arc::clone(&seen)));
    let sampler = Sampler::new(sampling.clone(), vec![processor], None, VOCAB).expect("parameters");
    (sampler, seen)
}

#[test]
fn c083_processors_see_the_tokens_that_stay_and_no_others() {
    for rule in [Rule::Coupled, Rule::Token, Rule::Block] {
        for temperature in [0.0, 0.7, 1.5] {
            for drafting in [Drafting::Good, Drafting::Bad, Drafting::Guess] {
                for seed in 0..40 {
                    let sampling = Sampling {
                        seed,
                        ..warm(temperature, rule)
                    };
                    let (mut sampler, seen) = watched(&sampling);
                    let decoded = decode(&mut sampler, drafting, 4, 20);
                    let text = [&PROMPT, decoded.tokens.as_slice()].concat();
                    let seen = seen.lock().expect("a lock");
                    assert_eq!(seen.told, text);
                    assert_eq!(seen.stale, 0, "{rule:?}");
                    let lengths: Vec<usize> = (PROMPT.len()..text.len()).collect();
                    assert_eq!(seen.shown, lengths, "each position is shown once");
                    let repeated = text[1..].windows(2).any(|pair| pair[0] == pair[1]);
                    assert!(!repeated, "{text:?}");
                }
            }
        }
    }
}

/// Their distribution is the processed one: the last token has none.
#[test]
fn texts_under_a_processor_have_its_distribution() {
    for rule in [Rule::Token, Rule::Block, Rule::Coupled] {
        let mut counts = vec![0; VOCAB * VOCAB];
        let sampling = warm(1.0, rule);
        for seed in 0..10_000 {
            let sampling = Sampling {
                seed,
                ..sampling.clone()
            };
            let decoded = decode(&mut watched(&sampling).0, Drafting::Good, 3, 2);
            counts[decoded.tokens[0] as usize * VOCAB + decoded.tokens[1] as usize] += 1;
        }
        let next = |text: &[u32]| {
            let mut logits = target(text);
            logits[text[text.len() - 1] as usize] = f32::NEG_INFINITY;
            expected(&sampling, text, 0, &logits)
        };
        let mut probabilities = Vec::new();
        for (first, p) in next(&PROMPT).into_iter().enumerate() {
            let second = next(&[PROMPT[0], PROMPT[1], first as u32]);
            probabilities.extend(second.into_iter().map(|q| p * q));
        }
        fits(&counts, &probabilities).unwrap_or_else(|error| panic!("{rule:?}: {error}"));
    }
}

proptest! {
    #[test]
    fn greedy_text_under_a_processor_does_not_depend_on_proposals(
        proposals in prop::collection::vec(prop::collection::vec(0..8u32, 0..5), 24),
        presence_penalty in -0.5f32..0.5,
        rule in prop::sample::select(vec![Rule::Coupled, Rule::Token, Rule::Block]),
    ) {
        let sampling = Sampling { presence_penalty, rule, ..Sampling::default() };
        let plain = decode(&mut watched(&sampling).0, Drafting::Bad, 0, 24);
        let (mut sampler, _) = watched(&sampling);
        sampler.begin(&PROMPT);
        let mut text = PROMPT.to_vec();
        for guesses in proposals {
            // Now and then what comes next indeed.
            let place = text.len() - PROMPT.len();
            let right = plain.tokens.get(place..).unwrap_or_default().iter().take(guesses.len() / 2);
            let guesses = right.chain(&guesses).map(|id| Proposed::guess(*id)).collect::<Vec<_>>();
            text.extend(judge(&mut sampler, &text, &guesses).tokens);
        }
        let length = (text.len() - PROMPT.len()).min(plain.tokens.len());
        prop_assert_eq!(&text[PROMPT.len()..][..length], &plain.tokens[..length]);
    }
}

/// Fails when it is shown the second token of a round.
struct Fails(usize);

impl LogitsProcessor for Fails {
    fn begin(&mut self, _text: &[u32]) {
        self.0 = 0;
    }

    fn accept(&mut self, _token: u32) {
        self.0 += 1;
    }

    fn process(&mut self, _text: &[u32], _logits: &mut [f32]) -> crate::Result<()> {
        match self.0 {
            0 => Ok(()),
            _ => Err(Error::Processor("the grammar has no such rule".to_owned())),
        }
    }
}

#[test]
fn a_round_that_failed_is_undone_by_rewinding() {
    let seen = Arc::new(Mutex::new(Seen::default()));
    let processors: Vec<Box<dyn LogitsProcessor>> =
        vec![Box::new(NoRepeat(Arc::clone(&seen))), Box::new(Fails(0))];
    let mut sampler = Sampler::new(Sampling::default(), processors, None, VOCAB).expect("parameters");
    sampler.begin(&PROMPT);
    let mut next = target(&PROMPT);
    next[PROMPT[1] as usize] = f32::NEG_INFINITY;
    let best = (0..VOCAB as u32).max_by(|a, b| next[*a as usize].total_cmp(&next[*b as usize]));
    let right = Proposed::guess(best.expect("a token"));
    let rows = output(&[next.clone(), next], sampler.readout());
    for _ in 0..2 {
        let error = sampler
            .judge(&PROMPT, std::slice::from_ref(&right), &rows, &mut |_| Ok(false))
            .err();
        assert!(error.is_some_and(|error| error.to_string().contains("the grammar has no such rule")));
        assert_eq!(seen.lock().expect("a lock").told, [1, 2, right.id]);
        sampler.rewind(&PROMPT);
        assert_eq!(seen.lock().expect("a lock").told, PROMPT);
    }
    assert_eq!(seen.lock().expect("a lock").stale, 0);
}
