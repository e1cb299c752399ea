//! The gated delta rule from candle ops, token by token.

use candle_core::{Result as CandleResult, Tensor, D};
use recant_core::{Fold, RecordSlice};

use crate::gated_delta::{check_fold, GatedDeltaShape, Weights, LEAST_SCALE};
use crate::{DeltaAdvance, DeltaOutput, DeltaSegment, Result};

use super::{norm, sigmoid};

/// Folds by the operations of the step.
pub(crate) struct DeltaFold {
    pub(crate) shape: GatedDeltaShape,
}

impl Fold for DeltaFold {
    fn fold(&self, arrays: &[Tensor], records: &[RecordSlice]) -> recant_core::Result<Vec<Tensor>> {
        check_fold(&self.shape, arrays, records)?;
        Ok(fold(&self.shape, arrays, records)?)
    }
}

fn fold(shape: &GatedDeltaShape, arrays: &[Tensor], slices: &[RecordSlice]) -> CandleResult<Vec<Tensor>> {
    let mut conv = arrays[0].clone();
    let mut state = State::new(arrays);
    for slice in slices {
        for row in slice.rows.clone() {
            let at = |i: usize| slice.arrays[i].get(row);
            state = state
                .decayed(&at(1)?)?
                .updated(&per_value_head(shape, &at(0)?)?, &at(2)?)?;
        }
        let input = slice.arrays[3].narrow(0, slice.rows.start, slice.rows.len())?;
        conv = last_rows(&Tensor::cat(&[&conv, &input], 0)?, shape.conv_kernel - 1)?;
    }
    Ok(vec![conv, state.numbers, state.scale])
}

fn last_rows(x: &Tensor, rows: usize) -> CandleResult<Tensor> {
    x.narrow(0, x.dim(0)? - rows, rows)?.copy()
}

/// `scale` `[value_heads]` times `numbers` `[value_heads, key_dim, value_dim]`.
struct State {
    numbers: Tensor,
    scale: Tensor,
}

impl State {
    fn new(arrays: &[Tensor]) -> Self {
        Self {
            numbers: arrays[1].clone(),
            scale: arrays[2].clone(),
        }
    }

    /// Times `g` `[value_heads]`: into the scale, and with it into the numbers where it gets too small.
    fn decayed(&self, g: &Tensor) -> CandleResult<Self> {
        let scale = (&self.scale * g)?;
        let small = scale.lt(LEAST_SCALE)?;
        let one = scale.ones_like()?;
        let factor = small.where_cond(&scale, &one)?;
        Ok(Self {
            numbers: self.numbers.broadcast_mul(&factor.reshape(((), 1, 1))?)?,
            scale: small.where_cond(&one, &scale)?,
        })
    }

    /// Plus `k u^T`, with `k` `[value_heads, key_dim]` and `u` `[value_heads, value_dim]`.
    fn updated(&self, k: &Tensor, u: &Tensor) -> CandleResult<Self> {
        let u = u.broadcast_div(&self.scale.unsqueeze(1)?)?;
        Ok(Self {
            numbers: (&self.numbers + k.unsqueeze(2)?.broadcast_mul(&u.unsqueeze(1)?)?)?,
            scale: self.scale.clone(),
        })
    }

    /// What `k` `[value_heads, key_dim]` finds: `[value_heads, value_dim]`.
    fn under(&self, k: &Tensor) -> CandleResult<Tensor> {
        let found = self.numbers.broadcast_mul(&k.unsqueeze(2)?)?.sum(1)?;
        found.broadcast_mul(&self.scale.unsqueeze(1)?)
    }
}

/// A key head's row for each of its value heads.
fn per_value_head(shape: &GatedDeltaShape, x: &Tensor) -> CandleResult<Tensor> {
    let x = x
        .unsqueeze(1)?
        .broadcast_as((shape.key_heads, shape.group(), shape.key_dim))?;
    x.contiguous()?.reshape((shape.value_heads, shape.key_dim))
}

fn l2_norm(x: &Tensor) -> CandleResult<Tensor> {
    x.broadcast_div(&(x.sqr()?.sum_keepdim(D::Minus1)? + 1e-6)?.sqrt()?)
}

/// x above 20, else log(1 + e^x): the exponential is taken of what cannot overflow.
fn softplus(x: &Tensor) -> CandleResult<Tensor> {
    let small = (x.minimum(20.0)?.exp()? + 1.0)?.log()?;
    x.gt(20.0)?.where_cond(x, &small)
}

