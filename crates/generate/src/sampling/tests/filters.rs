//! What filters leave, held against everything sorted.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

/// What a drafter would draw from: the processed distribution, in the way of `readout`.
fn processed(sampling: &Sampling, logits: &[f32], readout: Option<Readout>) -> Vec<(u32, f32)> {
    let sampling = Sampling {
        rule: Rule::Token,
        ..sampling.clone()
    };
    let sampler = Sampler::new(sampling, Vec::new(), None, logits.len()).expect("parameters");
    let readout = readout.unwrap_or(sampler.readout());
    let row = output(&[logits.to_vec()], readout);
    let row = Row::only(&row).expect("a row");
    let draft = sampler
        .draws(&[0])
        .choose(&[], row, None, logits.len())
        .expect("a draft");
    let from = draft.from.expect("chance has a part in it");
    assert!(from.of(draft.id) > 0.0);
    from.iter().collect()
}

fn any_filters() -> impl Strategy<Value = Sampling> {
    let top_k = prop_oneof![Just(0usize), 1..90usize];
    let top_p = prop_oneof![Just(1.0f32), 0.05f32..1.0];
    let min_p = prop_oneof![Just(0.0f32), 0.001f32..0.9];
    (top_k, top_p, min_p, 0.2f32..3.0).prop_map(|(top_k, top_p, min_p, temperature)| Sampling {
        temperature,
        top_k,
        top_p,
        min_p,
        ..Sampling::default()
    })
}

/// Logits with many ties.
fn coarse() -> impl Strategy<Value = Vec<f32>> {
    prop::collection::vec((-20..20i8).prop_map(|x| f32::from(x) / 4.0), 1..400)
}

