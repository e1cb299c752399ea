//! Linear layers.

mod codes;
mod floats;
mod format;
mod groups;
mod kernel;
mod lines;
mod part;
mod rounding;
mod rows;
mod scales;
mod sink;
mod steps;

use candle_core::{DType, Tensor};
use recant_core::Candidate;

use crate::pool::{self, Shared, Unwritten};
use crate::simd;
use crate::tensors::{tensor, Held, Op};
use crate::{Backend, Error, Result};

pub use format::{ActivationPrecision, Coding, GroupFormat, GroupWeights};
pub use steps::GroupScales;

pub(crate) use lines::Lines;

use kernel::Task;
use part::{Inputs, Part};
use sink::Sink;

const OP: Op = Op("linear");

/// Most tiles of a run.
const MOST_TILES: usize = 16;

/// Tasks that each thread is to have where a task keeps a list of its own.
const TASKS_A_THREAD: usize = 4;

/// A weight matrix as a checkpoint has it.
#[derive(Debug, Clone)]
pub enum Weight {
    /// `[out, in]`, f32, bf16 or f16.
    Float(Tensor),
    /// 8 or 4 bits a weight, in groups.
    Groups(GroupWeights),
}

impl From<Tensor> for Weight {
    fn from(tensor: Tensor) -> Self {
        Self::Float(tensor)
    }
}

impl From<&Tensor> for Weight {
    fn from(tensor: &Tensor) -> Self {
        Self::Float(tensor.clone())
    }
}

impl From<GroupWeights> for Weight {
    fn from(weights: GroupWeights) -> Self {
        Self::Groups(weights)
    }
}

impl From<&Self> for Weight {
    fn from(weight: &Self) -> Self {
        weight.clone()
    }
}

/// One weight matrix, or several stacked by output row, and a bias if there is one.
///
/// On [`Backend::Cpu`] the weights are held once, in their own type and in the kernel's order; a row of the result does
/// not depend on the rows beside it. 48 rows read the weights from memory once, and 12 of them, or 6 without AVX-512, from the
/// first-level cache.
pub struct Linear {
    weights: Weights,
    bias: Option<Tensor>,
    in_features: usize,
    out_features: usize,
}

enum Weights {
    Packed(Vec<Part>),
    /// `[out, in]`
    Plain(Tensor),
}

impl std::fmt::Debug for Linear {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Linear")
            .field("in_features", &self.in_features)
            .field("out_features", &self.out_features)
            .field("bytes", &self.bytes())
            .field("bias", &self.bias.is_some())
            .finish_non_exhaustive()
    }
}

impl Linear {
    /// Takes weights by copy.
    ///
    /// # Shapes
    /// `parts`: each `[n_i, in]`, of any type; they are stacked, so `out` is the sum of all `n_i`. `bias`: `[out]`, f32,
    /// bf16 or f16, used as f32. [`Backend::Composed`] holds 8- and 4-bit weights as f32.
    ///
    /// # Errors
    /// No parts, no elements, other shapes or types; for [`Backend::Cpu`] also another device, or a part that is not
    /// contiguous.
    pub fn new<W: Into<Weight>>(
        backend: Backend,
        parts: impl IntoIterator<Item = W>,
        bias: Option<&Tensor>,
    ) -> Result<Self> {
        let parts: Vec<Weight> = parts.into_iter().map(Into::into).collect();
        let first = match parts.first() {
            Some(Weight::Float(weight)) => weight,
            Some(Weight::Groups(weights)) => &weights.quants,
            None => return Err(OP.value("no weight was given")),
        };
        let in_features = match (&parts[0], first.dims()) {
            (Weight::Float(_), &[_, in_features]) if in_features > 0 => in_features,
            (Weight::Groups(weights), _) => weights.in_features(),
            _ => return Err(OP.shape_error("weight", first, "[out, in] with in > 0".to_owned())),
        };
        let mut out_features = 0;
        for part in &parts {
            out_features += match part {
                Weight::Float(weight) => {
                    OP.float("weight", weight)?;
                    if backend == Backend::Cpu {
                        OP.readable("weight", weight)?;
                    }
                    OP.rows("weight", weight, in_features)?
                }
                Weight::Groups(weights) if weights.in_features() == in_features => weights.out_features(),
                Weight::Groups(weights) => {
                    return Err(OP.value(format!(
                        "a part of {} input features beside one of {in_features}",
                        weights.in_features()
                    )))
                }
            };
        }
        if out_features == 0 {
            return Err(OP.shape_error("weight", first, "[out, in] with out > 0".to_owned()));
        }
        let bias = match bias {
            Some(bias) => {
                OP.shape("bias", bias, &[out_features])?;
                Some(OP.weight(backend, "bias", bias)?)
            }
            None => None,
        };
        let weights = match backend {
            Backend::Cpu => Weights::Packed(Part::all(&parts, in_features)?),
            Backend::Composed => Weights::Plain(plain(&parts)?),
        };
        Ok(Self {
            weights,
            bias,
            in_features,
            out_features,
        })
    }

