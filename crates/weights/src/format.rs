//! What a checkpoint is: formats that are not read are told by their layout and refused by name, and so are layouts that cannot
//! be told.

use std::path::Path;

use serde_json::Value;

use crate::error::{clipped, Error, Result};
use crate::folder::TensorInfo;
use crate::hub_quant::{self, Declared};
use crate::{mlx, names, Norms};

/// Refuses what [`Weights`](crate::Weights) cannot hand out as it is meant.
pub(crate) fn check(folder: &Path, config: &Value, tensors: &[TensorInfo]) -> Result<()> {
    let text: Vec<&TensorInfo> = tensors.iter().filter(|t| names::is_text(&t.name)).collect();
    check_quantized(folder, config, &text)?;
    norms(folder, tensors.iter()).map(|_| ())
}

/// Refuses a multi-token-prediction head in a format that is not read.
pub(crate) fn check_mtp(folder: &Path, config: &Value, tensors: &[&TensorInfo]) -> Result<()> {
    check_quantized(folder, config, tensors)
}

fn check_quantized(folder: &Path, config: &Value, tensors: &[&TensorInfo]) -> Result<()> {
    let declared = Declared::checked(folder, config)?;
    hub_quant::check(folder, declared.as_ref(), tensors)?;
    // What is said of one kind of quantization says nothing of the other.
    let config = if declared.is_some() { &Value::Null } else { config };
    mlx::check(folder, config, tensors)
}

/// How the taps of a convolution lie in memory.
enum Taps {
    /// `[channels, 1, taps]`, as Hugging Face writes it; norms are zero-centred.
    Last,
    /// `[channels, taps, 1]`, as MLX writes it; norms hold 1 + w.
    Middle,
    /// One tap, `[channels, 1, 1]`: either.
    One,
}

impl Taps {
    fn of(shape: &[usize]) -> Option<Self> {
        match shape {
            [_, 1, 1] => Some(Self::One),
            [_, 1, _] => Some(Self::Last),
            [_, _, 1] => Some(Self::Middle),
            // Neither layout. Whoever takes the tensor says which shape it should have.
            _ => None,
        }
    }
}

/// How a checkpoint stores the norms of its language model: a model that adds the 1 again is silently wrong.
///
/// Decided by the shape of the convolutions alone, which all have to agree. The presence of `mtp.*` proves nothing (conversions
/// keep it), nor do the values of the norms (real ones can be negative). A model without a convolution is an original, unless
/// MLX quantized it.
pub(crate) fn norms<'a>(folder: &Path, tensors: impl Iterator<Item = &'a TensorInfo>) -> Result<Norms> {
    let refused = |tensor: &TensorInfo, meaning: &str| Error::Layout {
        folder: folder.to_owned(),
        reason: format!(
            "tensor {} in {} has shape {:?}: {meaning}",
            clipped(&tensor.name),
            tensor.file.display(),
            tensor.shape
        ),
    };
    let text: Vec<&TensorInfo> = tensors.filter(|tensor| names::is_text(&tensor.name)).collect();
    let mut seen: Option<(Norms, &TensorInfo)> = None;
    for tensor in text.iter().copied() {
        if !tensor.name.ends_with(".linear_attn.conv1d.weight") {
            continue;
        }
        let found = match Taps::of(&tensor.shape) {
            Some(Taps::Last) => Norms::ZeroCentred,
            Some(Taps::Middle) => Norms::OnePlus,
            Some(Taps::One) => {
                return Err(refused(
                    tensor,
                    "a single tap, which does not tell an MLX conversion, whose norms are stored as 1 + w, from an original;                      expected at least 2 taps",
                ))
            }
            None => continue,
        };
        match seen {
            Some((norms, other)) if norms != found => {
                return Err(refused(
                    tensor,
                    &format!(
                        "MLX conversions have [channels, taps, 1] and norms stored as 1 + w, originals have [channels, 1, taps],                          and {} has {:?}; expected one layout",
                        clipped(&other.name),
                        other.shape
                    ),
                ))
            }
            _ => seen = Some((found, tensor)),
        }
    }
    if let (None, Some(scales)) = (seen, text.iter().find(|t| t.name.ends_with(".scales"))) {
        return Err(refused(
            scales,
            "MLX quantized it, but no convolution tells whether its norms are stored as 1 + w",
        ));
    }
    Ok(seen.map_or(Norms::ZeroCentred, |(norms, _)| norms))
}
