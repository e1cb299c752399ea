//! The SiLU-gated MLP: of a dense layer, and each expert of a mixture.

use candle_core::Tensor;

use crate::{swiglu, Backend, Linear, Result, Weight};

/// `down(silu(gate(x)) * up(x))`, without biases, its weights packed as those of any [`Linear`].
#[derive(Debug)]
pub struct Mlp {
    backend: Backend,
    pub(crate) gate_up: Linear,
    pub(crate) down: Linear,
}

impl Mlp {
    /// Takes weights by copy.
    ///
    /// # Shapes
    /// `gate_up`: one matrix `[2 * width, hidden_size]` whose first half is the gate, or gate and up of
    /// `[width, hidden_size]` each. `down`: `[hidden_size, width]`.
    ///
    /// # Errors
    /// As [`Linear::new`] says.
    pub fn new<W: Into<Weight>>(
        backend: Backend,
        gate_up: impl IntoIterator<Item = W>,
        down: impl Into<Weight>,
    ) -> Result<Self> {
        Ok(Self {
            backend,
            gate_up: Linear::new(backend, gate_up, None)?,
            down: Linear::new(backend, [down], None)?,
        })
    }

    /// `[rows, hidden_size]` to the same.
    ///
    /// # Errors
    /// As [`Linear::forward`] and [`swiglu`] say.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.down
            .forward(&swiglu(self.backend, &self.gate_up.forward(x)?)?)
    }
}
