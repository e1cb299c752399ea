//! What counts as said before.

use super::*;

/// Likes 7 most, then 3; all others little.
fn logits() -> Vec<f32> {
    let mut logits = vec![0.5; VOCAB];
    (logits[7], logits[3]) = (3.0, 2.0);
    logits
}

/// Greedy tokens, one a round, after a prompt of 7s.
fn greedy(change: impl Fn(&mut Sampling), steps: usize) -> Vec<u32> {
    let mut sampling = Sampling::default();
    change(&mut sampling);
    let mut sampler = sampler(&sampling);
    let prompt = [7, 7, 7];
    let mut text = prompt.to_vec();
    sampler.begin(&prompt);
    for _ in 0..steps {
        let row = output(&[logits()], sampler.readout());
        let verdict = sampler
            .judge(&text, &[], &row, &mut |_| Ok(false))
            .expect("a verdict");
        text.extend(verdict.tokens);
    }
    text.split_off(prompt.len())
}

#[test]
fn c084_presence_and_frequency_do_not_count_the_prompt() {
    assert_eq!(greedy(|s| s.presence_penalty = 2.0, 4), [7, 3, 7, 7]);
    assert_eq!(greedy(|s| s.frequency_penalty = 0.6, 5), [7, 7, 3, 7, 3]);
    // The repetition penalty does.
    assert_eq!(greedy(|s| s.repetition_penalty = 2.0, 3), [3, 7, 7]);
}

#[test]
fn penalties_forget_what_the_window_has_left() {
    let windowed = |window| {
        greedy(
            |s| {
                s.presence_penalty = 9.0;
                s.penalty_window = window;
            },
            6,
        )
    };
    assert_eq!(windowed(None), [7, 3, 0, 1, 2, 4]);
    assert_eq!(windowed(Some(2)), [7, 3, 0, 7, 3, 0]);
    assert_eq!(windowed(Some(1)), [7, 3, 7, 3, 7, 3]);
    assert_eq!(windowed(Some(0)), [7, 7, 7, 7, 7, 7]);
}

#[test]
fn a_repetition_penalty_lowers_negative_logits_too() {
    let mut sampler = sampler(&Sampling {
        repetition_penalty: 2.0,
        ..Sampling::default()
    });
    let text = [5];
    sampler.begin(&text);
    let mut logits = vec![-3.0; VOCAB];
    (logits[5], logits[6]) = (-1.0, -1.5);
    let row = output(&[logits], sampler.readout());
    let verdict = sampler
        .judge(&text, &[], &row, &mut |_| Ok(false))
        .expect("a verdict");
    assert_eq!(verdict.tokens, [6]);
}

#[test]
fn a_bias_is_added_and_minus_infinity_bans() {
    assert_eq!(greedy(|s| s.logit_bias = vec![(3, 1.5)], 1), [3]);
    assert_eq!(greedy(|s| s.logit_bias = vec![(7, f32::NEG_INFINITY)], 2), [3, 3]);
}

#[test]
fn what_was_output_before_a_new_prompt_is_prompt() {
    let mut sampler = sampler(&Sampling {
        presence_penalty: 2.0,
        ..Sampling::default()
    });
    let next = |sampler: &mut Sampler, text: &[u32]| {
        let row = output(&[logits()], sampler.readout());
        sampler
            .judge(text, &[], &row, &mut |_| Ok(false))
            .expect("a verdict")
            .tokens
    };
    sampler.begin(&[1]);
    assert_eq!(next(&mut sampler, &[1]), [7]);
    assert_eq!(next(&mut sampler, &[1, 7]), [3]);
    sampler.begin(&[1, 7]);
    assert_eq!(next(&mut sampler, &[1, 7]), [7]);
}
