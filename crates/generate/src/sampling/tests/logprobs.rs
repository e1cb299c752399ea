//! Log-probabilities, held against everything computed in f64.

use super::*;

fn with_logprobs(sampling: &Sampling, top: usize, of: LogprobsOf) -> Sampler {
    let options = Some(LogprobsOptions { top, of });
    Sampler::new(sampling.clone(), Vec::new(), options, VOCAB).expect("parameters")
}

/// The logarithms of these probabilities, as they are to be named.
fn named(probabilities: &[f64], chosen: u32, top: usize) -> Logprobs {
    let mut ids: Vec<usize> = (0..probabilities.len())
        .filter(|id| probabilities[*id] > 0.0)
        .collect();
    ids.sort_by(|a, b| probabilities[*b].total_cmp(&probabilities[*a]).then(a.cmp(b)));
    let log = |id: usize| probabilities[id].ln() as f32;
    Logprobs {
        logprob: log(chosen as usize),
        top: ids.into_iter().take(top).map(|id| (id as u32, log(id))).collect(),
    }
}

fn assert_close(found: &Logprobs, expected: &Logprobs) {
    let close = |a: f32, b: f32| (a - b).abs() < 1e-5;
    assert!(close(found.logprob, expected.logprob), "{found:?}, {expected:?}");
    let ids = |logprobs: &Logprobs| -> Vec<u32> { logprobs.top.iter().map(|(id, _)| *id).collect() };
    assert_eq!(ids(found), ids(expected));
    assert!(
        found.top.iter().zip(&expected.top).all(|(a, b)| close(a.1, b.1)),
        "{found:?}, {expected:?}"
    );
}

#[test]
fn each_token_comes_with_its_probability_in_the_distribution_that_was_asked_for() {
    let plain = warm(1.0, Rule::Coupled);
    for rule in [Rule::Coupled, Rule::Token, Rule::Block] {
        for temperature in [0.0, 0.6] {
            let sampling = Sampling {
                top_k: 5,
                top_p: 0.9,
                presence_penalty: 0.7,
                logit_bias: vec![(2, 0.5)],
                ..warm(temperature, rule)
            };
            // At temperature 0 there are no filters to speak of, and the temperature is 1.
            let shown = match temperature {
                0.0 => Sampling {
                    top_k: 0,
                    top_p: 1.0,
                    temperature: 1.0,
                    ..sampling.clone()
                },
                _ => sampling.clone(),
            };
            for (of, shown) in [(LogprobsOf::Raw, &plain), (LogprobsOf::Processed, &shown)] {
                for seed in 0..30 {
                    let sampling = Sampling {
                        seed,
                        ..sampling.clone()
                    };
                    let mut sampler = with_logprobs(&sampling, 3, of);
                    sampler.begin(&PROMPT);
                    let proposed = Drafting::Good.propose(&sampler, &PROMPT, 3);
                    let verdict = judge(&mut sampler, &PROMPT, &proposed);
                    assert_eq!(verdict.logprobs.len(), verdict.tokens.len());
                    for (place, found) in verdict.logprobs.iter().enumerate() {
                        let text = [&PROMPT, &verdict.tokens[..place]].concat();
                        let p = expected(shown, &text, place, &target(&text));
                        assert_close(found, &named(&p, verdict.tokens[place], 3));
                    }
                }
            }
        }
    }
}

/// C090: whatever ends the text ends these too.
#[test]
fn c090_logprobs_end_with_the_token_that_ends_the_text() {
    for rule in [Rule::Coupled, Rule::Token, Rule::Block] {
        let mut sampler = with_logprobs(&warm(1.0, rule), 0, LogprobsOf::Raw);
        sampler.begin(&PROMPT);
        let proposed = Drafting::Same.propose(&sampler, &PROMPT, 6);
        let whole = judge(&mut sampler, &PROMPT, &proposed);
        assert_eq!((whole.tokens.len(), whole.logprobs.len()), (7, 7));
        let rows: Vec<Vec<f32>> = (0..=6)
            .map(|place| target(&[&PROMPT, &whole.tokens[..place]].concat()))
            .collect();
        let mut tokens = 0;
        let rows = output(&rows, sampler.readout());
        let cut = sampler.judge(&PROMPT, &proposed, &rows, &mut |_| {
            tokens += 1;
            Ok(tokens == 3)
        });
        let cut = cut.expect("a verdict");
        assert_eq!(cut.tokens, whole.tokens[..3]);
        assert_eq!(cut.logprobs, whole.logprobs[..3]);
        assert!(cut.logprobs.iter().all(|logprobs| logprobs.top.is_empty()));
    }
}

#[test]
fn asking_for_logprobs_changes_no_token() {
    for rule in [Rule::Coupled, Rule::Token, Rule::Block] {
        for sampling in [
            warm(0.0, rule),
            warm(0.8, rule),
            Sampling {
                top_k: 3,
                ..warm(0.8, rule)
            },
        ] {
            let plain = decode(&mut sampler(&sampling), Drafting::Good, 3, 30).tokens;
            for of in [LogprobsOf::Raw, LogprobsOf::Processed] {
                let mut sampler = with_logprobs(&sampling, 2, of);
                assert_eq!(decode(&mut sampler, Drafting::Good, 3, 30).tokens, plain);
            }
        }
    }
}

#[test]
fn all_of_a_vocabulary_can_be_named_and_ties_are_named_lowest_first() {
    let mut sampler = with_logprobs(&Sampling::default(), 1_000, LogprobsOf::Raw);
    let rows = output(
        &[vec![1.0, 2.0, f32::NAN, 1.0, 2.0, f32::NEG_INFINITY, 0.0, 2.0]],
        sampler.readout(),
    );
    let verdict = sampler
        .judge(&[0], &[], &rows, &mut |_| Ok(false))
        .expect("a verdict");
    let ids: Vec<u32> = verdict.logprobs[0].top.iter().map(|(id, _)| *id).collect();
    assert_eq!(ids, [1, 4, 7, 0, 3, 6]);
    let infinite = output(
        &[vec![1.0, f32::INFINITY, 0.0, f32::INFINITY, 0.0, 0.0, 0.0, 0.0]],
        sampler.readout(),
    );
    let verdict = sampler
        .judge(&[0], &[], &infinite, &mut |_| Ok(false))
        .expect("a verdict");
    let half = 0.5f32.ln();
    assert_eq!(verdict.logprobs[0].logprob, half);
    assert_eq!(verdict.logprobs[0].top, [(1, half), (3, half)]);
}
