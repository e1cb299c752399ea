//! Whatever drafts, and by whichever rule, the text has the target's distribution: 20,000 texts each, with 20,000 seeds.

use super::*;

const DRAWS: u64 = 20_000;

/// Probabilities of all texts of `length` tokens after the prompt.
fn joint(sampling: &Sampling, length: usize) -> Vec<f64> {
    let mut texts = vec![(PROMPT.to_vec(), 1.0)];
    for output in 0..length {
        let longer = |(text, p): (Vec<u32>, f64)| {
            let next = expected(sampling, &text, output, &target(&text));
            let longer = move |(id, q): (usize, f64)| ([text.as_slice(), &[id as u32]].concat(), p * q);
            next.into_iter().enumerate().map(longer)
        };
        texts = texts.into_iter().flat_map(longer).collect();
    }
    texts.into_iter().map(|(_, p)| p).collect()
}

/// Checks the first `length` tokens.
fn check(sampling: &Sampling, drafting: Drafting, k: usize, length: usize) {
    let mut counts = vec![0; VOCAB.pow(length as u32)];
    for seed in 0..DRAWS {
        let decoded = decode(&mut seeded(sampling, seed), drafting, k, length);
        let cell = decoded.tokens[..length]
            .iter()
            .fold(0, |cell, token| cell * VOCAB + *token as usize);
        counts[cell] += 1;
    }
    if let Err(error) = fits(&counts, &joint(sampling, length)) {
        panic!("{error}: {drafting:?}, {k} drafts, {sampling:?}");
    }
}

fn all_drafters_and_temperatures(rule: Rule) {
    for (case, drafting) in [Drafting::Good, Drafting::Bad, Drafting::Guess]
        .into_iter()
        .enumerate()
    {
        for (step, temperature) in [0.3, 0.7, 1.0, 1.5].into_iter().enumerate() {
            check(&warm(temperature, rule), drafting, 1 + (case + step) % 4, 3);
        }
    }
    check(&warm(1.0, rule), Drafting::Same, 2, 3);
}

#[test]
fn coupled_draws_have_the_target_s_distribution() {
    all_drafters_and_temperatures(Rule::Coupled);
}

#[test]
fn token_by_token_the_text_has_the_target_s_distribution() {
    all_drafters_and_temperatures(Rule::Token);
}

#[test]
fn judged_in_blocks_the_text_has_the_target_s_distribution() {
    all_drafters_and_temperatures(Rule::Block);
}

/// C080: drafts come from filtered distributions, and are judged by filtered ones.
#[test]
fn c080_filters_and_penalties_apply_to_both_sides() {
    let filtered = |change: fn(&mut Sampling)| {
        let mut sampling = warm(0.7, Rule::Token);
        change(&mut sampling);
        sampling
    };
    let cases = [
        filtered(|s| s.top_k = 3),
        filtered(|s| s.top_p = 0.8),
        filtered(|s| s.min_p = 0.1),
        filtered(|s| (s.repetition_penalty, s.presence_penalty) = (1.3, 0.4)),
        filtered(|s| {
            (s.top_k, s.top_p, s.min_p) = (5, 0.9, 0.05);
            (s.repetition_penalty, s.presence_penalty, s.frequency_penalty) = (1.2, 0.3, 0.2);
            s.penalty_window = Some(3);
            s.logit_bias = vec![(4, 0.7), (1, f32::NEG_INFINITY)];
        }),
    ];
    for (case, sampling) in cases.into_iter().enumerate() {
        for rule in [Rule::Token, Rule::Block, Rule::Coupled] {
            for drafting in [Drafting::Good, Drafting::Bad, Drafting::Guess] {
                let sampling = Sampling {
                    rule,
                    ..sampling.clone()
                };
                check(&sampling, drafting, 2 + case % 2, 2);
            }
        }
    }
}

/// C079: 0.5, 0.3 and 0.2, and a drafter that is always right.
#[test]
fn c079_every_token_comes_at_its_rate() {
    let logits: Vec<f32> = [0.5f32, 0.3, 0.2].map(f32::ln).to_vec();
    for rule in [Rule::Coupled, Rule::Token, Rule::Block] {
        let mut counts = [0; 3];
        for seed in 0..300 {
            let sampling = Sampling {
                seed,
                ..warm(1.0, rule)
            };
            let mut sampler = Sampler::new(sampling, Vec::new(), None, 3).expect("parameters");
            sampler.begin(&[0]);
            let row = output(std::slice::from_ref(&logits), Readout::All);
            let draft = sampler
                .draws(&[0])
                .choose(&[], Row::only(&row).expect("a row"), None, 3);
            let rows = output(&[logits.clone(), logits.clone()], Readout::All);
            let verdict = sampler.judge(&[0], &[draft.expect("a draft")], &rows, &mut |_| Ok(false));
            let verdict = verdict.expect("a verdict");
            assert_eq!(
                verdict.accepted, 1,
                "{rule:?}: it draws from the target's distribution"
            );
            counts[verdict.tokens[0] as usize] += 1;
        }
        fits(&counts, &[0.5, 0.3, 0.2]).unwrap_or_else(|error| panic!("{rule:?}: {error}"));
    }
}

/// C082, and what the coupled rule promises beyond it.
#[test]
fn c082_a_seed_gives_one_text_and_other_seeds_give_others() {
    let text = |temperature, rule, seed| {
        decode(&mut seeded(&warm(temperature, rule), seed), Drafting::Good, 3, 12).tokens[..12].to_vec()
    };
    for rule in [Rule::Coupled, Rule::Token, Rule::Block] {
        let texts: Vec<_> = (1..=50).map(|seed| text(1.0, rule, seed)).collect();
        let again: Vec<_> = (1..=50).map(|seed| text(1.0, rule, seed)).collect();
        assert_eq!(texts, again);
        let distinct: std::collections::BTreeSet<_> = texts.into_iter().collect();
        assert!(
            distinct.len() > 45,
            "{rule:?}: {} texts of 50 seeds",
            distinct.len()
        );
        // Temperature counts: cold texts are fewer.
        let cold: std::collections::BTreeSet<_> = (1..=50).map(|seed| text(0.1, rule, seed)).collect();
        assert!(cold.len() < distinct.len(), "{rule:?}: {} cold texts", cold.len());
    }
}

#[test]
fn a_test_of_distributions_refuses_what_is_a_little_off() {
    assert!(fits(&[10_000, 6_000, 4_000], &[0.5, 0.3, 0.2]).is_ok());
    assert!(fits(&[10_100, 5_950, 3_950], &[0.5, 0.3, 0.2]).is_ok());
    assert!(fits(&[10_400, 5_800, 3_800], &[0.5, 0.3, 0.2]).is_err());
    assert!(fits(&[10_000, 9_999, 1], &[0.5, 0.5, 0.0]).is_err());
}
