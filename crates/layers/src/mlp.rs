//! The SiLU-gated MLP.

use recant_core::candle::Tensor;
use recant_core::Result;
use recant_kernels::{swiglu, Backend, Linear};

/// `down(silu(gate(x)) * up(x))`, without biases.
#[derive(Debug)]
pub struct Mlp {
    backend: Backend,
    gate_up: Linear,
    down: Linear,
}

impl Mlp {
    /// # Shapes
    /// `gate`, `up`: `[width, hidden_size]`; `down`: `[hidden_size, width]`.
    pub fn new(backend: Backend, gate: &Tensor, up: &Tensor, down: &Tensor) -> Result<Self> {
        Ok(Self {
            backend,
            gate_up: Linear::new(backend, &[gate.clone(), up.clone()], None)?,
            down: Linear::new(backend, std::slice::from_ref(down), None)?,
        })
    }

    /// `[rows, hidden_size]` to the same.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let inner = swiglu(self.backend, &self.gate_up.forward(x)?)?;
        Ok(self.down.forward(&inner)?)
    }
}
