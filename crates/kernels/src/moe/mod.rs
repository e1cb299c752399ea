//! Sparse mixture of experts: which experts a row goes to, and the weighted sum of what they make of it.
//!
//! Rows are brought together by expert, so that those which chose the same one read its weights once. An expert gives a row
//! the same bits whichever rows come with it, as any linear layer does, and each row adds its experts' results in
//! ascending order of their ids. Nothing else enters, so the law holds for every set of rows.

mod experts;
mod kernel;
mod route;
#[cfg(test)]
mod tests;

use candle_core::{DType, Tensor};

use crate::pool::{self, Shared};
use crate::simd;
use crate::tensors::{tensor, Op};
use crate::{composed, Backend, Result};

pub use experts::SparseExperts;
pub use route::{route, Routes};

/// Sizes of a mixture of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MoeShape {
    /// Width of a row.
    pub hidden_size: usize,
    /// Width inside an expert.
    pub width: usize,
    /// Experts there are.
    pub experts: usize,
    /// Experts that a row goes to.
    pub top_k: usize,
    /// Whether a row's weights are divided by their sum.
    pub renormalize: bool,
}

impl MoeShape {
    fn check(&self, op: Op) -> Result<()> {
        if self.hidden_size == 0 || self.width == 0 {
            return Err(op.value(format!(
                "hidden_size is {} and width is {}; expected at least 1",
                self.hidden_size, self.width
            )));
        }
        if self.top_k == 0 || self.top_k > self.experts {
            return Err(op.value(format!(
                "top_k is {} of {} experts; expected 1 to all of them",
                self.top_k, self.experts
            )));
        }
        Ok(())
    }
}

/// `sum + sigmoid(gate) * x`: a shared expert's result, weighed by a gate of its own, added to the routed experts'.
///
/// # Shapes
/// `sum`, `x`: `[rows, d]`, f32. `gate`: `[rows, 1]`, f32. Result: `[rows, d]`, f32.
///
/// # Errors
/// Another shape, type or device, or not contiguous.
pub fn add_gated(backend: Backend, sum: &Tensor, x: &Tensor, gate: &Tensor) -> Result<Tensor> {
    const OP: Op = Op("add_gated");
    let (rows, width) = match *sum.dims() {
        [rows, width] if width > 0 => (rows, width),
        _ => return Err(OP.shape_error("sum", sum, "[rows, d] with d > 0".to_owned())),
    };
    OP.shape("x", x, &[rows, width])?;
    OP.shape("gate", gate, &[rows, 1])?;
    for (operand, tensor) in [("sum", sum), ("x", x), ("gate", gate)] {
        OP.dtype(operand, tensor, DType::F32)?;
    }
    if backend == Backend::Composed {
        return Ok((sum + x.broadcast_mul(&composed::sigmoid(gate)?)?)?);
    }
    let (sum, x, gate) = (OP.hold("sum", sum)?, OP.hold("x", x)?, OP.hold("gate", gate)?);
    let (sum, x, gate) = (sum.f32()?, x.f32()?, gate.f32()?);
    let mut y = vec![0.0; x.len()];
    let shared = Shared::new(&mut y);
    let isa = simd::isa();
    pool::for_each(rows, 2 * x.len(), &|row| {
        let range = row * width..(row + 1) * width;
        let (sum, x) = (&sum[range.clone()], &x[range.clone()]);
        // SAFETY: one task a row, and rows do not overlap.
        let y = unsafe { shared.part(range) };
        let gate = gate[row];
        simd::run(isa, kernel::AddGated { sum, x, gate, y });
    });
    tensor(y, &[rows, width])
}
