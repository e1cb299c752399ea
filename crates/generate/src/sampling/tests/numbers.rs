//! Numbers that are none, ties, and parameters that cannot be meant.

use std::collections::BTreeSet;

use super::*;
use crate::Error;

const NAN: f32 = f32::NAN;
const INF: f32 = f32::INFINITY;

/// Tokens chosen from a row by all rules, with some seeds.
fn chosen(sampling: &Sampling, logits: &[f32]) -> crate::Result<BTreeSet<u32>> {
    let mut tokens = BTreeSet::new();
    for rule in [Rule::Coupled, Rule::Token, Rule::Block] {
        for seed in 0..60 {
            let sampling = Sampling {
                rule,
                seed,
                ..sampling.clone()
            };
            let mut sampler = Sampler::new(sampling, Vec::new(), None, logits.len())?;
            for readout in [Readout::All, sampler.readout()] {
                let row = output(&[logits.to_vec()], readout);
                let draft = sampler
                    .draws(&[0; 7])
                    .choose(&[], Row::only(&row)?, None, logits.len())?;
                let verdict = sampler.judge(&[0; 7], &[], &row, &mut |_| Ok(false))?;
                if rule == Rule::Coupled {
                    assert_eq!(draft.id, verdict.tokens[0], "one noise for both");
                }
                tokens.extend(verdict.tokens);
                tokens.insert(draft.id);
            }
        }
    }
    Ok(tokens)
}

fn every_way() -> Vec<Sampling> {
    let base = warm(0.8, Rule::Coupled);
    vec![
        Sampling::default(),
        base.clone(),
        Sampling {
            top_k: 2,
            ..base.clone()
        },
        Sampling {
            top_k: 1_000,
            ..base.clone()
        },
        Sampling {
            top_p: 0.9,
            ..base.clone()
        },
        Sampling {
            min_p: 0.01,
            ..base.clone()
        },
        Sampling {
            top_k: 3,
            top_p: 0.9,
            min_p: 0.01,
            repetition_penalty: 1.1,
            ..base
        },
    ]
}

#[test]
fn c086_nan_is_never_chosen_and_infinity_takes_all() {
    for sampling in every_way() {
        let is = |logits: &[f32]| -> Vec<u32> {
            let chosen = chosen(&sampling, logits).expect("a choice");
            chosen.into_iter().collect()
        };
        assert_eq!(is(&[NAN, -INF, 2.0]), [2]);
        assert_eq!(is(&[2.0, NAN, -30.0]), [0]);
        assert_eq!(is(&[-30.0, 2.0, NAN]), [1]);
        assert_eq!(is(&[1.0, NAN, INF, 3.0]), [2]);
        let both = is(&[INF, 9.0, INF, NAN, -INF]);
        let share: &[u32] = if sampling.temperature == 0.0 {
            &[0]
        } else {
            &[0, 2]
        };
        assert_eq!(both, share, "{sampling:?}");
        assert_eq!(is(&[f32::MIN, f32::MAX]), [1]);
        assert_eq!(is(&[-1e38, NAN]), [0]);
        assert_eq!(is(&[-1e-45]), [0]);
    }
}

#[test]
fn c086_a_row_without_a_choice_is_an_error_that_names_the_position() {
    for sampling in every_way() {
        let error = chosen(&sampling, &[NAN, NAN]).err();
        assert!(
            matches!(error, Some(Error::NoNumber { position: 7 })),
            "{error:?}"
        );
        let mut sampler = Sampler::new(sampling, Vec::new(), None, 2).expect("parameters");
        let row = output(&[vec![-INF, NAN]], sampler.readout());
        let error = sampler.judge(&[0; 7], &[], &row, &mut |_| Ok(false)).err();
        assert!(matches!(error, Some(Error::Banned { position: 7 })), "{error:?}");
    }
}

#[test]
fn a_drafter_whose_tokens_are_all_banned_still_guesses() {
    let sampling = Sampling {
        logit_bias: vec![(4, -INF), (6, -INF)],
        ..warm(0.5, Rule::Token)
    };
    let sampler = sampler(&sampling);
    let row = output(&[vec![1.0, 2.0]], Readout::All);
    let draft = sampler
        .draws(&[0])
        .choose(&[], Row::only(&row).expect("a row"), Some(&[4, 6]), 2);
    assert_eq!(draft.expect("a guess"), Proposed::guess(4));
}

