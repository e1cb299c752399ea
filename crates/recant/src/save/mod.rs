//! Checkpoints with their matrices rounded to groups, as folders that other programs read too.
//!
//! # What is written
//!
//! Matrices are stored as MLX stores its affine quantization: `weight` (U32, a row is one little-endian stream of bits),
//! `scales` and `biases`; `config.json` has the format in `quantization`. Experts are stacked by projection, in `switch_mlp`.
//! Rounded is what [`LoadOptions::quantize`](crate::LoadOptions::quantize) rounds: embedding and heads too, not the small
//! matrices of gates and routers.
//!
//! A matrix that is quantized in the source is taken out of its form exactly, in f32, and rounded once; one that is in the wanted
//! format already stays bit for bit what it is. A gate or router that is quantized is written in F32.
//!
//! All else keeps its name, type and value, norms and convolutions included. A source that is itself a conversion, whose norms
//! hold 1 + w, stays one: convolutions `[channels, taps, 1]` tell so to every reader. Of an original, mlx-lm converts the norms of
//! Qwen3.5 while it loads, and tells by the convolutions that it has to. It does not so for Qwen3-Next, where they are stored
//! converted: convolutions `[channels, taps, 1]`, norms 1 + w, in F32, since 1 + w has no exact form in 16 bits.
//!
//! The multi-token-prediction head comes to lie in `mtp.safetensors`, in the same form: the index names it, and mlx-lm, which
//! has no use for it, reads `model*.safetensors` only. The vision tower is left out.
//!
//! A model in GGUF has no files beside it: its vocabulary becomes a `tokenizer.json`, its metadata the configurations. The input
//! projections of Qwen3-Next, which are apart there, are fused.

mod beside;
mod fused;
mod plan;
mod source;
mod width;
mod write;

use std::path::{Path, PathBuf};

use recant_core::candle::DType;
use recant_layers::{Config, GroupFormat};
use recant_weights::{Folder, Norms};

use crate::loaded::{family, local};
use crate::{Error, Result};
use plan::Plan;

/// Most bytes of a shard, as mlx-lm has it.
const SHARD: u64 = 5 << 30;

/// Writes the checkpoint in `source`, a folder, a GGUF file or a repository of the Hub, to a new folder `target`, its matrices
/// rounded to groups.
///
/// Loading `target` gives bit for bit the model that loading `source` with
/// [`LoadOptions::quantize`](crate::LoadOptions::quantize) gives, if `source` is not quantized, and mlx-lm loads it too. What is
/// quantized already is taken out of its form exactly and rounded once; matrices of the same format stay as they are, so that
/// saving what was saved changes nothing.
///
/// `progress` is told how many of how many bytes of `source` are dealt with. Memory is needed for a part of one matrix at a time,
/// or for one matrix as it is stored, if it is quantized. `target` appears once it is whole.
///
/// Embedding and heads are rounded too, gates and routers are not. Norms and convolutions stay as they are, but for Qwen3-Next,
/// where mlx-lm wants them converted. The multi-token-prediction head comes to lie in `mtp.safetensors`, rounded likewise; the
/// vision tower is left out. Configuration, tokenizer and chat template go along.
///
/// # Errors
/// A format that MLX does not have: it is affine, of 8 or 4 bits, in groups of 32, 64 or 128. A source that is no checkpoint of a
/// supported model, or damaged. A target that exists, or cannot be written.
///
/// ```no_run
/// use recant::{candle::DType, GroupFormat};
///
/// let format = GroupFormat { bits: 4, group: 64, affine: true, scales: DType::BF16 };
/// recant::save("Qwen/Qwen3.5-0.8B", "Qwen3.5-0.8B-4bit", format, &mut |_, _| {})?;
/// let model = recant::load("Qwen3.5-0.8B-4bit")?;
/// # Ok::<(), recant::Error>(())
/// ```
pub fn save(
    source: impl AsRef<Path>,
    target: impl AsRef<Path>,
    format: GroupFormat,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<()> {
    save_in_shards(source.as_ref(), target.as_ref(), format, SHARD, progress)
}

fn save_in_shards(
    source: &Path,
    target: &Path,
    format: GroupFormat,
    shard: u64,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<()> {
    check(format)?;
    if target.symlink_metadata().is_ok() {
        return Err(Error::TargetExists {
            path: target.to_owned(),
        });
    }
    let folder = Folder::open(local(source, progress)?)?;
    let family = family(&folder)?;
    let config =
        Config::from_json(family, folder.config(), folder.generation_config()).map_err(|source| {
            Error::Model {
                folder: folder.path().to_owned(),
                source: Box::new(source.into()),
            }
        })?;
    let weights = folder.weights()?;
    let tied = config.tie.is_tied(weights.has("lm_head.weight"));
    let mut plan = Plan::new(&folder, &config, format)?.without(|name| name == "lm_head.weight" && tied);
    if weights.norms() == Norms::OnePlus {
        plan = plan.with_taps_in_the_middle();
    } else if family.name() == "qwen3_next" {
        plan = plan.with_norms_plus_one().with_taps_in_the_middle();
    }

    let partial = Partial::create(target)?;
    write::write(&folder, &plan, shard, &partial.path, progress)?;
    beside::write(&folder, format, &partial.path)?;
    partial.finish(target)
}

/// Refuses what MLX has no kernels for.
fn check(format: GroupFormat) -> Result<()> {
    let GroupFormat {
        bits,
        group,
        affine,
        scales,
    } = format;
    if affine
        && [4, 8].contains(&bits)
        && [32, 64, 128].contains(&group)
        && [DType::F32, DType::F16, DType::BF16].contains(&scales)
    {
        return Ok(());
    }
    Err(Error::SaveFormat {
        found: format!(
            "{bits} bits in groups of {group}, {}, with scales of {}",
            if affine { "affine" } else { "symmetric" },
            scales.as_str()
        ),
    })
}

/// Does something with a file of the new folder.
fn put(path: &Path, action: impl FnOnce(&Path) -> std::io::Result<()>) -> Result<()> {
    action(path).map_err(|source| Error::Write {
        path: path.to_owned(),
        source,
    })
}

/// A folder that is being written, gone again unless it is finished.
struct Partial {
    path: PathBuf,
}

impl Partial {
    /// A folder beside `target`, so that renaming it moves no data.
    fn create(target: &Path) -> Result<Self> {
        let mut name = target.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{}.partial", std::process::id()));
        let path = target.with_file_name(name);
        put(&path, |path| std::fs::create_dir(path))?;
        Ok(Self { path })
    }

    fn finish(self, target: &Path) -> Result<()> {
        put(target, |target| std::fs::rename(&self.path, target))
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        // After it was renamed there is nothing to remove. What cannot be removed has a name that tells what it is.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

#[cfg(test)]
mod tests;
