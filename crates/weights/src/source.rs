//! Where a model's tensors come from.

use candle_core::Tensor;

use crate::{Error, Result, Stored, Weights};

/// How a checkpoint stores the weights of its root mean square norms, all but the gated norm of a Gated DeltaNet layer,
/// which every exporter stores as it is multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Norms {
    /// As their distance from one, as checkpoints of the Hub do.
    ZeroCentred,
    /// As they are multiplied, 1 + w, as MLX conversions and GGUF do.
    OnePlus,
}

/// Hands out named tensors, each once: a checkpoint, or weights made elsewhere.
pub trait Source {
    /// Whether there is a tensor of this canonical name, taken or not.
    fn has(&self, name: &str) -> bool;

    /// The tensor, on the CPU, in F32, BF16 or F16.
    ///
    /// # Shapes
    /// Exactly `shape`.
    ///
    /// # Errors
    /// As [`Weights::take`] says.
    fn take(&mut self, name: &str, shape: &[usize]) -> Result<Tensor>;

    /// A matrix `[out, in]`, quantized where it is stored so. `name` is that of an unquantized matrix
    /// (`layers.0.mlp.up_proj.weight`), however its parts are called in the checkpoint.
    ///
    /// # Errors
    /// As [`take`](Self::take), and a quantized matrix whose parts are missing or contradict one another.
    fn take_matrix(&mut self, name: &str, shape: [usize; 2]) -> Result<Stored> {
        Ok(Stored::Float(self.take(name, &shape)?))
    }

    /// Matrix `[out, in]` number `index` of a stack `[count, out, in]`: one at a time, since a stack of experts can be
    /// larger than all else that is in memory while a layer is made. They are taken in order, each once.
    ///
    /// By default the whole stack is [`take`](Self::take)n for each, which suits a source that makes its tensors.
    ///
    /// # Errors
    /// As [`take_matrix`](Self::take_matrix), or a matrix out of order.
    fn take_stacked(&mut self, name: &str, shape: [usize; 3], index: usize) -> Result<Stored> {
        let matrix = self.take(name, &shape)?.get(index);
        matrix.map(Stored::Float).map_err(|source| Error::Tensor {
            tensor: name.to_owned(),
            source: source.into(),
        })
    }

    /// How it stores norms.
    fn norms(&self) -> Norms {
        Norms::ZeroCentred
    }

    /// Sets a tensor aside as known and not wanted.
    fn discard(&mut self, name: &str);
}

impl Source for Weights<'_> {
    fn has(&self, name: &str) -> bool {
        Weights::has(self, name)
    }

    fn take(&mut self, name: &str, shape: &[usize]) -> Result<Tensor> {
        Weights::take(self, name, shape)
    }

    fn take_matrix(&mut self, name: &str, shape: [usize; 2]) -> Result<Stored> {
        Weights::take_matrix(self, name, shape)
    }

    fn take_stacked(&mut self, name: &str, shape: [usize; 3], index: usize) -> Result<Stored> {
        Weights::take_stacked(self, name, shape, index)
    }

    fn norms(&self) -> Norms {
        Weights::norms(self)
    }

    fn discard(&mut self, name: &str) {
        Weights::discard(self, name);
    }
}
