//! Attention from candle ops.

use candle_core::{DType, Result as CandleResult, Tensor, D};

use crate::attention::Sight;
use crate::{AttentionInputs, AttentionSegment, AttentionShape, Result, RotaryTable};

use super::{norm, sigmoid};

pub(crate) fn attention_inputs(
    shape: &AttentionShape,
    projected: &Tensor,
    q_norm: &Tensor,
    k_norm: &Tensor,
    rotary: &RotaryTable,
) -> Result<AttentionInputs> {
    let AttentionShape {
        heads,
        kv_heads,
        head_dim,
        gated,
        eps,
        ..
    } = *shape;
    let rows = projected.dim(0)?;
    let per_head = if gated { 2 * head_dim } else { head_dim };
    let (q_width, kv_width) = (heads * per_head, kv_heads * head_dim);
    let both = projected
        .narrow(1, 0, q_width)?
        .reshape((rows, heads, per_head))?;
    let gate = if gated {
        let gate = both.narrow(2, head_dim, head_dim)?.contiguous()?;
        Some(gate.reshape((rows, heads * head_dim))?)
    } else {
        None
    };
    let k = projected
        .narrow(1, q_width, kv_width)?
        .reshape((rows, kv_heads, head_dim))?;
    let v = projected.narrow(1, q_width + kv_width, kv_width)?;
    Ok(AttentionInputs {
        q: turn(
            shape,
            &norm(&both.narrow(2, 0, head_dim)?.contiguous()?, q_norm, eps)?,
            rotary,
        )?,
        gate,
        k: turn(shape, &norm(&k, k_norm, eps)?, rotary)?,
        v: v.reshape((rows, kv_heads, head_dim))?.contiguous()?,
    })
}

fn turn(shape: &AttentionShape, x: &Tensor, rotary: &RotaryTable) -> CandleResult<Tensor> {
    let half = shape.rotary_dims / 2;
    if half == 0 {
        return Ok(x.clone());
    }
    let (a, b) = (x.narrow(2, 0, half)?, x.narrow(2, half, half)?);
    let (cos, sin) = (rotary.cos.unsqueeze(1)?, rotary.sin.unsqueeze(1)?);
    let new_a = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
    let new_b = (b.broadcast_mul(&cos)? + a.broadcast_mul(&sin)?)?;
    let rest = x.narrow(2, 2 * half, shape.head_dim - 2 * half)?;
    if 2 * half == shape.head_dim {
        return Tensor::cat(&[new_a, new_b], 2);
    }
    Tensor::cat(&[new_a, new_b, rest], 2)
}

pub(crate) fn attention(
    shape: &AttentionShape,
    q: &Tensor,
    gate: Option<&Tensor>,
    segments: &[AttentionSegment<'_>],
) -> Result<Tensor> {
    let mut outs = Vec::with_capacity(segments.len());
    let mut row = 0;
    for segment in segments.iter().filter(|segment| segment.rows > 0) {
        outs.push(one(shape, &q.narrow(0, row, segment.rows)?, segment)?);
        row += segment.rows;
    }
    let out = match outs.is_empty() {
        true => q.zeros_like()?,
        false => Tensor::cat(&outs, 0)?,
    };
    let out = out.reshape((q.dim(0)?, shape.heads * shape.head_dim))?;
    Ok(match gate {
        Some(gate) => (out * sigmoid(gate)?)?,
        None => out,
    })
}

/// `[rows, heads, head_dim]`
fn one(shape: &AttentionShape, q: &Tensor, segment: &AttentionSegment<'_>) -> CandleResult<Tensor> {
    let view = segment.view;
    let sight = Sight::of(view);
    let blocks: Vec<_> = view.blocks.iter().filter(|block| block.rows > 0).collect();
    let join = |arrays: Vec<&Tensor>| {
        let mut parts = Vec::with_capacity(arrays.len());
        for (array, block) in arrays.into_iter().zip(&blocks) {
            parts.push(array.narrow(0, 0, block.rows)?.to_dtype(DType::F32)?);
        }
        Tensor::cat(&parts, 0)
    };
    let k = join(blocks.iter().map(|block| &block.keys).collect())?;
    let v = join(blocks.iter().map(|block| &block.values).collect())?;
    let keys: Vec<usize> = blocks
        .iter()
        .flat_map(|block| block.start..block.start + block.rows)
        .collect();
    let rows = segment.rows;
    let (kv_heads, group) = (shape.kv_heads, shape.group());
    let mask: Vec<f32> = (segment.position..segment.position + rows)
        .flat_map(|position| {
            keys.iter().map(move |&key| {
                if sight.sees(position, key) {
                    0.0
                } else {
                    f32::NEG_INFINITY
                }
            })
        })
        .collect();
    let mask = Tensor::from_vec(mask, (1, rows, keys.len()), q.device())?;
    // [kv_heads, group, ..] against [kv_heads, ..]: rows of a group side by side.
    let q = q
        .reshape((rows, kv_heads, group, shape.head_dim))?
        .permute((1, 2, 0, 3))?
        .contiguous()?;
    let q = q.reshape((kv_heads, group * rows, shape.head_dim))?;
    let scores = q.matmul(&k.permute((1, 2, 0))?.contiguous()?)?;
    let scores = (scores * (1.0 / (shape.head_dim as f64).sqrt()))?;
    let scores = scores
        .reshape((kv_heads * group, rows, keys.len()))?
        .broadcast_add(&mask)?;
    let weights = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?)?.exp()?;
    let weights = weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?;
    let weights = weights.reshape((kv_heads, group * rows, keys.len()))?;
    let out = weights.matmul(&v.transpose(0, 1)?.contiguous()?)?;
    let out = out
        .reshape((kv_heads, group, rows, shape.head_dim))?
        .permute((2, 0, 1, 3))?
        .contiguous()?;
    out.reshape((rows, shape.heads, shape.head_dim))
}
