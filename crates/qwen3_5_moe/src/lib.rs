//! Qwen3.5 and Qwen3.6 with a mixture of experts in every layer.
//!
//! Experts are read as the Hub stores them, together or each on its own; see
//! [`Assembly::sparse_moe`](recant_layers::Assembly::sparse_moe).
//!
//! ```no_run
//! use recant_qwen3_5_moe::{HybridModel, LoadOptions, Qwen35Moe};
//!
//! let folder = recant_weights::Folder::open("Qwen3.5-35B-A3B")?;
//! let (model, _) = HybridModel::load(&Qwen35Moe, &folder, &LoadOptions::default(), &mut |_, _| {})?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

pub use recant_layers::{Backend, Config, ConfigError, Error, HybridModel, LoadOptions, Result};
use recant_layers::{Family, FeedForward, Fields};

/// Qwen3.5 and Qwen3.6 with a mixture of experts in every layer.
#[derive(Debug, Clone, Copy)]
pub struct Qwen35Moe;

impl Family for Qwen35Moe {
    fn name(&self) -> &'static str {
        "qwen3_5_moe"
    }

    fn model_types(&self) -> &'static [&'static str] {
        &["qwen3_5_moe", "qwen3_5_moe_text"]
    }

    fn feed_forward(&self, text: &Fields<'_>, layers: usize) -> Result<Vec<FeedForward>, ConfigError> {
        Ok(vec![FeedForward::sparse(text)?; layers])
    }
}
