//! Rules and filters, held against what they promise.

mod acceptance;
mod distribution;
mod filters;
mod logprobs;
mod numbers;
mod penalties;
mod processors;

use recant_core::candle::{Device, Tensor};
use recant_core::{largest, Readout, SegmentOutput};

use super::*;

/// Ids of the small vocabulary.
const VOCAB: usize = 8;

/// What every text begins with.
const PROMPT: [u32; 2] = [1, 2];

/// Rows of logits in the form that was asked for.
fn output(rows: &[Vec<f32>], readout: Readout) -> SegmentOutput {
    let shape = (rows.len(), rows[0].len());
    let logits = Tensor::from_vec(rows.concat(), shape, &Device::Cpu).expect("rows of one length");
    let mut output = SegmentOutput {
        logits: None,
        largest: None,
        hidden: None,
    };
    match readout {
        Readout::All => output.logits = Some(logits),
        Readout::Largest { count, among } => {
            output.largest = Some(largest(&logits, count, among).expect("a matrix"));
        }
    }
    output
}

/// A number from 0 to 1 for each word.
fn number(words: [u64; 3]) -> f32 {
    let spread = |key: u64, word: u64| {
        let x = (key ^ word).wrapping_mul(0x9fb2_1c65_1e98_df25);
        (x ^ (x >> 32)).wrapping_mul(0x9fb2_1c65_1e98_df25) ^ (x >> 29)
    };
    (words.into_iter().fold(77, spread) >> 40) as f32 / (1u64 << 24) as f32
}

/// The target's logits: a table that depends on the last two tokens.
fn target(text: &[u32]) -> Vec<f32> {
    let context = text
        .iter()
        .rev()
        .take(2)
        .fold(1, |code, token| code * 16 + u64::from(*token));
    (0..VOCAB as u64)
        .map(|id| 4.0 * number([1, context, id]))
        .collect()
}

/// Who drafts.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Drafting {
    /// The target itself.
    Same,
    /// Much like the target.
    Good,
    /// Nothing like the target.
    Bad,
    /// Without chance, as n-gram look-up does; often right.
    Guess,
}

impl Drafting {
    fn logits(self, text: &[u32]) -> Vec<f32> {
        let context = text
            .iter()
            .rev()
            .take(3)
            .fold(1, |code, token| code * 16 + u64::from(*token));
        let noise = |id: usize| number([2, context, id as u64]);
        let strength = match self {
            Self::Same => 0.0,
            Self::Good | Self::Guess => 1.5,
            Self::Bad => return (0..VOCAB).map(|id| 4.0 * noise(id)).collect(),
        };
        let logits = target(text).into_iter().enumerate();
        logits.map(|(id, logit)| logit + strength * noise(id)).collect()
    }

    /// Up to `k` drafts after `text`.
    fn propose(self, sampler: &Sampler, text: &[u32], k: usize) -> Vec<Proposed> {
        let draws = match self {
            Self::Guess => Draws::greedy(),
            _ => sampler.draws(text),
        };
        let mut proposed: Vec<Proposed> = Vec::new();
        let mut drafted = Vec::new();
        for _ in 0..k {
            let logits = self.logits(&[text, &drafted].concat());
            let output = output(&[logits], draws.readout(VOCAB));
            let row = Row::only(&output).expect("a row");
            let draft = draws.choose(&drafted, row, None, VOCAB).expect("a draft");
            drafted.push(draft.id);
            proposed.push(draft);
        }
        proposed
    }
}

/// A decoded text, and how it came about.
#[derive(Debug, Default)]
struct Decoded {
    /// Without the prompt; as many tokens as were wanted, or more.
    tokens: Vec<u32>,
    rounds: usize,
    drafted: usize,
    accepted: usize,
    /// Drafts accepted in the first round.
    first: usize,
}

/// A target's output for a text and its drafts.
fn judge(sampler: &mut Sampler, text: &[u32], proposed: &[Proposed]) -> Verdict {
    let drafted: Vec<u32> = proposed.iter().map(|draft| draft.id).collect();
    let rows: Vec<Vec<f32>> = (0..=drafted.len())
        .map(|place| target(&[text, &drafted[..place]].concat()))
        .collect();
    let output = output(&rows, sampler.readout());
    let verdict = sampler.judge(text, proposed, &output, &mut |_| Ok(false));
    verdict.expect("a verdict")
}

