//! Where a model's tensors come from.

use candle_core::Tensor;

use crate::{Result, Weights};

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

    fn discard(&mut self, name: &str) {
        Weights::discard(self, name);
    }
}