    /// `x W^T + bias`
    ///
    /// # Shapes
    /// `x`: `[rows, in]`, f32. Result: `[rows, out]`, f32.
    ///
    /// # Errors
    /// Another shape, type or device, or not contiguous.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let rows = OP.rows("x", x, self.in_features)?;
        OP.dtype("x", x, DType::F32)?;
        let parts = match &self.weights {
            Weights::Packed(parts) => parts,
            Weights::Plain(weight) => {
                let y = x.matmul(&weight.to_dtype(DType::F32)?.t()?)?;
                return Ok(match &self.bias {
                    Some(bias) => y.broadcast_add(bias)?,
                    None => y,
                });
            }
        };
        let width = self.out_features;
        let mut y = Unwritten::new(rows * width);
        let sink = Sink::All { y: y.shared(), width };
        self.run(parts, x, &sink, 1)?;
        // SAFETY: `run` gives the sink every output of every row.
        tensor(unsafe { y.written() }, &[rows, width])
    }

    /// What [`largest`](recant_core::largest) finds in the result of [`forward`](Self::forward), without writing it: of an
    /// output head the tokens to choose from.
    ///
    /// # Shapes
    /// `x`: `[rows, in]`, f32.
    ///
    /// # Errors
    /// Another shape, type or device, or not contiguous.
    pub fn largest(&self, x: &Tensor, count: usize, among: usize) -> Result<Vec<Vec<Candidate>>> {
        let rows = OP.rows("x", x, self.in_features)?;
        OP.dtype("x", x, DType::F32)?;
        let count = count.min(among).min(self.out_features);
        let Weights::Packed(parts) = &self.weights else {
            return Ok(recant_core::largest(&self.forward(x)?, count, among)?);
        };
        let tiles = tiles(parts);
        let tiles_each = (tiles / (TASKS_A_THREAD * rayon::current_num_threads())).clamp(1, MOST_TILES);
        let mut best = vec![Candidate::NONE; tiles.div_ceil(tiles_each) * rows * count];
        let sink = Sink::Largest {
            best: Shared::new(&mut best),
            rows,
            count,
            among,
        };
        self.run(parts, x, &sink, tiles_each)?;
        Ok((0..rows)
            .map(|row| sink::merge(&best, row, rows, count))
            .collect())
    }

    /// Gives `sink` all outputs, in tasks of so many tiles.
    fn run(&self, parts: &[Part], x: &Tensor, sink: &Sink<'_>, tiles_each: usize) -> Result<()> {
        let isa = simd::isa();
        let held = OP.hold("x", x)?;
        let x = held.f32()?;
        let bias = self
            .bias
            .as_ref()
            .map(|bias| OP.hold_f32("bias", bias))
            .transpose()?;
        let bias = bias.as_ref().map(Held::f32).transpose()?;
        // One row each thread puts into order for itself: that takes less time than to fetch what another thread has written.
        let shared: Vec<Inputs> = match x.len() == self.in_features {
            true => Vec::new(),
            false => parts.iter().map(|part| part.inputs(isa, x)).collect(),
        };
        let tasks = tiles(parts).div_ceil(tiles_each);
        let work = x.len() * self.out_features;
        pool::each_run(tasks, MOST_TILES / tiles_each, work, &|runs| {
            let mut own: Option<(usize, Inputs)> = None;
            for run in runs {
                let tiles = run.start * tiles_each..run.end * tiles_each;
                let (mut before, mut first) = (0, 0);
                for (index, part) in parts.iter().enumerate() {
                    let end = before + part.tiles();
                    let tiles = tiles.start.max(before)..tiles.end.min(end);
                    if !tiles.is_empty() {
                        let inputs = match (shared.get(index), &mut own) {
                            (Some(inputs), _) => inputs,
                            (None, Some((of, inputs))) if *of == index => inputs,
                            (None, own) => &own.insert((index, part.inputs(isa, x))).1,
                        };
                        let task = Task {
                            tiles: tiles.start - before..tiles.end - before,
                            number: run.start,
                            first,
                            bias,
                            sink,
                        };
                        part.run(isa, inputs, &task);
                    }
                    before = end;
                    first += part.out_features();
                }
            }
        });
        Ok(())
    }

    /// Rows of the weight: an embedding that shares its matrix with the output layer.
    ///
    /// # Shapes
    /// Result: `[ids, in]`, f32.
    ///
    /// # Errors
    /// An id that the weight has no row for.
    pub fn gather(&self, ids: &[u32]) -> Result<Tensor> {
        self.check_ids(ids)?;
        let parts = match &self.weights {
            Weights::Packed(parts) => parts,
            Weights::Plain(weight) => {
                let ids = Tensor::new(ids, weight.device())?;
                return Ok(weight.index_select(&ids, 0)?.to_dtype(DType::F32)?);
            }
        };
        let mut to = vec![0.0; ids.len() * self.in_features];
        for (&id, to) in ids.iter().zip(to.chunks_exact_mut(self.in_features)) {
            let mut row = id as usize;
            for part in parts {
                if row < part.out_features() {
                    part.row(row, to);
                    break;
                }
                row -= part.out_features();
            }
        }
        tensor(to, &[ids.len(), self.in_features])
    }

    /// A layer of some of the outputs, in the given order, each with the bits that it has in this one.
    ///
    /// # Errors
    /// No ids, an id that the weight has no row for, or a layer of several parts.
    pub fn select(&self, ids: &[u32]) -> Result<Self> {
        self.check_ids(ids)?;
        if ids.is_empty() {
            return Err(OP.value("no output was chosen"));
        }
        let weights = match &self.weights {
            Weights::Packed(parts) => match parts.as_slice() {
                [part] => Weights::Packed(vec![part.select(ids)]),
                parts => {
                    return Err(OP.value(format!("outputs chosen from {} parts; expected one", parts.len())))
                }
            },
            Weights::Plain(weight) => {
                let ids = Tensor::new(ids, weight.device())?;
                Weights::Plain(weight.index_select(&ids, 0)?)
            }
        };
        let bias = self
            .bias
            .as_ref()
            .map(|bias| bias.index_select(&Tensor::new(ids, bias.device())?, 0))
            .transpose()?;
        Ok(Self {
            weights,
            bias,
            in_features: self.in_features,
            out_features: ids.len(),
        })
    }

    fn check_ids(&self, ids: &[u32]) -> Result<()> {
        let rows = self.out_features;
        match ids.iter().find(|&&id| id as usize >= rows) {
            Some(&id) => Err(Error::Id { id, rows }),
            None => Ok(()),
        }
    }

    /// Columns of the weight.
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// Rows of the weight, of all parts together.
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Bytes held: the weight's own, up to 31 rows of padding a part, and the bias.
    pub fn bytes(&self) -> usize {
        let weights = match &self.weights {
            Weights::Packed(parts) => parts.iter().map(Part::bytes).sum(),
            Weights::Plain(weight) => weight.elem_count() * weight.dtype().size_in_bytes(),
        };
        weights
            + self
                .bias
                .as_ref()
                .map_or(0, |bias| bias.elem_count() * size_of::<f32>())
    }
}

/// Tiles of all parts.
fn tiles(parts: &[Part]) -> usize {
    parts.iter().map(Part::tiles).sum()
}

/// All parts as one matrix of candle's: of their own type if they share one, else in f32.
fn plain(parts: &[Weight]) -> Result<Tensor> {
    let tensors = parts
        .iter()
        .map(|part| match part {
            Weight::Float(weight) => Ok(weight.clone()),
            Weight::Groups(weights) => weights.dequantize(),
        })
        .collect::<Result<Vec<_>>>()?;
    let dtype = tensors[0].dtype();
    if tensors.iter().all(|tensor| tensor.dtype() == dtype) {
        return Ok(Tensor::cat(&tensors, 0)?.contiguous()?);
    }
    let wide = tensors
        .iter()
        .map(|tensor| tensor.to_dtype(DType::F32))
        .collect::<candle_core::Result<Vec<_>>>()?;
    Ok(Tensor::cat(&wide, 0)?.contiguous()?)
}
