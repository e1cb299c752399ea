//! The packed matrices of a layer, by kind.

use candle_core::{DType, Tensor};
use half::{bf16, f16};

use crate::pool;
use crate::simd::{self, Isa};
use crate::tensors::Held;
use crate::Result;

use super::codes::{Bytes, E4m3, Nibbles};
use super::floats::{Element, Floats};
use super::format::{Coding, HeldGroups};
use super::groups::{ByBytes, ByNibbles, ByTable, Full, Packed, Whole};
use super::kernel::{self, Columns, Matrix, Task, TILE};
use super::rows::{ByteRows, FloatRows, Grouping};
use super::{ActivationPrecision, Weight, OP};

/// Neighbours of one kind, packed as one matrix.
pub(super) struct Part {
    kind: Kind,
    /// Of groups; floats are always multiplied in full.
    activations: ActivationPrecision,
    in_features: usize,
}

enum Kind {
    F32(Floats<f32>),
    Bf16(Floats<bf16>),
    F16(Floats<f16>),
    Bytes(Packed<Bytes>),
    Nibbles(Packed<Nibbles>),
    E4m3(Packed<E4m3>),
}

/// Activations as a part reads them.
pub(super) struct Inputs {
    grouping: Grouping,
    rows: Rows,
}

enum Rows {
    Floats(FloatRows),
    Bytes(ByteRows),
}

/// Runs `$body` with the part's matrix, whatever its kind.
macro_rules! each {
    ($kind:expr, $matrix:ident => $body:expr) => {
        match $kind {
            Kind::F32($matrix) => $body,
            Kind::Bf16($matrix) => $body,
            Kind::F16($matrix) => $body,
            Kind::Bytes($matrix) => $body,
            Kind::Nibbles($matrix) => $body,
            Kind::E4m3($matrix) => $body,
        }
    };
}

impl Part {
    /// Packs weights, neighbours of one kind together.
    pub(super) fn all(weights: &[Weight], in_features: usize) -> Result<Vec<Self>> {
        weights
            .chunk_by(alike)
            .map(|run| Self::new(run, in_features))
            .collect()
    }

    fn new(run: &[Weight], in_features: usize) -> Result<Self> {
        let (kind, activations) = match &run[0] {
            Weight::Float(first) => {
                let tensors: Vec<&Tensor> = run
                    .iter()
                    .filter_map(|weight| match weight {
                        Weight::Float(tensor) => Some(tensor),
                        Weight::Groups(_) => None,
                    })
                    .collect();
                let kind = match first.dtype() {
                    DType::BF16 => Kind::Bf16(floats(&tensors, in_features)?),
                    DType::F16 => Kind::F16(floats(&tensors, in_features)?),
                    _ => Kind::F32(floats(&tensors, in_features)?),
                };
                (kind, ActivationPrecision::Full)
            }
            Weight::Groups(first) => {
                let held = run
                    .iter()
                    .filter_map(|weight| match weight {
                        Weight::Float(_) => None,
                        Weight::Groups(weights) => Some(weights.hold()),
                    })
                    .collect::<Result<Vec<_>>>()?;
                let groups = held.iter().map(HeldGroups::groups).collect::<Result<Vec<_>>>()?;
                let groups: Vec<_> = groups.iter().collect();
                let kind = match first.coding {
                    Coding::Whole { bits: 8, zero } => Kind::Bytes(Packed::new(Bytes::new(zero), &groups)),
                    Coding::Whole { zero, .. } => Kind::Nibbles(Packed::new(Nibbles::whole(zero), &groups)),
                    Coding::Table(table) => Kind::Nibbles(Packed::new(Nibbles::looked_up(table), &groups)),
                    Coding::E4m3 => Kind::E4m3(Packed::new(E4m3, &groups)),
                };
                (kind, first.activations)
            }
        };
        Ok(Self {
            kind,
            activations,
            in_features,
        })
    }

    pub(super) fn out_features(&self) -> usize {
        each!(&self.kind, matrix => matrix.out_features())
    }

    pub(super) fn tiles(&self) -> usize {
        self.out_features().div_ceil(TILE)
    }

    pub(super) fn bytes(&self) -> usize {
        each!(&self.kind, matrix => matrix.bytes())
    }

    /// One output's weights.
    pub(super) fn row(&self, row: usize, to: &mut [f32]) {
        fn copy(from: impl Iterator<Item = f32>, to: &mut [f32]) {
            for (to, from) in to.iter_mut().zip(from) {
                *to = from;
            }
        }
        match &self.kind {
            Kind::F32(matrix) => copy(matrix.row(row), to),
            Kind::Bf16(matrix) => copy(matrix.row(row).map(Element::to_f32), to),
            Kind::F16(matrix) => copy(matrix.row(row).map(Element::to_f32), to),
            Kind::Bytes(matrix) => copy(matrix.row(row), to),
            Kind::Nibbles(matrix) => copy(matrix.row(row), to),
            Kind::E4m3(matrix) => copy(matrix.row(row), to),
        }
    }

