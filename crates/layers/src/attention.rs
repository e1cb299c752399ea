//! Full attention with grouped heads, per-head norms, partial rotation and an output gate.

use recant_core::candle::{DType, Tensor};
use recant_core::{AttentionLayout, KvView, Result};
use recant_kernels::{
    attention, attention_inputs, AttentionSegment, AttentionShape, Backend, Linear, RotaryTable, Weight,
};

use crate::Sequence;

/// Tensors of a full attention layer.
#[derive(Debug, Clone)]
pub struct AttentionWeights {
    /// `[heads * head_dim * (2 if gated), hidden_size]`; gated: each head's query rows, then its gate rows.
    pub q: Weight,
    /// `[kv_heads * head_dim, hidden_size]`.
    pub k: Weight,
    /// `[kv_heads * head_dim, hidden_size]`.
    pub v: Weight,
    /// `[hidden_size, heads * head_dim]`.
    pub o: Weight,
    /// Biases of the four, if the layer has any.
    pub biases: Option<[Tensor; 4]>,
    /// `[head_dim]`, f32, multiplied as it is.
    pub q_norm: Tensor,
    /// `[head_dim]`, f32, multiplied as it is.
    pub k_norm: Tensor,
}

/// A full attention layer.
#[derive(Debug)]
pub struct GatedAttention {
    backend: Backend,
    shape: AttentionShape,
    inputs: Linear,
    out: Linear,
    q_norm: Tensor,
    k_norm: Tensor,
}

impl GatedAttention {
    /// # Errors
    /// Tensors of other shapes than `shape` asks for.
    pub fn new(backend: Backend, shape: AttentionShape, weights: &AttentionWeights) -> Result<Self> {
        let (input_bias, out_bias) = match &weights.biases {
            Some([q, k, v, o]) => (Some(Tensor::cat(&[q, k, v], 0)?), Some(o)),
            None => (None, None),
        };
        Ok(Self {
            inputs: Linear::new(backend, [&weights.q, &weights.k, &weights.v], input_bias.as_ref())?,
            out: Linear::new(backend, [&weights.o], out_bias)?,
            q_norm: weights.q_norm.clone(),
            k_norm: weights.k_norm.clone(),
            backend,
            shape,
        })
    }

    /// Shape of a cached row.
    pub fn layout(&self) -> AttentionLayout {
        AttentionLayout {
            kv_heads: self.shape.kv_heads,
            head_dim: self.shape.head_dim,
            dtype: DType::F32,
        }
    }

    /// `[rows, hidden_size]` to the same. `rotary` has a row for each of them; `layer` tells which of the sequences'
    /// caches are this layer's.
    pub fn forward(
        &self,
        x: &Tensor,
        layer: usize,
        rotary: &RotaryTable,
        sequences: &mut [Sequence<'_>],
    ) -> Result<Tensor> {
        let projected = self.inputs.forward(x)?;
        let inputs = attention_inputs(
            self.backend,
            &self.shape,
            &projected,
            &self.q_norm,
            &self.k_norm,
            rotary,
        )?;
        let mut views: Vec<KvView> = Vec::with_capacity(sequences.len());
        let mut start = 0;
        for sequence in sequences.iter_mut() {
            let keys = inputs.k.narrow(0, start, sequence.rows)?;
            let values = inputs.v.narrow(0, start, sequence.rows)?;
            let cache = sequence.caches.attention(layer)?;
            cache
                .append(&keys, &values)
                .and_then(|()| cache.view())
                .map(|view| views.push(view))
                .map_err(|e| e.in_layer(layer, cache.kind()))?;
            start += sequence.rows;
        }
        let segments: Vec<AttentionSegment<'_>> = sequences
            .iter()
            .zip(&views)
            .map(|(sequence, view)| AttentionSegment {
                rows: sequence.rows,
                position: sequence.position,
                view,
            })
            .collect();
        let mixed = attention(
            self.backend,
            &self.shape,
            &inputs.q,
            inputs.gate.as_ref(),
            &segments,
        )?;
        Ok(self.out.forward(&mixed)?)
    }
}
