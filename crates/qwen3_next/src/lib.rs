//! Qwen3-Next: a mixture of experts in most layers, and the input projections of linear layers fused into two.
//!
//! ```no_run
//! use recant_qwen3_next::{HybridModel, LoadOptions, Qwen3Next};
//!
//! let folder = recant_weights::Folder::open("Qwen3-Next-80B-A3B-Instruct")?;
//! let (model, _) = HybridModel::load(&Qwen3Next, &folder, &LoadOptions::default(), &mut |_, _| {})?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod split;

use recant_layers::{Assembly, DeltaInputs, Family, FeedForward, Fields};
pub use recant_layers::{Backend, Config, ConfigError, Error, HybridModel, LoadOptions, Result};

/// Qwen3-Next.
#[derive(Debug, Clone, Copy)]
pub struct Qwen3Next;

impl Family for Qwen3Next {
    fn name(&self) -> &'static str {
        "qwen3_next"
    }

    fn model_types(&self) -> &'static [&'static str] {
        &["qwen3_next"]
    }

    /// Layer `i` is a mixture unless it is among `mlp_only_layers`, there are no experts, or `i + 1` is no multiple of
    /// `decoder_sparse_step`.
    fn feed_forward(&self, text: &Fields<'_>, layers: usize) -> Result<Vec<FeedForward>, ConfigError> {
        let experts = text.required_width("num_experts", 0)?;
        let step = text.width("decoder_sparse_step", 1)?.unwrap_or(1);
        let dense = text.layers("mlp_only_layers", layers)?;
        (0..layers)
            .map(|layer| {
                if experts > 0 && (layer + 1) % step == 0 && !dense.contains(&layer) {
                    FeedForward::sparse(text)
                } else {
                    FeedForward::dense(text)
                }
            })
            .collect()
    }

    fn delta_inputs(&self, assembly: &mut Assembly<'_>, prefix: &str) -> Result<DeltaInputs> {
        if assembly.has(&format!("{prefix}.in_proj_qkv.weight")) {
            // Converters to GGUF take the fused ones apart.
            return assembly.delta_inputs(prefix);
        }
        let config = assembly.config();
        let split = split::Split::of(config);
        let hidden = config.hidden_size;
        let qkvz = assembly.stored(
            &format!("{prefix}.in_proj_qkvz.weight"),
            [split.qkvz_rows(), hidden],
        )?;
        let ba = assembly.stored(&format!("{prefix}.in_proj_ba.weight"), [split.ba_rows(), hidden])?;
        let inputs = || -> recant_core::Result<DeltaInputs> {
            let [qkv, z] = split.qkvz(&qkvz)?;
            let [b, a] = split.ba(&ba)?;
            Ok(DeltaInputs {
                qkv: assembly.made(qkv)?,
                z: assembly.made(z)?,
                b: assembly.made_gate(b)?,
                a: assembly.made_gate(a)?,
            })
        };
        inputs().map_err(|error| Error::part(prefix, error))
    }
}
