//! How many drafts are accepted, and what they must not change.

use proptest::prelude::*;

use super::*;

const DRAWS: u64 = 20_000;

/// The sum over all tokens of the lesser probability, for the first token after the prompt.
fn overlap(sampling: &Sampling, drafting: Drafting) -> f64 {
    let p = expected(sampling, &PROMPT, 0, &target(&PROMPT));
    let q = expected(sampling, &PROMPT, 0, &drafting.logits(&PROMPT));
    p.iter().zip(&q).map(|(p, q)| p.min(*q)).sum()
}

/// How often the first draft is accepted, and four standard deviations of that.
fn first_accepted(sampling: &Sampling, drafting: Drafting) -> (f64, f64) {
    let accepted = (0..DRAWS).map(|seed| decode(&mut seeded(sampling, seed), drafting, 1, 1).first);
    let share = accepted.sum::<usize>() as f64 / DRAWS as f64;
    (share, 4.0 * (share * (1.0 - share) / DRAWS as f64).sqrt())
}

/// C081: what each rule accepts is known.
#[test]
fn c081_one_draft_is_accepted_as_often_as_the_distributions_overlap() {
    for (temperature, drafting) in [(0.7, Drafting::Good), (1.0, Drafting::Bad), (1.5, Drafting::Good)] {
        let share = |rule| first_accepted(&warm(temperature, rule), drafting);
        let overlap = overlap(&warm(temperature, Rule::Token), drafting);
        for rule in [Rule::Token, Rule::Block] {
            let (share, noise) = share(rule);
            assert!((share - overlap).abs() < noise, "{rule:?}: {share} of {overlap}");
        }
        let (share, noise) = share(Rule::Coupled);
        let least = overlap / (2.0 - overlap);
        assert!(share > least - noise, "{share} is less than {least}");
        assert!(share < overlap + noise, "{share} is more than {overlap}");
    }
}

#[test]
fn a_guess_without_chance_is_accepted_with_the_target_s_probability() {
    for rule in [Rule::Coupled, Rule::Token, Rule::Block] {
        let sampling = warm(0.7, rule);
        let guess = Drafting::Guess.propose(&sampler(&sampling), &PROMPT, 1)[0].id;
        let p = expected(&sampling, &PROMPT, 0, &target(&PROMPT))[guess as usize];
        let (share, noise) = first_accepted(&sampling, Drafting::Guess);
        assert!((share - p).abs() < noise, "{rule:?}: {share} of {p}");
    }
}

#[test]
fn blocks_accept_more_than_single_tokens() {
    let accepted = |rule, drafting| {
        let rounds = (0..DRAWS).map(|seed| decode(&mut seeded(&warm(1.0, rule), seed), drafting, 4, 1).first);
        rounds.sum::<usize>() as f64 / DRAWS as f64
    };
    for drafting in [Drafting::Good, Drafting::Bad, Drafting::Guess] {
        let (token, block) = (accepted(Rule::Token, drafting), accepted(Rule::Block, drafting));
        // A guess without chance leaves nothing to gain.
        let gain = if drafting == Drafting::Guess { -0.01 } else { 0.01 };
        assert!(
            block > token + gain,
            "{drafting:?}: {block} in blocks, {token} one by one"
        );
    }
}

fn any_sampling() -> impl Strategy<Value = Sampling> {
    let numbers = (0..4usize, 0..6usize, 0.3f32..1.0, 0.0f32..0.3);
    (
        numbers,
        0.8f32..1.3,
        -0.5f32..0.5,
        prop::option::of(1..6usize),
        any::<u64>(),
    )
        .prop_map(
            |(
                (temperature, top_k, top_p, min_p),
                repetition_penalty,
                presence_penalty,
                penalty_window,
                seed,
            )| Sampling {
                temperature: [0.0, 0.5, 1.0, 2.0][temperature],
                top_k,
                top_p,
                min_p,
                repetition_penalty,
                presence_penalty,
                frequency_penalty: presence_penalty / 2.0,
                penalty_window,
                logit_bias: vec![(3, 0.5)],
                seed,
                rule: Rule::Coupled,
            },
        )
}