#[test]
fn c086_parameters_that_cannot_be_meant_are_refused_by_name() {
    let refused = |name: &str, change: &dyn Fn(&mut Sampling)| {
        let mut sampling = Sampling::default();
        change(&mut sampling);
        let error = Sampler::new(sampling, Vec::new(), None, 8).err();
        let found = error.map(|error| error.to_string()).unwrap_or_default();
        assert!(
            found.contains(name) && found.contains("expected"),
            "{name}: {found:?}"
        );
    };
    for x in [NAN, INF, -INF] {
        refused("temperature", &|s| s.temperature = x);
        refused("top_p", &|s| s.top_p = x);
        refused("min_p", &|s| s.min_p = x);
        refused("repetition_penalty", &|s| s.repetition_penalty = x);
        refused("presence_penalty", &|s| s.presence_penalty = x);
        refused("frequency_penalty", &|s| s.frequency_penalty = x);
    }
    refused("temperature", &|s| s.temperature = -1.0);
    refused("top_p", &|s| s.top_p = 0.0);
    refused("top_p", &|s| s.top_p = 1.1);
    refused("min_p", &|s| s.min_p = -0.1);
    refused("min_p", &|s| s.min_p = 1.0);
    refused("repetition_penalty", &|s| s.repetition_penalty = 0.0);
    refused("repetition_penalty", &|s| s.repetition_penalty = -1.0);
    refused("logit_bias", &|s| s.logit_bias = vec![(1, 0.0), (8, 0.0)]);
    refused("logit_bias", &|s| s.logit_bias = vec![(1, NAN)]);
    refused("logit_bias", &|s| s.logit_bias = vec![(1, INF)]);
    let odd = Sampling {
        temperature: 1e30,
        top_k: usize::MAX,
        top_p: f32::MIN_POSITIVE,
        min_p: 0.999,
        repetition_penalty: f32::MAX,
        presence_penalty: f32::MIN,
        frequency_penalty: f32::MAX,
        penalty_window: Some(0),
        logit_bias: vec![(7, -INF), (7, 1.0)],
        seed: u64::MAX,
        rule: Rule::Block,
    };
    assert!(odd.check(8).is_ok());
    assert!(chosen(&odd, &[0.0; 8]).is_ok());
}

/// C087: at no temperature is there another rule for ties.
#[test]
fn c087_ties_go_to_the_lowest_id_down_to_temperature_zero() {
    let mut logits = vec![0.0; 16];
    (logits[3], logits[9]) = (2.5, 2.5);
    for temperature in [0.0, 1e-6, 1e-9, 1e-45] {
        let sampling = warm(temperature, Rule::Coupled);
        assert_eq!(chosen(&sampling, &logits).expect("a choice"), BTreeSet::from([3]));
    }
    // Equal logits are equally likely as soon as there is a temperature.
    let sampling = warm(1e-5, Rule::Coupled);
    assert_eq!(
        chosen(&sampling, &logits).expect("a choice"),
        BTreeSet::from([3, 9])
    );
}

#[test]
fn plain_greedy_is_what_needs_the_largest_logit_only() {
    let plain = |change: &dyn Fn(&mut Sampling)| {
        let mut sampling = Sampling::default();
        change(&mut sampling);
        let sampler = sampler(&sampling);
        let one = Readout::Largest {
            count: 1,
            among: VOCAB,
        };
        assert_eq!(sampler.readout() == one, sampling.is_plain_greedy());
        sampling.is_plain_greedy()
    };
    assert!(plain(&|_| ()));
    assert!(plain(&|s| (s.top_k, s.top_p, s.min_p, s.seed) = (3, 0.5, 0.5, 9)));
    assert!(plain(&|s| (s.presence_penalty, s.penalty_window) = (1.0, Some(0))));
    assert!(!plain(&|s| s.temperature = 0.1));
    assert!(!plain(&|s| s.presence_penalty = 0.1));
    assert!(!plain(&|s| s.frequency_penalty = -0.1));
    assert!(!plain(&|s| s.repetition_penalty = 0.9));
    assert!(!plain(&|s| s.logit_bias = vec![(0, 0.0)]));
}

