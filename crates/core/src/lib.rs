//! Caches that can take tokens back exactly, and the traits that models and cache authors implement.
//!
//! # Who should depend on this crate
//! Authors of caches and of models. Applications use the `recant` crate, which re-exports what they need. The traits
//! change rarely, and a change of candle's minor version is a change of this crate's.
//!
//! # Contents
//! [`Cache`] is the contract and its documentation the specification. [`KvCache`] and [`RotatingKvCache`] hold keys and
//! values, [`ArraysCache`] holds the arrays of a recurrent layer with a journal of records; [`CacheStack`] holds one for
//! each layer of a model, [`Transaction`] takes back what is not kept, and [`persist`] writes a whole stack to a file.
//! [`LanguageModel`] is what the speculative loop sees of a model.
//!
#![doc = include_str!("../ROLLBACK.md")]
#![forbid(unsafe_code)]

mod arrays;
mod blocks;
mod cache;
mod cancel;
mod candidates;
mod checkpoint;
mod error;
mod kv;
mod layout;
mod memory;
mod model;
pub mod persist;
mod rotating;
mod snapshot;
mod stack;
mod transaction;

pub use candle_core as candle;

pub use arrays::ArraysCache;
pub use cache::{
    AttentionCache, Cache, Footprint, KvBlock, KvView, RecordSlice, RecurrentCache, RecurrentStep,
};
pub use cancel::Cancel;
pub use candidates::{largest, Candidate};
pub use checkpoint::{Checkpoint, Ledger};
pub use error::{Error, Result};
pub use kv::KvCache;
pub use layout::{ArraySpec, AttentionLayout, Fold, KvType, LayerLayout, RecurrentLayout, StackLayout};
pub use model::{Hidden, LanguageModel, ModelSpec, Output, Readout, Rows, Segment, SegmentOutput};
pub use rotating::{RotatingKvCache, Window};
pub use snapshot::Snapshot;
pub use stack::{CacheOptions, CacheStack, LayerCache};
pub use transaction::Transaction;