fn any_drafting() -> impl Strategy<Value = Drafting> {
    prop::sample::select(vec![
        Drafting::Same,
        Drafting::Good,
        Drafting::Bad,
        Drafting::Guess,
    ])
}

proptest! {
    /// Greedy texts too: their rule is the coupled one.
    #[test]
    fn coupled_text_is_plain_text_whatever_is_proposed(
        sampling in any_sampling(),
        drafting in any_drafting(),
        k in 1..6usize,
    ) {
        let plain = decode(&mut sampler(&sampling), drafting, 0, 24);
        let drafted = decode(&mut sampler(&sampling), drafting, k, 24);
        prop_assert_eq!(&drafted.tokens[..24], &plain.tokens[..24]);
        prop_assert!(drafted.rounds <= plain.rounds);
    }

    /// Its drafts are counted as the target's tokens are, and drawn with the same numbers.
    #[test]
    fn a_drafter_that_is_the_target_is_always_right(
        sampling in any_sampling(),
        rule in prop::sample::select(vec![Rule::Coupled, Rule::Token, Rule::Block]),
    ) {
        let decoded = decode(&mut sampler(&Sampling { rule, ..sampling }), Drafting::Same, 4, 20);
        prop_assert_eq!(decoded.accepted, decoded.drafted);
    }

    /// A verdict depends on its arguments: not on the rounds before, on failed ones, or on texts of others.
    #[test]
    fn a_verdict_does_not_depend_on_earlier_rounds(
        sampling in any_sampling(),
        rule in prop::sample::select(vec![Rule::Coupled, Rule::Token, Rule::Block]),
        drafting in any_drafting(),
        other in prop::collection::vec(0..8u32, 1..12),
    ) {
        let sampling = Sampling { rule, ..sampling };
        let mut used = sampler(&sampling);
        let text = [&PROMPT, decode(&mut used, drafting, 3, 9).tokens.as_slice()].concat();
        let proposed = drafting.propose(&used, &text, 3);
        judge(&mut used, &other, &[]);
        let mut fresh = sampler(&sampling);
        fresh.begin(&PROMPT);
        prop_assert_eq!(&drafting.propose(&fresh, &text, 3), &proposed);
        prop_assert_eq!(judge(&mut used, &text, &proposed), judge(&mut fresh, &text, &proposed));
    }

    /// The drafts of all rules but the coupled one come with what they were drawn from: the processed distribution.
    #[test]
    fn drafts_come_from_the_processed_distribution(sampling in any_sampling(), drafting in any_drafting()) {
        let sampling = Sampling { rule: Rule::Token, top_p: 1.0, min_p: 0.0, ..sampling };
        let mut sampler = sampler(&sampling);
        sampler.begin(&PROMPT);
        for draft in drafting.propose(&sampler, &PROMPT, 1) {
            match draft.from {
                None => prop_assert!(sampling.temperature == 0.0 || drafting == Drafting::Guess),
                Some(from) => {
                    let q = expected(&sampling, &PROMPT, 0, &drafting.logits(&PROMPT));
                    prop_assert!(q[draft.id as usize] > 0.0);
                    for (id, q) in q.into_iter().enumerate() {
                        prop_assert!((f64::from(from.of(id as u32)) - q).abs() < 1e-6);
                    }
                }
            }
        }
    }
}