#[test]
fn distributions_that_are_none_are_refused() {
    for (ids, weights) in [
        (vec![], vec![]),
        (vec![1], vec![]),
        (vec![1, 1], vec![0.5, 0.5]),
        (vec![2, 1], vec![0.5, 0.5]),
        (vec![1, 2], vec![0.0, 0.0]),
        (vec![1, 2], vec![-0.5, 1.5]),
        (vec![1, 2], vec![NAN, 1.0]),
        (vec![1, 2], vec![INF, 1.0]),
        (vec![1, 2], vec![-1.0, -1.0]),
    ] {
        let distribution = Distribution::new(ids.clone(), weights.clone());
        assert!(distribution.is_err(), "{ids:?}, {weights:?}: {distribution:?}");
    }
    let distribution = Distribution::new(vec![1, 4, 6], vec![3.0, 0.0, 1.0]).expect("a distribution");
    assert_eq!(
        (distribution.ids(), distribution.probabilities()),
        ([1, 6].as_slice(), [0.75, 0.25].as_slice())
    );
    let largest = Distribution::new(vec![1, 2], vec![f32::MAX; 2]).expect("a distribution");
    assert_eq!(largest.probabilities(), [0.5, 0.5]);
    assert_eq!((distribution.of(4), distribution.of(6)), (0.0, 0.25));
}

#[test]
fn rows_that_do_not_fit_are_refused() {
    let two = output(&[vec![1.0, 2.0], vec![2.0, 1.0]], Readout::All);
    let draws = Draws::greedy();
    assert!(draws
        .choose(&[], Row::only(&two).expect("logits"), None, 2)
        .is_err());
    let one = output(&[vec![1.0, 2.0]], Readout::All);
    let row = Row::only(&one).expect("a row");
    assert!(
        draws.choose(&[], row, Some(&[7]), 2).is_err(),
        "two logits of one id"
    );
    let largest = output(&[vec![1.0, 2.0]], Readout::Largest { count: 1, among: 2 });
    let row = Row::only(&largest).expect("a row");
    assert!(
        draws.choose(&[], row, Some(&[7]), 1).is_err(),
        "a place beyond the width"
    );
    assert_eq!(
        draws.choose(&[], row, Some(&[7, 8]), 2).expect("a draft"),
        Proposed::guess(8)
    );
}

#[test]
fn rows_are_read_wherever_and_in_whatever_type_they_lie() {
    let rows = [target(&PROMPT), target(&[4, 5])].concat();
    let rows: Vec<f32> = rows.iter().map(|logit| (logit * 8.0).round()).collect();
    let plain = Tensor::from_vec(rows, (2, VOCAB), &Device::Cpu).expect("two rows");
    let with = |other: &Tensor, place: usize| Tensor::cat(&[other; 3], place).expect("a larger tensor");
    let turned = plain.t().and_then(|turned| turned.contiguous()?.t());
    let half = plain.to_dtype(recant_core::candle::DType::F16);
    for logits in [
        plain.clone(),
        turned.expect("a transposed tensor"),
        half.expect("another type"),
        with(&plain, 0).narrow(0, 2, 2).expect("rows of a larger tensor"),
        with(&plain, 1)
            .narrow(1, VOCAB, VOCAB)
            .expect("columns of a larger tensor"),
        // What comes after the vocabulary does not count.
        with(&plain, 1),
    ] {
        let output = SegmentOutput {
            logits: Some(logits),
            largest: None,
            hidden: None,
        };
        let best = |row: &[f32]| (0..VOCAB).rev().max_by(|a, b| row[*a].total_cmp(&row[*b]));
        let plain = plain.to_vec2::<f32>().expect("two rows");
        let first = best(&plain[0]).expect("a token") as u32;
        let second = best(&plain[1]).expect("a token") as u32;
        let mut sampler = sampler(&Sampling::default());
        let verdict = sampler.judge(&PROMPT, &[Proposed::guess(first)], &output, &mut |_| Ok(false));
        assert_eq!(verdict.expect("a verdict").tokens, [first, second]);
    }
}
