//! Checkpoints in formats that are not read: told by their layout, and refused by name.

use std::path::Path;

use serde_json::Value;

use crate::error::{clipped, Error, Result};
use crate::folder::{Dtype, TensorInfo};
use crate::names;

/// Companions of a quantized weight, by the end of their names.
const COMPANIONS: [(&str, &str); 8] = [
    (".scales", "MLX"),
    (".weight_scale_inv", "block FP8"),
    (".weight_scale", "FP8 or NVFP4"),
    (".weight_scale_2", "NVFP4"),
    (".weight_packed", "compressed-tensors"),
    (".weight_global_scale", "NVFP4, compressed-tensors"),
    (".qweight", "GPTQ or AWQ"),
    (".qzeros", "GPTQ or AWQ"),
];

/// How the names of floats below 16 bits begin.
const SMALL_FLOATS: [&str; 3] = ["F8_", "F6_", "F4"];

/// Refuses what [`Weights`](crate::Weights) cannot hand out as it is meant.
pub(crate) fn check(folder: &Path, config: &Value, tensors: &[TensorInfo]) -> Result<()> {
    check_config(folder, config)?;
    let text: Vec<&TensorInfo> = tensors.iter().filter(|t| names::is_text(&t.name)).collect();
    check_quantized(folder, &text)?;
    check_layout(folder, &text)
}

/// Refuses a multi-token-prediction head in a format that is not read.
pub(crate) fn check_mtp(folder: &Path, config: &Value, tensors: &[&TensorInfo]) -> Result<()> {
    check_config(folder, config)?;
    check_quantized(folder, tensors)
}

fn check_config(folder: &Path, config: &Value) -> Result<()> {
    for (place, part) in [("", Some(config)), ("text_config.", config.get("text_config"))] {
        for key in ["quantization", "quantization_config"] {
            match part.and_then(|part| part.get(key)) {
                None | Some(Value::Null) => {}
                Some(value) => {
                    return Err(Error::Quantized {
                        folder: folder.to_owned(),
                        format: described(value),
                        evidence: format!("`{place}{key}` in config.json"),
                    })
                }
            }
        }
    }
    Ok(())
}

/// The format that a quantization entry declares, in a few words.
fn described(quantization: &Value) -> String {
    let said: Vec<String> = [
        "quant_method",
        "fmt",
        "quant_algo",
        "format",
        "mode",
        "bits",
        "group_size",
    ]
    .iter()
    .filter_map(|key| {
        let value = quantization.get(key)?;
        let shown = match value {
            Value::String(text) => clipped(text),
            Value::Number(number) => number.to_string(),
            _ => return None,
        };
        Some(format!("{key} {shown}"))
    })
    .collect();
    if said.is_empty() {
        "format not named".to_owned()
    } else {
        said.join(", ")
    }
}

fn check_quantized(folder: &Path, text: &[&TensorInfo]) -> Result<()> {
    for tensor in text {
        let by_name = COMPANIONS
            .iter()
            .find(|(end, _)| tensor.name.ends_with(end))
            .map(|(_, format)| (*format).to_owned());
        let by_dtype = match &tensor.dtype {
            Dtype::Other(dtype) if SMALL_FLOATS.iter().any(|start| dtype.starts_with(start)) => {
                Some(dtype.clone())
            }
            _ => None,
        };
        if let Some(format) = by_name.or(by_dtype) {
            return Err(Error::Quantized {
                folder: folder.to_owned(),
                format,
                evidence: format!(
                    "tensor {} ({}) in {}",
                    clipped(&tensor.name),
                    tensor.dtype,
                    tensor.file.display()
                ),
            });
        }
    }
    Ok(())
}

/// How the taps of a convolution lie in memory, which also tells how the norms are stored.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Taps {
    /// `[channels, 1, taps]`, as Hugging Face writes it; norms are zero-centred.
    Last,
    /// `[channels, taps, 1]`, as MLX writes it; norms hold 1 + w.
    Middle,
    /// One tap, `[channels, 1, 1]`: either.
    One,
}

/// Refuses a checkpoint converted by MLX: its norms hold 1 + w, and a model that adds the 1 again is silently wrong.
///
/// Decided by the shape of the convolutions alone. The presence of `mtp.*` proves nothing (conversions keep it), nor
/// do the values of the norms (real ones can be negative).
fn check_layout(folder: &Path, text: &[&TensorInfo]) -> Result<()> {
    for tensor in text {
        if !tensor.name.ends_with(".linear_attn.conv1d.weight") {
            continue;
        }
        let taps = match tensor.shape[..] {
            [_, 1, 1] => Taps::One,
            [_, 1, _] => Taps::Last,
            [_, _, 1] => Taps::Middle,
            // Neither layout. Whoever takes the tensor says which shape it should have.
            _ => continue,
        };
        if taps == Taps::Last {
            continue;
        }
        let meaning = match taps {
            Taps::Middle => "the layout of an MLX conversion, whose norms are stored as 1 + w",
            _ => "a single tap, which does not tell an MLX conversion from an original",
        };
        return Err(Error::Layout {
            folder: folder.to_owned(),
            reason: format!(
                "tensor {} in {} has shape {:?}: {meaning}; expected [channels, 1, taps] with at least 2 taps",
                clipped(&tensor.name),
                tensor.file.display(),
                tensor.shape
            ),
        });
    }
    Ok(())
}