/// What was learned from a draft that was rejected must not steer the next round: with other numbers it is drawn anew.
#[test]
fn a_round_that_begins_elsewhere_draws_anew() {
    for rule in [Rule::Token, Rule::Block] {
        let sampling = warm(1.5, rule);
        let logits = vec![0.0; VOCAB];
        let mut same = 0;
        for seed in 0..800 {
            let sampler = seeded(&sampling, seed);
            let row = output(std::slice::from_ref(&logits), Readout::All);
            let draft = |text: &[u32], drafted: &[u32]| {
                let row = Row::only(&row).expect("a row");
                sampler
                    .draws(text)
                    .choose(drafted, row, None, VOCAB)
                    .expect("a draft")
                    .id
            };
            same += usize::from(draft(&[1, 2, 3], &[]) == draft(&[1, 2], &[3]));
        }
        // One in eight by chance.
        assert!((60..140).contains(&same), "{rule:?}: {same} of 800");
    }
}

#[test]
fn nothing_comes_after_a_token_that_ends_the_text() {
    for rule in [Rule::Coupled, Rule::Token, Rule::Block] {
        for seed in 0..200 {
            let mut sampler = seeded(&warm(1.0, rule), seed);
            let whole = {
                let proposed = Drafting::Same.propose(&sampler, &PROMPT, 4);
                judge(&mut sampler, &PROMPT, &proposed).tokens
            };
            for end in 0..whole.len() {
                let proposed = Drafting::Same.propose(&sampler, &PROMPT, 4);
                let rows: Vec<Vec<f32>> = (0..=4)
                    .map(|place| target(&[&PROMPT, &whole[..place]].concat()))
                    .collect();
                let mut asked = Vec::new();
                let output = output(&rows, sampler.readout());
                let verdict = sampler.judge(&PROMPT, &proposed, &output, &mut |token| {
                    asked.push(token);
                    Ok(asked.len() == end + 1)
                });
                let verdict = verdict.expect("a verdict");
                assert!(verdict.ended);
                assert_eq!(verdict.tokens, whole[..=end]);
                assert_eq!(verdict.accepted, (end + 1).min(4));
                assert_eq!(
                    asked,
                    whole[..=end],
                    "each token that stays is asked about, in order"
                );
            }
        }
    }
}

#[test]
fn a_draft_outside_the_vocabulary_is_rejected_and_changes_nothing() {
    for rule in [Rule::Coupled, Rule::Token, Rule::Block] {
        for temperature in [0.0, 1.0] {
            let mut sampler = sampler(&warm(temperature, rule));
            let rows = [target(&PROMPT), target(&PROMPT)];
            let rows = output(&rows, sampler.readout());
            let verdict = sampler.judge(&PROMPT, &[Proposed::guess(1_000)], &rows, &mut |_| Ok(false));
            let verdict = verdict.expect("a verdict");
            assert_eq!((verdict.accepted, verdict.tokens.len()), (0, 1));
            assert!(verdict.tokens[0] < VOCAB as u32);
        }
    }
}

#[test]
fn a_draft_that_cannot_come_from_its_distribution_is_refused() {
    for rule in [Rule::Token, Rule::Block] {
        let mut sampler = sampler(&warm(1.0, rule));
        let from = Distribution::new(vec![2, 3], vec![0.5, 0.5]).expect("a distribution");
        let draft = Proposed {
            id: 4,
            from: Some(from),
        };
        let rows = output(&[target(&PROMPT), target(&PROMPT)], sampler.readout());
        let error = sampler.judge(&PROMPT, &[draft], &rows, &mut |_| Ok(false)).err();
        assert!(error.is_some_and(|error| error.to_string().contains("token 4")));
    }
}

#[test]
fn another_number_of_rows_is_refused() {
    let mut sampler = sampler(&Sampling::default());
    for readout in [Readout::All, sampler.readout()] {
        let rows = output(&[target(&PROMPT), target(&PROMPT)], readout);
        for proposed in [0, 2] {
            let proposed = vec![Proposed::guess(0); proposed];
            let error = sampler.judge(&PROMPT, &proposed, &rows, &mut |_| Ok(false)).err();
            assert!(error.is_some_and(|error| error.to_string().contains("rows of logits")));
        }
    }
}
