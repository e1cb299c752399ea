//! Scripted models and drafters, and suites that hold caches, models and drafters against the laws of `recant`.
//!
//! Write a cache, and [`conformance`] tells whether it keeps its word, without a checkpoint to download:
//!
//! ```
//! use recant_core::candle::{DType, Device};
//! use recant_core::{AttentionLayout, KvCache};
//! use recant_testkit::{conformance, Failure};
//!
//! # fn main() -> Result<(), Failure> {
//! let layout = AttentionLayout { kv_heads: 2, head_dim: 4, dtype: DType::F32 };
//! conformance::attention_cache(
//!     || Box::new(KvCache::new(layout.clone(), &Device::Cpu)),
//!     &conformance::Options { tokens: 12, ..Default::default() },
//! )
//! # }
//! ```
#![forbid(unsafe_code)]

pub mod conformance;
mod drafter;
mod failure;
mod model;
mod recurrence;
mod rng;

pub use drafter::{Draft, DraftLog, DraftLogHandle, DraftRound, ScriptedDrafter};
pub use failure::Failure;
pub use model::{Fault, Harm, Place, ScriptedModel};
pub use recurrence::{Recurrence, Writes};
