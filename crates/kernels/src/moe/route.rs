//! From router logits to experts and weights.

use candle_core::{DType, Tensor, D};

use crate::pool::{self, Shared};
use crate::simd;
use crate::tensors::Op;
use crate::{Backend, Result};

use super::kernel::Softmax;
use super::MoeShape;

const OP: Op = Op("route");

/// The experts that rows go to, and with which weights.
#[derive(Debug, Clone, PartialEq)]
pub struct Routes {
    pub(super) top_k: usize,
    pub(super) experts: usize,
    /// `[rows][top_k]`
    pub(super) ids: Vec<u32>,
    /// `[rows][top_k]`
    pub(super) weights: Vec<f32>,
}

impl Routes {
    /// Rows that are routed.
    pub fn rows(&self) -> usize {
        self.ids.len() / self.top_k
    }

    /// A row's experts in ascending order, each with its weight.
    ///
    /// # Panics
    /// There is no such row.
    pub fn row(&self, row: usize) -> impl Iterator<Item = (u32, f32)> + '_ {
        let range = row * self.top_k..(row + 1) * self.top_k;
        let weights = self.weights[range.clone()].iter().copied();
        self.ids[range].iter().copied().zip(weights)
    }
}

/// Softmax over all experts, of which a row takes the `top_k` most probable; of equal ones, those of the lowest ids.
///
/// # Shapes
/// `logits`: `[rows, experts]`, f32.
///
/// # Errors
/// Another shape, type or device, not contiguous, or a shape that routes a row to no expert or more than there are.
pub fn route(backend: Backend, shape: &MoeShape, logits: &Tensor) -> Result<Routes> {
    shape.check(OP)?;
    let (experts, top_k) = (shape.experts, shape.top_k);
    let rows = OP.rows("logits", logits, experts)?;
    OP.dtype("logits", logits, DType::F32)?;
    let mut ids = vec![0; rows * top_k];
    let mut weights = vec![0.0; rows * top_k];
    if backend == Backend::Composed {
        let exps = logits.broadcast_sub(&logits.max_keepdim(D::Minus1)?)?.exp()?;
        let p = exps.broadcast_div(&exps.sum_keepdim(D::Minus1)?)?;
        let chosen = ids.chunks_exact_mut(top_k).zip(weights.chunks_exact_mut(top_k));
        for (p, (ids, weights)) in p.to_vec2::<f32>()?.iter().zip(chosen) {
            choose(shape, p, ids, weights);
        }
    } else {
        let held = OP.hold("logits", logits)?;
        let logits = held.f32()?;
        let (to_ids, to_weights) = (Shared::new(&mut ids), Shared::new(&mut weights));
        let isa = simd::isa();
        pool::for_each(rows, 16 * logits.len(), &|row| {
            let logits = &logits[row * experts..(row + 1) * experts];
            let chosen = row * top_k..(row + 1) * top_k;
            // SAFETY: one task a row, and rows do not overlap.
            let (ids, weights) = unsafe { (to_ids.part(chosen.clone()), to_weights.part(chosen)) };
            pool::with_scratch(experts, |p| {
                simd::run(isa, Softmax { logits, p });
                choose(shape, p, ids, weights);
            });
        });
    }
    Ok(Routes {
        top_k,
        experts,
        ids,
        weights,
    })
}

/// The experts of one row, and their weights.
fn choose(shape: &MoeShape, p: &[f32], ids: &mut [u32], weights: &mut [f32]) {
    let mut order: Vec<u32> = (0..p.len() as u32).collect();
    if ids.len() < order.len() {
        // No two are equal in this order, so what comes first does not depend on how it is found. What is no number has its
        // place in it too.
        order.select_nth_unstable_by(ids.len(), |&a, &b| {
            p[b as usize].total_cmp(&p[a as usize]).then(a.cmp(&b))
        });
    }
    ids.copy_from_slice(&order[..ids.len()]);
    ids.sort_unstable();
    for (weight, id) in weights.iter_mut().zip(&*ids) {
        *weight = p[*id as usize];
    }
    if shape.renormalize {
        let sum: f32 = weights.iter().sum();
        weights.iter_mut().for_each(|weight| *weight /= sum);
    }
}
