//! The dense Qwen3.5 and Qwen3.6 family.
//!
//! ```no_run
//! use recant_qwen3_5::{HybridModel, LoadOptions, Qwen35};
//!
//! let folder = recant_weights::Folder::open("Qwen3.5-9B")?;
//! let (model, _) = HybridModel::load(&Qwen35, &folder, &LoadOptions::default(), &mut |_, _| {})?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

pub use recant_layers::{Backend, Config, ConfigError, Error, HybridModel, LoadOptions, Result};
use recant_layers::{Family, FeedForward, Fields};

/// Dense Qwen3.5 and Qwen3.6: an MLP in every layer.
#[derive(Debug, Clone, Copy)]
pub struct Qwen35;

impl Family for Qwen35 {
    fn name(&self) -> &'static str {
        "qwen3_5"
    }

    fn model_types(&self) -> &'static [&'static str] {
        &["qwen3_5", "qwen3_5_text"]
    }

    fn feed_forward(&self, text: &Fields<'_>, layers: usize) -> Result<Vec<FeedForward>, ConfigError> {
        if text.width("num_experts", 0)?.unwrap_or(0) > 0 {
            return Err(text.unsupported(
                "num_experts",
                "0 in a dense model; a mixture of experts has model type qwen3_5_moe",
            ));
        }
        Ok(vec![FeedForward::dense(text)?; layers])
    }
}
