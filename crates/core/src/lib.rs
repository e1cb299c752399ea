//! Caches that can take tokens back exactly.
#![forbid(unsafe_code)]

mod cache;
mod checkpoint;
mod error;
mod layout;
mod snapshot;

pub use cache::{AttentionCache, Cache, Footprint, KvBlock, KvView, RecordSlice, RecurrentCache, RecurrentStep};
pub use checkpoint::{Checkpoint, Ledger};
pub use error::{Error, Result};
pub use layout::{ArraySpec, AttentionLayout, Fold, LayerLayout, RecurrentLayout, StackLayout};
pub use snapshot::Snapshot;
