//! From a projection to queries, gates, keys and values.

use candle_core::{DType, Tensor};

use crate::pool::{self, Shared};
use crate::rows::RmsNorm;
use crate::simd::{self, Kernel, Simd, LANES};
use crate::tensors::{tensor, Op};
use crate::{composed, AttentionShape, Backend, Result, RotaryTable};

const OP: Op = Op("attention_inputs");

/// What attention works on.
///
/// # Shapes
/// `q`: `[rows, heads, head_dim]`; `gate`: `[rows, heads * head_dim]`; `k`, `v`: `[rows, kv_heads, head_dim]`; all f32.
#[derive(Debug, Clone)]
pub struct AttentionInputs {
    /// Queries, after their norm and rotation.
    pub q: Tensor,
    /// The gate before its sigmoid, if the layer is gated.
    pub gate: Option<Tensor>,
    /// Keys, after their norm and rotation.
    pub k: Tensor,
    /// Values.
    pub v: Tensor,
}

/// Takes a projection apart, and norms and rotates queries and keys. The gate is neither normed nor rotated.
///
/// # Shapes
/// `projected`: `[rows, q | k | v]`, f32, where q is for each head its query and then, in a gated layer, its gate: so
/// `heads * head_dim * (2 if gated else 1) + 2 * kv_heads * head_dim` wide. `q_norm`, `k_norm`: `[head_dim]`, f32,
/// multiplied as they are. `rotary`: `[rows, rotary_dims / 2]`, f32.
///
/// # Errors
/// Another shape, type or device, or not contiguous.
pub fn attention_inputs(
    backend: Backend,
    shape: &AttentionShape,
    projected: &Tensor,
    q_norm: &Tensor,
    k_norm: &Tensor,
    rotary: &RotaryTable,
) -> Result<AttentionInputs> {
    shape.check(OP)?;
    let AttentionShape {
        heads,
        kv_heads,
        head_dim,
        rotary_dims,
        gated,
        eps,
    } = *shape;
    let per_head = if gated { 2 * head_dim } else { head_dim };
    let width = heads * per_head + 2 * kv_heads * head_dim;
    let rows = OP.rows("projected", projected, width)?;
    OP.shape("q_norm", q_norm, &[head_dim])?;
    OP.shape("k_norm", k_norm, &[head_dim])?;
    OP.shape("rotary.cos", &rotary.cos, &[rows, rotary_dims / 2])?;
    OP.shape("rotary.sin", &rotary.sin, &[rows, rotary_dims / 2])?;
    for (operand, array) in [
        ("projected", projected),
        ("q_norm", q_norm),
        ("k_norm", k_norm),
        ("rotary.cos", &rotary.cos),
        ("rotary.sin", &rotary.sin),
    ] {
        OP.dtype(operand, array, DType::F32)?;
    }
    if backend == Backend::Composed {
        return composed::attention_inputs(shape, projected, q_norm, k_norm, rotary);
    }
    let held = (
        OP.hold("projected", projected)?,
        OP.hold("q_norm", q_norm)?,
        OP.hold("k_norm", k_norm)?,
        OP.hold("rotary.cos", &rotary.cos)?,
        OP.hold("rotary.sin", &rotary.sin)?,
    );
    let (x, q_norm, k_norm) = (held.0.f32()?, held.1.f32()?, held.2.f32()?);
    let (cos, sin) = (held.3.f32()?, held.4.f32()?);

    let (q_width, kv_width) = (heads * head_dim, kv_heads * head_dim);
    let mut q = vec![0.0; rows * q_width];
    let mut gate = vec![0.0; if gated { q.len() } else { 0 }];
    let mut k = vec![0.0; rows * kv_width];
    let mut v = vec![0.0; rows * kv_width];
    let shared = [&mut q, &mut gate, &mut k, &mut v].map(|array| Shared::new(array));
    let isa = simd::isa();
    pool::for_each(rows, 4 * x.len(), &|row| {
        let x = &x[row * width..(row + 1) * width];
        let (x_q, x_kv) = x.split_at(heads * per_head);
        let (x_k, x_v) = x_kv.split_at(kv_width);
        let part = |array: usize, width: usize| {
            // SAFETY: one task a row, each array asked for once, and rows do not overlap.
            unsafe { shared[array].part(row * width..(row + 1) * width) }
        };
        let (q, k, v) = (part(0, q_width), part(2, kv_width), part(3, kv_width));
        let half = rotary_dims / 2;
        let turn = |x, weight, y| NormAndTurn {
            x,
            weight,
            eps: eps as f32,
            cos: &cos[row * half..(row + 1) * half],
            sin: &sin[row * half..(row + 1) * half],
            y,
        };
        for (x, q) in x_q.chunks_exact(per_head).zip(q.chunks_exact_mut(head_dim)) {
            simd::run(isa, turn(&x[..head_dim], q_norm, q));
        }
        for (x, k) in x_k.chunks_exact(head_dim).zip(k.chunks_exact_mut(head_dim)) {
            simd::run(isa, turn(x, k_norm, k));
        }
        if gated {
            let gate = part(1, q_width);
            for (x, gate) in x_q.chunks_exact(per_head).zip(gate.chunks_exact_mut(head_dim)) {
                gate.copy_from_slice(&x[head_dim..]);
            }
        }
        v.copy_from_slice(x_v);
    });
    Ok(AttentionInputs {
        q: tensor(q, &[rows, heads, head_dim])?,
        gate: if gated {
            Some(tensor(gate, &[rows, q_width])?)
        } else {
            None
        },
        k: tensor(k, &[rows, kv_heads, head_dim])?,
        v: tensor(v, &[rows, kv_heads, head_dim])?,
    })
}

/// Norm and rotation of one head.
struct NormAndTurn<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    eps: f32,
    cos: &'a [f32],
    sin: &'a [f32],
    y: &'a mut [f32],
}

impl Kernel for NormAndTurn<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self {
            x,
            weight,
            eps,
            cos,
            sin,
            y,
        } = self;
        RmsNorm {
            x,
            weight,
            eps,
            y: &mut *y,
        }
        .run(s);
        let half = cos.len();
        let (a, rest) = y.split_at_mut(half);
        let b = &mut rest[..half];
        let (a8, a_tail) = a.as_chunks_mut::<LANES>();
        let (b8, b_tail) = b.as_chunks_mut::<LANES>();
        let (cos8, cos_tail) = cos.as_chunks::<LANES>();
        let (sin8, sin_tail) = sin.as_chunks::<LANES>();
        for (((a, b), cos), sin) in a8.iter_mut().zip(b8).zip(cos8).zip(sin8) {
            let turned = turn(s, s.load(a), s.load(b), s.load(cos), s.load(sin));
            s.store(turned.0, a);
            s.store(turned.1, b);
        }
        if !a_tail.is_empty() {
            let (cos, sin) = (s.load_part(cos_tail), s.load_part(sin_tail));
            let turned = turn(s, s.load_part(a_tail), s.load_part(b_tail), cos, sin);
            s.store_part(turned.0, a_tail);
            s.store_part(turned.1, b_tail);
        }
    }
}

/// `(a cos - b sin, b cos + a sin)`
#[inline(always)]
fn turn<S: Simd>(s: S, a: S::F, b: S::F, cos: S::F, sin: S::F) -> (S::F, S::F) {
    (
        s.sub(s.mul(a, cos), s.mul(b, sin)),
        s.add(s.mul(b, cos), s.mul(a, sin)),
    )
}
