//! What rounding weights and activations does to a trained model.

use std::path::Path;

use anyhow::{ensure, Context, Result};
use rayon::prelude::*;
use recant::core::{Cache, CacheOptions, Rows, Segment};
use recant::{ActivationPrecision, Loaded};

use crate::width::Width;

/// Tokens fed in one call.
const CHUNK: usize = 256;

/// Perplexities of one checkpoint on one set of texts.
pub(crate) struct Perplexity {
    pub(crate) width: Width,
    /// Activations not rounded.
    pub(crate) full: f64,
    /// Activations rounded to bytes where weights are; `None` where no weights are.
    pub(crate) int8: Option<f64>,
}

impl Perplexity {
    /// How much of itself it grows by when activations are rounded.
    pub(crate) fn growth(&self) -> Option<f64> {
        self.int8.map(|int8| int8 / self.full - 1.0)
    }
}

/// Measures each width.
pub(crate) fn measure(folder: &Path, texts: &Path, say: &dyn Fn(&str)) -> Result<Vec<Perplexity>> {
    let lines = std::fs::read_to_string(texts).with_context(|| format!("cannot read {}", texts.display()))?;
    let texts = lines
        .lines()
        .enumerate()
        .map(|(number, line)| {
            text(line).with_context(|| format!("line {} of {}", number + 1, texts.display()))
        })
        .collect::<Result<Vec<_>>>()?;
    let of = |width: Width, activations: ActivationPrecision| {
        say(&format!(
            "perplexity: {} weights, {activations:?} activations",
            width.name()
        ));
        let loaded = recant::load_with(folder, &width.options(activations), &mut |_, _| {})?;
        perplexity(&loaded, &texts)
    };
    Width::ALL
        .into_iter()
        .map(|width| {
            Ok(Perplexity {
                width,
                full: of(width, ActivationPrecision::Full)?,
                int8: match width {
                    Width::Bf16 => None,
                    Width::Int8 | Width::Int4 => Some(of(width, ActivationPrecision::Int8)?),
                },
            })
        })
        .collect()
}

/// The text of a line.
fn text(line: &str) -> Result<String> {
    let line: serde_json::Value = serde_json::from_str(line)?;
    let text = line["text"].as_str().context("no `text` that is a string")?;
    Ok(text.to_owned())
}

/// Of all tokens that have one before them.
fn perplexity(loaded: &Loaded, texts: &[String]) -> Result<f64> {
    let model = loaded.model();
    let mut caches = model.new_caches(&CacheOptions::default())?;
    let (mut sum, mut count) = (0.0, 0);
    for text in texts {
        let mut ids = loaded.text().encode(text)?;
        ids.truncate(model.spec().max_positions);
        let Some(next) = ids.get(1..) else { continue };
        caches.reset();
        for (fed, next) in ids[..next.len()].chunks(CHUNK).zip(next.chunks(CHUNK)) {
            let output = model.forward(&mut [Segment::new(fed, &mut caches, Rows::All)])?;
            let logits = output.only()?.logits()?.to_vec2::<f32>()?;
            let losses = logits.par_iter().zip(next);
            sum += losses
                .map(|(row, id)| loss(row, *id as usize))
                .collect::<Vec<_>>()
                .iter()
                .sum::<f64>();
            count += next.len();
        }
    }
    ensure!(count > 0, "the texts have no token that follows another");
    Ok((sum / count as f64).exp())
}

/// The negative logarithm of a token's probability.
fn loss(logits: &[f32], id: usize) -> f64 {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|x| f64::from((x - most).exp())).sum();
    sum.ln() + f64::from(most) - f64::from(logits[id])
}
