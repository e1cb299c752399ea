//! Rotary position embedding.

use candle_core::{Device, Tensor};

use crate::tensors::Op;
use crate::Result;

const OP: Op = Op("rotary");

/// Frequencies of a rotary embedding over the first `rotary_dims` of a head, paired half by half: `(i, i + dims / 2)`.
#[derive(Debug, Clone)]
pub struct Rotary {
    inv_freq: Vec<f32>,
}

/// Cosines and sines of some positions.
///
/// # Shapes
/// Both: `[rows, rotary_dims / 2]`, f32.
#[derive(Debug, Clone)]
pub struct RotaryTable {
    /// Cosines.
    pub cos: Tensor,
    /// Sines.
    pub sin: Tensor,
}

impl Rotary {
    /// Frequencies `theta^(-2 j / rotary_dims)`, in f32 as Hugging Face's code computes them.
    ///
    /// # Errors
    /// `theta` is not positive and finite, or `rotary_dims` is odd or 0.
    pub fn new(theta: f64, rotary_dims: usize) -> Result<Self> {
        if !(theta.is_finite() && theta > 0.0) {
            return Err(OP.value(format!("theta is {theta}; it must be positive and finite")));
        }
        if rotary_dims == 0 || rotary_dims % 2 == 1 {
            return Err(OP.value(format!("rotary_dims is {rotary_dims}; it must be even and not 0")));
        }
        let inv_freq = (0..rotary_dims)
            .step_by(2)
            .map(|i| 1.0 / (theta as f32).powf(i as f32 / rotary_dims as f32))
            .collect();
        Ok(Self { inv_freq })
    }

    /// The table for rows at `positions`.
    ///
    /// # Errors
    /// The device refuses the tensors.
    pub fn table(&self, positions: &[usize], device: &Device) -> Result<RotaryTable> {
        let shape = (positions.len(), self.inv_freq.len());
        let angles = || {
            positions
                .iter()
                .flat_map(|&p| self.inv_freq.iter().map(move |f| p as f32 * f))
        };
        let cos: Vec<f32> = angles().map(f32::cos).collect();
        let sin: Vec<f32> = angles().map(f32::sin).collect();
        Ok(RotaryTable {
            cos: Tensor::from_vec(cos, shape, device)?,
            sin: Tensor::from_vec(sin, shape, device)?,
        })
    }
}
