//! Gated DeltaNet: a short convolution, and a recurrence that one matrix a head carries on.

use recant_core::candle::Tensor;
use recant_core::{RecurrentLayout, Result};
use recant_kernels::{Backend, DeltaSegment, GatedDelta, GatedDeltaShape, Linear, Weight};

use crate::Sequence;

/// Input projections of a Gated DeltaNet layer, q, k and v fused, z, b and a apart.
///
/// C is `2 * key_heads * key_dim + value_heads * value_dim`.
#[derive(Debug, Clone)]
pub struct DeltaInputs {
    /// `[C, hidden_size]`: all q rows, all k rows, all v rows.
    pub qkv: Weight,
    /// `[value_heads * value_dim, hidden_size]`.
    pub z: Weight,
    /// `[value_heads, hidden_size]`.
    pub b: Weight,
    /// `[value_heads, hidden_size]`.
    pub a: Weight,
}

/// Tensors of a Gated DeltaNet layer.
#[derive(Debug, Clone)]
pub struct DeltaNetWeights {
    /// The input projections.
    pub inputs: DeltaInputs,
    /// `[C, conv_kernel]`, the last tap meets the newest row.
    pub conv: Tensor,
    /// `[value_heads]`.
    pub a_log: Tensor,
    /// `[value_heads]`.
    pub dt_bias: Tensor,
    /// `[value_dim]`, multiplied as it is.
    pub norm: Tensor,
    /// `[hidden_size, value_heads * value_dim]`.
    pub out: Weight,
}

/// A Gated DeltaNet layer.
#[derive(Debug)]
pub struct GatedDeltaNet {
    inputs: Linear,
    delta: GatedDelta,
    out: Linear,
}

impl GatedDeltaNet {
    /// # Errors
    /// Tensors of other shapes than `shape` asks for.
    pub fn new(backend: Backend, shape: GatedDeltaShape, weights: &DeltaNetWeights) -> Result<Self> {
        let DeltaInputs { qkv, z, b, a } = &weights.inputs;
        Ok(Self {
            inputs: Linear::new(backend, [qkv, z, b, a], None)?,
            delta: GatedDelta::new(
                backend,
                shape,
                &weights.conv,
                &weights.a_log,
                &weights.dt_bias,
                &weights.norm,
            )?,
            out: Linear::new(backend, [&weights.out], None)?,
        })
    }

    /// Arrays and records of the layer's cache.
    pub fn layout(&self) -> RecurrentLayout {
        self.delta.layout()
    }

    /// `[rows, hidden_size]` to the same; `layer` tells which of the sequences' caches are this layer's.
    pub fn forward(&self, x: &Tensor, layer: usize, sequences: &mut [Sequence<'_>]) -> Result<Tensor> {
        let projected = self.inputs.forward(x)?;
        let mut segments = Vec::with_capacity(sequences.len());
        let mixed = begin(layer, sequences, &mut segments)
            .and_then(|()| Ok(self.delta.forward(&projected, &mut segments)?));
        let output = match mixed {
            Ok(output) => output,
            Err(error) => {
                // The kernel has written nothing.
                for sequence in sequences.iter_mut().take(segments.len()) {
                    sequence.caches.recurrent(layer)?.abandon();
                }
                return Err(error);
            }
        };
        for (sequence, advance) in sequences.iter_mut().zip(output.segments) {
            let cache = sequence.caches.recurrent(layer)?;
            cache
                .finish(advance.arrays, advance.records)
                .map_err(|e| e.in_layer(layer, cache.kind()))?;
        }
        Ok(self.out.forward(&output.mixed)?)
    }
}

/// Begins a call on each sequence's cache; `segments` tells how many were begun.
fn begin(layer: usize, sequences: &mut [Sequence<'_>], segments: &mut Vec<DeltaSegment>) -> Result<()> {
    for sequence in sequences.iter_mut() {
        let cache = sequence.caches.recurrent(layer)?;
        let step = cache
            .begin(sequence.rows)
            .map_err(|e| e.in_layer(layer, cache.kind()))?;
        segments.push(DeltaSegment {
            rows: sequence.rows,
            step,
        });
    }
    Ok(())
}
