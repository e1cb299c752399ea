//! Layers of the hybrid models.
//!
//! A layer is weights and `&self`; the state of a sequence is in the [`CacheStack`] that comes
//! with it. Rows of all sequences in a call are laid end to end, `[rows, hidden_size]` in f32, for everything that works
//! row by row; attention and the recurrence walk the sequences one by one, each over its own cache.
//!
//! Layers are made from tensors as checkpoints of the Hub store them; where tensors come from is not their business.
//!
//! [`HybridModel`] is a whole model of such layers. A [`Family`] says what sets one kind of checkpoint apart: its model
//! types, how its configuration describes the feed-forward part, and how it stores what others store otherwise.
//! [`Config`] and [`Assembly`] do the rest for all of them.
#![forbid(unsafe_code)]

mod assembly;
mod attention;
mod block;
mod config;
mod delta_net;
mod error;
mod family;
mod model;
mod moe;
mod norm;

pub use assembly::{group_weights, Assembly, LoadOptions};
pub use attention::{AttentionWeights, GatedAttention};
pub use block::{DecoderBlock, Ffn, Mixer};
pub use config::{Config, ConfigError, FeedForward, Fields, LayerKind, Tie};
pub use delta_net::{DeltaInputs, DeltaNetWeights, GatedDeltaNet};
pub use error::{Error, Result};
pub use family::Family;
pub use model::HybridModel;
pub use moe::SparseMoe;
pub use norm::RmsNorm;
pub use recant_kernels::{
    ActivationPrecision, Backend, Coding, GroupFormat, GroupScales, GroupWeights, Mlp, Weight,
};

use recant_core::{Cache, CacheStack, Segment};

/// One sequence's share of a call, as a layer sees it.
#[derive(Debug)]
pub struct Sequence<'a> {
    /// Rows of this sequence in the call.
    pub rows: usize,
    /// Position of the first of them.
    pub position: usize,
    /// The caches of the sequence, all layers.
    pub caches: &'a mut CacheStack,
}

impl<'a> Sequence<'a> {
    /// The sequence of a segment, whose caches are as long as the tokens before it.
    pub fn of(segment: &'a mut Segment<'_>) -> Self {
        Self {
            rows: segment.tokens.len(),
            position: segment.caches.len(),
            caches: segment.caches,
        }
    }
}