/// Whether rounding may decide what stays of the logits after `text`.
fn close_call(sampling: &Sampling, text: &[u32], logits: &[f32]) -> bool {
    let filters = Sampling {
        top_p: 1.0,
        min_p: 0.0,
        ..sampling.clone()
    };
    let mut p = expected(&filters, text, 0, logits);
    p.sort_by(|a, b| b.total_cmp(a));
    let near = |x: f64, border: f32| (x - f64::from(border)).abs() < 1e-5;
    let mut sum = 0.0;
    p.iter().any(|x| {
        sum += x;
        near(sum, sampling.top_p) && sampling.top_p < 1.0 || near(x / p[0], sampling.min_p) && *x > 0.0
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn filters_leave_what_sorting_leaves(sampling in any_filters(), logits in coarse()) {
        prop_assume!(!close_call(&sampling, &[], &logits));
        let expected = expected(&sampling, &[], 0, &logits);
        let found = processed(&sampling, &logits, Some(Readout::All));
        let ids: Vec<usize> = found.iter().map(|(id, _)| *id as usize).collect();
        let expected_ids: Vec<usize> = (0..logits.len()).filter(|id| expected[*id] > 0.0).collect();
        prop_assert_eq!(ids, expected_ids);
        for (id, p) in found {
            let exact = expected[id as usize];
            prop_assert!((f64::from(p) - exact).abs() <= 1e-5 * exact, "{}: {} and {}", id, p, exact);
        }
    }

    /// A model may give only the largest logits where no other can be chosen: that changes no bit.
    #[test]
    fn a_readout_of_the_largest_leaves_the_same(sampling in any_filters(), logits in coarse(), seed: u64) {
        prop_assert_eq!(processed(&sampling, &logits, None), processed(&sampling, &logits, Some(Readout::All)));
        for temperature in [0.0, sampling.temperature] {
            let sampling = Sampling { temperature, seed, ..sampling.clone() };
            let mut sampler = Sampler::new(sampling, Vec::new(), None, logits.len()).expect("parameters");
            let few = sampler.readout();
            let mut chosen = |readout| {
                let rows = output(std::slice::from_ref(&logits), readout);
                sampler.judge(&[0], &[], &rows, &mut |_| Ok(false)).expect("a verdict").tokens
            };
            prop_assert_eq!(chosen(few), chosen(Readout::All));
        }
    }

    /// The draft of a reduced head is the draft of the whole one with all other tokens banned.
    #[test]
    fn a_draft_vocabulary_is_a_ban_of_all_others(
        sampling in any_filters(),
        logits in prop::collection::vec(-3.0f32..3.0, 40),
        known in prop::collection::btree_set(0..40u32, 1..20),
        rule in prop::sample::select(vec![Rule::Coupled, Rule::Token]),
    ) {
        let biased = Sampling { rule, logit_bias: vec![(3, 1.0)], repetition_penalty: 1.4, ..sampling };
        let bans = (0..40).filter(|id| !known.contains(id)).map(|id| (id, f32::NEG_INFINITY));
        let banned = Sampling { logit_bias: biased.logit_bias.iter().copied().chain(bans).collect(), ..biased.clone() };
        prop_assume!(!close_call(&banned, &[5, 6, 7], &logits));
        let ids: Vec<u32> = known.into_iter().collect();
        let draft = |sampling: Sampling, logits: Vec<f32>, ids: Option<&[u32]>| {
            let sampler = Sampler::new(sampling, Vec::new(), None, 40).expect("parameters");
            let width = logits.len();
            let row = output(&[logits], Readout::All);
            let row = Row::only(&row).expect("a row");
            sampler.draws(&[5, 6]).choose(&[7], row, ids, width).expect("a draft")
        };
        let reduced = ids.iter().map(|id| logits[*id as usize]).collect();
        let (reduced, whole) = (draft(biased, reduced, Some(&ids)), draft(banned, logits, None));
        match (&reduced.from, &whole.from) {
            // Sums of other lengths round in other ways.
            (Some(a), Some(b)) => {
                prop_assert_eq!(a.ids(), b.ids());
                prop_assert!(a.iter().zip(b.iter()).all(|((_, a), (_, b))| (a - b).abs() < 1e-6));
            }
            _ => prop_assert_eq!(reduced, whole),
        }
    }
}

/// C085: above 32,768 tokens too, and in every way to the distribution.
#[test]
fn c085_min_p_works_at_any_size_and_on_every_path() {
    for vocab in [256, 40_000] {
        let mut logits: Vec<f32> = (0..vocab).map(|id| number([5, 5, id as u64])).collect();
        // Half as likely as the best at temperature 0.5; a fifth is the border.
        let best = [(vocab - 7, 3.0), (200, 2.65), (9, 2.2), (31, 2.19)];
        best.iter().for_each(|(id, logit)| logits[*id] = *logit);
        let kept = BTreeSet::from([vocab as u32 - 7, 200, 9]);
        for rule in [Rule::Coupled, Rule::Token, Rule::Block] {
            let mut drawn = BTreeSet::new();
            let mut drafted = BTreeSet::new();
            for seed in 0..150 {
                let sampling = Sampling {
                    min_p: 0.2,
                    seed,
                    ..warm(0.5, rule)
                };
                let mut sampler = Sampler::new(sampling, Vec::new(), None, vocab).expect("parameters");
                let row = output(&[logits.clone()], Readout::All);
                let draft = sampler
                    .draws(&[1])
                    .choose(&[], Row::only(&row).expect("a row"), None, vocab);
                drafted.insert(draft.expect("a draft").id);
                let verdict = sampler.judge(&[1], &[], &row, &mut |_| Ok(false));
                drawn.insert(verdict.expect("a verdict").tokens[0]);
            }
            assert_eq!(drawn, kept, "{rule:?} at {vocab}");
            assert_eq!(drafted, kept, "{rule:?} at {vocab}");
        }
    }
}

#[test]
fn the_lowest_ids_stay_at_the_border() {
    let mut logits = vec![1.0; 300];
    (logits[200], logits[40]) = (3.0, -0.0);
    let ids = |sampling: Sampling| -> Vec<u32> {
        processed(&sampling, &logits, Some(Readout::All))
            .into_iter()
            .map(|(id, _)| id)
            .collect()
    };
    let base = warm(1.0, Rule::Token);
    assert_eq!(
        ids(Sampling {
            top_k: 4,
            ..base.clone()
        }),
        [0, 1, 2, 200]
    );
    assert_eq!(
        ids(Sampling {
            top_k: 299,
            ..base.clone()
        })
        .len(),
        299
    );
    assert_eq!(
        ids(Sampling {
            top_k: 300,
            ..base.clone()
        })
        .len(),
        300
    );
    // The best has the weight of 7.39 others.
    let total = 7.389 + 298.0 + 0.368;
    assert_eq!(
        ids(Sampling {
            top_p: 8.5 / total,
            ..base.clone()
        }),
        [0, 1, 200]
    );
    assert_eq!(
        ids(Sampling {
            top_p: 7.0 / total,
            ..base
        }),
        [200]
    );
    let zeros = [0.0, -0.0, 0.0, -1.0, -0.0];
    let sampling = Sampling {
        top_k: 2,
        ..warm(1.0, Rule::Token)
    };
    let ids: Vec<u32> = processed(&sampling, &zeros, Some(Readout::All))
        .into_iter()
        .map(|(id, _)| id)
        .collect();
    assert_eq!(ids, [0, 1], "zeros of either sign are equal");
}
