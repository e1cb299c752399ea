//! The dense Qwen3.5 and Qwen3.6 family: configuration, weight names, assembly.
//!
//! [`Model::load`] reads a checkpoint folder of the Hub; [`Model::build`] takes weights from anywhere. The model keeps the
//! grouping law of [`LanguageModel`](recant_core::LanguageModel) for every number of rows, segments and threads with
//! [`Backend::Cpu`](recant_kernels::Backend::Cpu). With `Backend::Composed` it runs on any device of candle, and does not
//! promise that: candle's matrix products choose their kernel by the number of rows.
#![forbid(unsafe_code)]

mod assembly;
mod config;
mod error;
mod model;

pub use assembly::LoadOptions;
pub use config::{Config, ConfigError, LayerKind, Tie};
pub use error::{Error, Result};
pub use model::Model;
pub use recant_kernels::Backend;
