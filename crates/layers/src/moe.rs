//! A mixture of experts with one expert that all rows share.

use recant_core::candle::Tensor;
use recant_core::Result;
use recant_kernels::{add_gated, route, Backend, Linear, Mlp, MoeShape, SparseExperts, Weight};

/// Each row goes to its own few of many experts and, weighed by a gate of its own, to the shared one.
#[derive(Debug)]
pub struct SparseMoe {
    backend: Backend,
    shape: MoeShape,
    router: Linear,
    experts: SparseExperts,
    shared: Mlp,
    shared_gate: Linear,
}

impl SparseMoe {
    /// # Shapes
    /// `router`: `[experts, hidden_size]`; `shared_gate`: `[1, hidden_size]`.
    ///
    /// # Errors
    /// Tensors or experts of other sizes than `shape` asks for.
    pub fn new(
        backend: Backend,
        shape: MoeShape,
        router: Weight,
        experts: Vec<Mlp>,
        shared: Mlp,
        shared_gate: Weight,
    ) -> Result<Self> {
        Ok(Self {
            router: Linear::new(backend, [router], None)?,
            experts: SparseExperts::new(backend, shape, experts)?,
            shared,
            shared_gate: Linear::new(backend, [shared_gate], None)?,
            backend,
            shape,
        })
    }

    /// `[rows, hidden_size]` to the same.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let routes = route(self.backend, &self.shape, &self.router.forward(x)?)?;
        let routed = self.experts.forward(x, &routes)?;
        let (shared, gate) = (self.shared.forward(x)?, self.shared_gate.forward(x)?);
        Ok(add_gated(self.backend, &routed, &shared, &gate)?)
    }
}
