//! One decoder layer: a mixer and a feed-forward part, each after a norm, each added to the residual stream.

use recant_core::candle::Tensor;
use recant_core::{LayerLayout, Result};
use recant_kernels::{add, Backend, RotaryTable};

use crate::{GatedAttention, GatedDeltaNet, Mlp, RmsNorm, Sequence, SparseMoe};

/// What mixes tokens in a layer.
#[derive(Debug)]
pub enum Mixer {
    /// Gated DeltaNet.
    Linear(GatedDeltaNet),
    /// Full attention.
    Full(GatedAttention),
}

/// What follows the mixer.
#[derive(Debug)]
pub enum Ffn {
    /// One MLP.
    Dense(Mlp),
    /// A mixture of experts.
    Sparse(Box<SparseMoe>),
}

/// One decoder layer.
#[derive(Debug)]
pub struct DecoderBlock {
    /// What runs the sums.
    pub backend: Backend,
    /// `input_layernorm`.
    pub input_norm: RmsNorm,
    /// `linear_attn` or `self_attn`.
    pub mixer: Mixer,
    /// `post_attention_layernorm`.
    pub post_norm: RmsNorm,
    /// `mlp`.
    pub ffn: Ffn,
}

impl DecoderBlock {
    /// What the layer is to be cached in.
    pub fn layout(&self) -> LayerLayout {
        match &self.mixer {
            Mixer::Linear(mixer) => LayerLayout::Recurrent(mixer.layout()),
            Mixer::Full(mixer) => LayerLayout::Attention(mixer.layout()),
        }
    }

    /// The residual stream after the layer: `[rows, hidden_size]` to the same.
    pub fn forward(
        &self,
        x: &Tensor,
        layer: usize,
        rotary: &RotaryTable,
        sequences: &mut [Sequence<'_>],
    ) -> Result<Tensor> {
        let normed = self.input_norm.forward(x)?;
        let mixed = match &self.mixer {
            Mixer::Linear(mixer) => mixer.forward(&normed, layer, sequences)?,
            Mixer::Full(mixer) => mixer.forward(&normed, layer, rotary, sequences)?,
        };
        let x = add(self.backend, x, &mixed)?;
        let normed = self.post_norm.forward(&x)?;
        let inner = match &self.ffn {
            Ffn::Dense(mlp) => mlp.forward(&normed)?,
            Ffn::Sparse(moe) => moe.forward(&normed)?,
        };
        Ok(add(self.backend, &x, &inner)?)
    }
}