    /// Some of the outputs.
    pub(super) fn select(&self, outputs: &[u32]) -> Self {
        let kind = match &self.kind {
            Kind::F32(matrix) => Kind::F32(matrix.select(outputs)),
            Kind::Bf16(matrix) => Kind::Bf16(matrix.select(outputs)),
            Kind::F16(matrix) => Kind::F16(matrix.select(outputs)),
            Kind::Bytes(matrix) => Kind::Bytes(matrix.select(outputs)),
            Kind::Nibbles(matrix) => Kind::Nibbles(matrix.select(outputs)),
            Kind::E4m3(matrix) => Kind::E4m3(matrix.select(outputs)),
        };
        Self { kind, ..*self }
    }

    /// Puts rows `x`, end to end, into the order in which the part reads them.
    pub(super) fn inputs(&self, isa: Isa, x: &[f32]) -> Inputs {
        let features = self.in_features;
        let grouping = Grouping::new(x.len() / features, isa.rows());
        let rows = match (&self.kind, self.activations) {
            (Kind::Bytes(matrix), ActivationPrecision::Int8) => {
                let start = matrix.code().start(isa.byte_offset());
                Rows::Bytes(ByteRows::new(isa, grouping, x, features, start, matrix.step()))
            }
            (Kind::Nibbles(matrix), ActivationPrecision::Int8) => {
                let start = matrix.code().start(isa.byte_offset());
                Rows::Bytes(ByteRows::new(isa, grouping, x, features, start, matrix.step()))
            }
            (kind, _) => {
                let step = match kind {
                    Kind::Bytes(matrix) => Some(matrix.step()),
                    Kind::Nibbles(matrix) => Some(matrix.step()),
                    Kind::E4m3(matrix) => Some(matrix.step()),
                    Kind::F32(_) | Kind::Bf16(_) | Kind::F16(_) => None,
                };
                Rows::Floats(FloatRows::new(grouping, x, features, step))
            }
        };
        Inputs { grouping, rows }
    }

    /// The outputs of some tiles.
    pub(super) fn run(&self, isa: Isa, inputs: &Inputs, task: &Task<'_>) {
        let grouping = inputs.grouping;
        match (&self.kind, &inputs.rows) {
            (Kind::F32(matrix), Rows::Floats(rows)) => columns(isa, matrix, rows, grouping, task),
            (Kind::Bf16(matrix), Rows::Floats(rows)) => columns(isa, matrix, rows, grouping, task),
            (Kind::F16(matrix), Rows::Floats(rows)) => columns(isa, matrix, rows, grouping, task),
            (Kind::Bytes(matrix), Rows::Floats(rows)) => columns(isa, &Full(matrix), rows, grouping, task),
            (Kind::Nibbles(matrix), Rows::Floats(rows)) => columns(isa, &Full(matrix), rows, grouping, task),
            (Kind::E4m3(matrix), Rows::Floats(rows)) => columns(isa, &Full(matrix), rows, grouping, task),
            (Kind::Bytes(matrix), Rows::Bytes(rows)) => {
                columns(isa, &Whole(matrix, ByBytes), rows, grouping, task);
            }
            (Kind::Nibbles(matrix), Rows::Bytes(rows)) => match matrix.code().table() {
                None => columns(isa, &Whole(matrix, ByNibbles), rows, grouping, task),
                Some(table) => columns(isa, &Whole(matrix, ByTable(table)), rows, grouping, task),
            },
            (Kind::F32(_) | Kind::Bf16(_) | Kind::F16(_) | Kind::E4m3(_), Rows::Bytes(_)) => {
                unreachable!("`inputs` rounds activations for whole numbers only")
            }
        }
    }
}

fn columns<M: Matrix>(isa: Isa, matrix: &M, rows: &M::Rows, grouping: Grouping, task: &Task<'_>) {
    let panel = kernel::panel(grouping);
    pool::with_scratch(panel * TILE, |scratch| {
        simd::run(
            isa,
            Columns {
                matrix,
                rows,
                grouping,
                task,
                totals: scratch.as_chunks_mut().0.as_chunks_mut().0,
            },
        );
    });
}

/// Whether two weights can be packed as one matrix.
fn alike(a: &Weight, b: &Weight) -> bool {
    match (a, b) {
        (Weight::Float(a), Weight::Float(b)) => a.dtype() == b.dtype(),
        (Weight::Groups(a), Weight::Groups(b)) => a.is_like(b),
        _ => false,
    }
}

fn floats<T: Element>(tensors: &[&Tensor], in_features: usize) -> Result<Floats<T>> {
    let held = tensors
        .iter()
        .map(|tensor| OP.hold("weight", tensor))
        .collect::<Result<Vec<_>>>()?;
    let slices = held.iter().map(Held::slice::<T>).collect::<Result<Vec<_>>>()?;
    let rows: Vec<&[T]> = slices
        .iter()
        .flat_map(|slice| slice.chunks_exact(in_features))
        .collect();
    Ok(Floats::new(&rows, in_features))
}
