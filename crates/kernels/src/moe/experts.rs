//! The experts and their sum.

use std::sync::{Mutex, PoisonError};

use candle_core::{DType, Device, Tensor};

use crate::pool::{self, Shared};
use crate::simd;
use crate::tensors::{tensor, Op};
use crate::{Backend, Linear, Mlp, Result};

use super::kernel::WeightedSum;
use super::{MoeShape, Routes};

const OP: Op = Op("experts");

/// Experts, of which each row asks some.
#[derive(Debug)]
pub struct SparseExperts {
    backend: Backend,
    shape: MoeShape,
    experts: Vec<Mlp>,
}

impl SparseExperts {
    /// # Errors
    /// Another number of experts than the shape says, or one of another size.
    pub fn new(backend: Backend, shape: MoeShape, experts: Vec<Mlp>) -> Result<Self> {
        shape.check(OP)?;
        if experts.len() != shape.experts {
            return Err(OP.value(format!(
                "{} experts were given, expected {}",
                experts.len(),
                shape.experts
            )));
        }
        let size = |linear: &Linear| [linear.out_features(), linear.in_features()];
        let (gate_up, down) = (
            [2 * shape.width, shape.hidden_size],
            [shape.hidden_size, shape.width],
        );
        for (e, expert) in experts.iter().enumerate() {
            let found = (size(&expert.gate_up), size(&expert.down));
            if found != (gate_up, down) {
                return Err(OP.value(format!(
                    "expert {e} has gate and up of {:?} and down of {:?}, expected {gate_up:?} and {down:?}",
                    found.0, found.1
                )));
            }
        }
        Ok(Self {
            backend,
            shape,
            experts,
        })
    }

    /// Each row's experts' results times their weights, added in ascending order of the experts.
    ///
    /// # Shapes
    /// `x`: `[rows, hidden_size]`, f32. Result: the same.
    ///
    /// # Errors
    /// Another shape, type or device, not contiguous, or routes of other rows or another number of experts.
    pub fn forward(&self, x: &Tensor, routes: &Routes) -> Result<Tensor> {
        let rows = OP.rows("x", x, self.shape.hidden_size)?;
        OP.dtype("x", x, DType::F32)?;
        let found = (routes.rows(), routes.top_k, routes.experts);
        let expected = (rows, self.shape.top_k, self.shape.experts);
        if found != expected {
            return Err(OP.value(format!(
                "the routes are of {} rows to {} of {} experts, expected {} rows to {} of {}",
                found.0, found.1, found.2, expected.0, expected.1, expected.2
            )));
        }
        let groups = Groups::of(routes);
        match self.backend {
            Backend::Cpu => self.own(x, rows, routes, &groups),
            Backend::Composed => self.composed(x, routes, &groups),
        }
    }

    fn own(&self, x: &Tensor, rows: usize, routes: &Routes, groups: &Groups) -> Result<Tensor> {
        let (hidden, top_k) = (self.shape.hidden_size, self.shape.top_k);
        let held = OP.hold("x", x)?;
        let x = held.f32()?;
        let mut parts = vec![0.0; rows * top_k * hidden];
        let work = 3 * parts.len() * self.shape.width;
        let shared = Shared::new(&mut parts);
        let failed = Mutex::new(Ok(()));
        // A task is an expert, whole: its layers find the threads at work.
        pool::for_each(groups.active.len(), work, &|group| {
            let (expert, range) = groups.group(group);
            let mut gathered = Vec::with_capacity(range.len() * hidden);
            for pair in &groups.pairs[range.clone()] {
                let row = pair / top_k;
                gathered.extend_from_slice(&x[row * hidden..(row + 1) * hidden]);
            }
            // SAFETY: one task an expert, and the places of their results do not overlap.
            let to = unsafe { shared.part(range.start * hidden..range.end * hidden) };
            let run = || -> Result<()> {
                let x = tensor(gathered, &[range.len(), hidden])?;
                let y = self.experts[expert].forward(&x)?;
                to.copy_from_slice(OP.hold_f32("y", &y)?.f32()?);
                Ok(())
            };
            if let Err(error) = run() {
                *failed.lock().unwrap_or_else(PoisonError::into_inner) = Err(error);
            }
        });
        failed.into_inner().unwrap_or_else(PoisonError::into_inner)?;

        let mut y = vec![0.0; rows * hidden];
        let shared = Shared::new(&mut y);
        let isa = simd::isa();
        pool::for_each(rows, parts.len(), &|row| {
            let chosen = row * top_k..(row + 1) * top_k;
            let (weights, places) = (&routes.weights[chosen.clone()], &groups.places[chosen]);
            // SAFETY: one task a row, and rows do not overlap.
            let y = unsafe { shared.part(row * hidden..(row + 1) * hidden) };
            let parts = &parts;
            simd::run(
                isa,
                WeightedSum {
                    weights,
                    parts,
                    places,
                    y,
                },
            );
        });
        tensor(y, &[rows, hidden])
    }

    fn composed(&self, x: &Tensor, routes: &Routes, groups: &Groups) -> Result<Tensor> {
        let mut sum = x.zeros_like()?;
        for group in 0..groups.active.len() {
            let (expert, range) = groups.group(group);
            let pairs = &groups.pairs[range];
            let rows: Vec<u32> = pairs.iter().map(|pair| (pair / routes.top_k) as u32).collect();
            let weights: Vec<f32> = pairs.iter().map(|pair| routes.weights[*pair]).collect();
            let rows = Tensor::new(rows, &Device::Cpu)?.to_device(x.device())?;
            let weights = Tensor::new(weights, x.device())?.unsqueeze(1)?;
            let y = self.experts[expert].forward(&x.index_select(&rows, 0)?)?;
            sum = sum.index_add(&rows, &y.broadcast_mul(&weights)?, 0)?;
        }
        Ok(sum)
    }

    /// Bytes held: the weights' own, and up to 15 rows of padding a matrix.
    pub fn bytes(&self) -> usize {
        let bytes = |expert: &Mlp| expert.gate_up.bytes() + expert.down.bytes();
        self.experts.iter().map(bytes).sum()
    }
}

/// Pairs of a row and an expert, by expert. A pair is the index of its entry in the routes.
struct Groups {
    /// Experts that any row chose, ascending.
    active: Vec<usize>,
    /// Where the pairs of each of them begin, and where the last ones end.
    starts: Vec<usize>,
    pairs: Vec<usize>,
    /// Where in `pairs` a pair is.
    places: Vec<usize>,
}

impl Groups {
    fn of(routes: &Routes) -> Self {
        let mut next = vec![0; routes.experts];
        for id in &routes.ids {
            next[*id as usize] += 1;
        }
        let (mut active, mut starts, mut end) = (Vec::new(), vec![0], 0);
        for (expert, next) in next.iter_mut().enumerate() {
            let count = std::mem::replace(next, end);
            if count > 0 {
                end += count;
                active.push(expert);
                starts.push(end);
            }
        }
        let mut pairs = vec![0; routes.ids.len()];
        let mut places = pairs.clone();
        for (pair, id) in routes.ids.iter().enumerate() {
            let place = &mut next[*id as usize];
            pairs[*place] = pair;
            places[pair] = *place;
            *place += 1;
        }
        Self {
            active,
            starts,
            pairs,
            places,
        }
    }

    /// The expert of a group, and where its pairs are.
    fn group(&self, group: usize) -> (usize, std::ops::Range<usize>) {
        (self.active[group], self.starts[group]..self.starts[group + 1])
    }
}
