//! Root mean square normalization.

use recant_core::candle::Tensor;
use recant_core::Result;
use recant_kernels::{rms_norm, Backend};

/// `y = x / sqrt(mean(x^2) + eps) * w`, row by row, in f32.
#[derive(Debug, Clone)]
pub struct RmsNorm {
    backend: Backend,
    weight: Tensor,
    eps: f64,
}

impl RmsNorm {
    /// `weight`: `[width]`, f32, what rows are multiplied with.
    pub fn new(backend: Backend, weight: Tensor, eps: f64) -> Self {
        Self { backend, weight, eps }
    }

    /// Normalizes the rows of `x`: `[rows, width]`.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(rms_norm(self.backend, x, &self.weight, self.eps)?)
    }
}