pub(crate) fn gated_delta(
    weights: &Weights,
    projected: &Tensor,
    segments: &[DeltaSegment],
) -> Result<DeltaOutput> {
    let mut mixed = Vec::with_capacity(segments.len());
    let mut advances = Vec::with_capacity(segments.len());
    let mut row = 0;
    for segment in segments {
        let x = projected.narrow(0, row, segment.rows)?;
        let (out, advance) = one(weights, &x, segment)?;
        mixed.push(out);
        advances.push(advance);
        row += segment.rows;
    }
    let mixed = match mixed.is_empty() {
        true => projected.narrow(1, 0, weights.shape.values())?.contiguous()?,
        false => Tensor::cat(&mixed, 0)?,
    };
    Ok(DeltaOutput {
        mixed,
        segments: advances,
    })
}

fn one(weights: &Weights, x: &Tensor, segment: &DeltaSegment) -> CandleResult<(Tensor, DeltaAdvance)> {
    let shape = &weights.shape;
    let DeltaSegment { rows, step } = segment;
    let rows = *rows;
    let folded = fold(shape, &step.arrays, &step.fold)?;
    let replayed = fold(shape, &folded, &step.replay)?;
    let (keys, values, channels) = (shape.keys(), shape.values(), shape.channels());

    let input = x.narrow(1, 0, channels)?.contiguous()?;
    let window = Tensor::cat(&[&replayed[0], &input], 0)?;
    let mut conv = Tensor::zeros_like(&input)?;
    for tap in 0..shape.conv_kernel {
        conv = (conv
            + window
                .narrow(0, tap, rows)?
                .broadcast_mul(&weights.conv.narrow(0, tap, 1)?)?)?;
    }
    let conv = conv.silu()?;
    let heads = |start: usize, heads: usize, width: usize| {
        conv.narrow(1, start, heads * width)?
            .contiguous()?
            .reshape((rows, heads, width))
    };
    let q = (l2_norm(&heads(0, shape.key_heads, shape.key_dim)?)? * (1.0 / (shape.key_dim as f64).sqrt()))?;
    let k = l2_norm(&heads(keys, shape.key_heads, shape.key_dim)?)?;
    let v = heads(2 * keys, shape.value_heads, shape.value_dim)?;

    let gates = |start: usize| {
        x.narrow(1, channels + values + start, shape.value_heads)?
            .contiguous()
    };
    let beta = sigmoid(&gates(0)?)?;
    // Finite, so that nothing times zero is not a number.
    let rate = weights.a_log.exp()?.minimum(f32::MAX)?;
    let a = gates(shape.value_heads)?.broadcast_add(&weights.dt_bias)?;
    let a = a.minimum(f32::MAX)?.maximum(f32::MIN)?;
    let decay = softplus(&a)?.broadcast_mul(&rate)?.neg()?.exp()?;

    let mut state = State::new(&replayed);
    let mut updates = Vec::with_capacity(rows);
    let mut outs = Vec::with_capacity(rows);
    for row in 0..rows {
        let (q, k) = (
            per_value_head(shape, &q.get(row)?)?,
            per_value_head(shape, &k.get(row)?)?,
        );
        let old = state.decayed(&decay.get(row)?)?;
        let u = (v.get(row)? - old.under(&k)?)?.broadcast_mul(&beta.get(row)?.unsqueeze(1)?)?;
        state = old.updated(&k, &u)?;
        outs.push(state.under(&q)?);
        updates.push(u);
    }
    let stack = |parts: &[Tensor]| match parts.is_empty() {
        true => v.zeros_like(),
        false => Tensor::stack(parts, 0),
    };
    let z = x.narrow(1, channels, values)?.contiguous()?.silu()?;
    let mixed = norm(&stack(&outs)?, &weights.norm, shape.eps)?.reshape((rows, values))?;
    let mixed = (mixed * z)?;
    let advance = if step.recording {
        DeltaAdvance {
            arrays: folded,
            records: vec![k, decay, stack(&updates)?, input],
        }
    } else {
        DeltaAdvance {
            arrays: vec![
                last_rows(&window, shape.conv_kernel - 1)?,
                state.numbers,
                state.scale,
            ],
            records: Vec::new(),
        }
    };
    Ok((mixed, advance))
}
