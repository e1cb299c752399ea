//! Root mean square normalization.

use recant_core::candle::{DType, Tensor};
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
    /// A norm whose weight is stored as its distance from one, as checkpoints of the Hub store all but the gated norm of
    /// a Gated DeltaNet layer. `weight`: `[width]`.
    pub fn zero_centred(backend: Backend, weight: &Tensor, eps: f64) -> Result<Self> {
        Ok(Self {
            backend,
            weight: one_plus(weight)?,
            eps,
        })
    }

    /// Normalizes the rows of `x`: `[rows, width]`.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(rms_norm(self.backend, x, &self.weight, self.eps)?)
    }
}

/// The multiplier of a zero-centred norm weight, in f32.
pub(crate) fn one_plus(weight: &Tensor) -> Result<Tensor> {
    Ok((weight.to_dtype(DType::F32)? + 1.0)?)
}
