//! The operations from candle ops, on any device. Operands were checked by the callers.

mod attention;
mod delta;

use candle_core::{Result as CandleResult, Tensor, D};

use crate::Result;

pub(crate) use attention::{attention, attention_inputs};
pub(crate) use delta::{gated_delta, DeltaFold};

pub(crate) fn sigmoid(x: &Tensor) -> CandleResult<Tensor> {
    (x.neg()?.exp()? + 1.0)?.recip()
}

fn norm(x: &Tensor, weight: &Tensor, eps: f64) -> CandleResult<Tensor> {
    let mean = x.sqr()?.mean_keepdim(D::Minus1)?;
    x.broadcast_div(&(mean + eps)?.sqrt()?)?.broadcast_mul(weight)
}

pub(crate) fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    Ok(norm(x, weight, eps)?)
}

pub(crate) fn swiglu(gate_up: &Tensor) -> Result<Tensor> {
    let width = gate_up.dim(1)? / 2;
    let gate = gate_up.narrow(1, 0, width)?.silu()?;
    Ok((gate * gate_up.narrow(1, width, width)?)?)
}