/// Decodes as a decoder does, with `k` drafts a round.
fn decode(sampler: &mut Sampler, drafting: Drafting, k: usize, wanted: usize) -> Decoded {
    let mut text = PROMPT.to_vec();
    let mut decoded = Decoded::default();
    sampler.begin(&text);
    while text.len() < PROMPT.len() + wanted {
        let proposed = drafting.propose(sampler, &text, k);
        let verdict = judge(sampler, &text, &proposed);
        text.extend_from_slice(&verdict.tokens);
        if decoded.rounds == 0 {
            decoded.first = verdict.accepted;
        }
        decoded.rounds += 1;
        decoded.drafted += proposed.len();
        decoded.accepted += verdict.accepted;
    }
    decoded.tokens = text.split_off(PROMPT.len());
    decoded
}

fn sampler(sampling: &Sampling) -> Sampler {
    Sampler::new(sampling.clone(), Vec::new(), None, VOCAB).expect("parameters that can be meant")
}

fn seeded(sampling: &Sampling, seed: u64) -> Sampler {
    sampler(&Sampling {
        seed,
        ..sampling.clone()
    })
}

fn warm(temperature: f32, rule: Rule) -> Sampling {
    Sampling {
        temperature,
        rule,
        ..Sampling::default()
    }
}

/// The processed distribution by its definition: everything sorted, everything in f64. `output` is how many tokens at the
/// end of `text` are not of the prompt.
fn expected(sampling: &Sampling, text: &[u32], output: usize, logits: &[f32]) -> Vec<f64> {
    let mut logits: Vec<f64> = logits.iter().map(|logit| f64::from(*logit)).collect();
    for (id, bias) in &sampling.logit_bias {
        logits[*id as usize] += f64::from(*bias);
    }
    let window = sampling.penalty_window.unwrap_or(usize::MAX).min(text.len());
    let seen = &text[text.len() - window..];
    let written = &text[text.len() - window.min(output)..];
    for (id, logit) in logits.iter_mut().enumerate() {
        let count = |tokens: &[u32]| tokens.iter().filter(|token| **token as usize == id).count() as f64;
        if count(seen) > 0.0 {
            let repetition = f64::from(sampling.repetition_penalty);
            *logit *= if *logit > 0.0 {
                1.0 / repetition
            } else {
                repetition
            };
        }
        *logit -= f64::from(sampling.frequency_penalty) * count(written);
        *logit -= f64::from(sampling.presence_penalty) * count(written).min(1.0);
    }
    let mut ids: Vec<usize> = (0..logits.len())
        .filter(|id| logits[*id] > f64::NEG_INFINITY)
        .collect();
    ids.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
    if sampling.temperature == 0.0 {
        ids.truncate(1);
    } else if sampling.top_k > 0 {
        ids.truncate(sampling.top_k);
    }
    let temperature = match sampling.temperature {
        0.0 => 1.0,
        temperature => f64::from(temperature),
    };
    let weight = |id: usize| ((logits[id] - logits[ids[0]]) / temperature).exp();
    let total: f64 = ids.iter().map(|id| weight(*id)).sum();
    let mut left = f64::from(sampling.top_p) * total;
    let kept: Vec<usize> = ids
        .iter()
        .copied()
        .filter(|id| {
            let needed = left > 0.0;
            left -= weight(*id);
            needed && weight(*id) >= f64::from(sampling.min_p)
        })
        .collect();
    let total: f64 = kept.iter().map(|id| weight(*id)).sum();
    let mut probabilities = vec![0.0; logits.len()];
    kept.iter()
        .for_each(|id| probabilities[*id] = weight(*id) / total);
    probabilities
}

/// Refuses counts that draws from these probabilities would give less than once in 10,000 times (Pearson's chi-square; cells in
/// which less than 5 are expected are put together).
fn fits(counts: &[usize], probabilities: &[f64]) -> Result<(), String> {
    let draws: usize = counts.iter().sum();
    let (mut square, mut cells) = (0.0, 0.0);
    let mut add = |count: f64, expected: f64| {
        square += (count - expected).powi(2) / expected;
        cells += 1.0;
    };
    let (mut few, mut few_expected) = (0.0, 0.0);
    for (cell, (&count, p)) in counts.iter().zip(probabilities).enumerate() {
        if *p == 0.0 && count > 0 {
            return Err(format!("cell {cell} cannot come, but came {count} times"));
        }
        let expected = p * draws as f64;
        if expected < 5.0 {
            few += count as f64;
            few_expected += expected;
        } else {
            add(count as f64, expected);
        }
    }
    if few_expected > 1.0 {
        add(few, few_expected);
    }
    let freedom: f64 = cells - 1.0;
    if freedom < 1.0 {
        return Ok(());
    }
    // Wilson and Hilferty's approximation.
    let spread = 2.0 / (9.0 * freedom);
    let most = freedom * (1.0 - spread + 3.72 * spread.sqrt()).powi(3);
    if square <= most {
        return Ok(());
    }
    Err(format!(
        "chi-square {square:.1} of {freedom} degrees of freedom is above {most:.1}"
    ))
}
