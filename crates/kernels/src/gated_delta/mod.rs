//! The gated delta rule: a linear attention layer from its projection to its output projection.

mod fold;
mod forward;
mod kernel;
mod states;
mod tile;

use std::sync::Arc;

use candle_core::{DType, Tensor};
use recant_core::{ArraySpec, RecordSlice, RecurrentLayout, RecurrentStep};

use crate::tensors::Op;
use crate::{composed, Backend, Result};

pub(crate) use tile::LEAST_SCALE;

const OP: Op = Op("gated_delta");

/// Sizes of a gated delta layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GatedDeltaShape {
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values. Value head `h` uses key head `h / (value_heads / key_heads)`.
    pub value_heads: usize,
    /// Width of a query or key.
    pub key_dim: usize,
    /// Width of a value.
    pub value_dim: usize,
    /// Rows that the causal convolution reads, the newest included.
    pub conv_kernel: usize,
    /// Added to the mean square in the output norm.
    pub eps: f64,
}

impl GatedDeltaShape {
    fn check(&self) -> Result<()> {
        let Self {
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            conv_kernel,
            ..
        } = *self;
        if [key_heads, value_heads, key_dim, value_dim].contains(&0) || value_heads % key_heads != 0 {
            return Err(OP.value(format!(
                "{value_heads} value heads of width {value_dim} over {key_heads} key heads of width {key_dim}; \
                 all must be at least 1, and the value heads a multiple of the key heads"
            )));
        }
        if conv_kernel < 2 {
            return Err(OP.value(format!(
                "a convolution over {conv_kernel} rows; there must be at least 2"
            )));
        }
        Ok(())
    }

    /// Value heads of a key head.
    pub(crate) fn group(&self) -> usize {
        self.value_heads / self.key_heads
    }

    /// Width of all queries, or of all keys.
    pub(crate) fn keys(&self) -> usize {
        self.key_heads * self.key_dim
    }

    /// Width of all values.
    pub(crate) fn values(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Channels of the convolution: queries, keys, values.
    pub(crate) fn channels(&self) -> usize {
        2 * self.keys() + self.values()
    }

    /// Width of the projection: channels, output gate z, b and a.
    pub(crate) fn projected(&self) -> usize {
        self.channels() + self.values() + 2 * self.value_heads
    }
}

/// One gated delta layer between its projections: convolution, gates, recurrence, norm and output gate.
///
/// For each value head and token, with `S` `[key_dim, value_dim]`: `S = g S; u = beta (v - S^T k); S = S + k u^T;
/// o = S^T q`. See [`GatedDelta::forward`].
///
/// `S` is held as one number of the head times a matrix, `S = c Z`, so that a decay costs no walk over the matrix:
/// `c = g c; u = beta (v - c Z^T k); Z = Z + k (u / c)^T; o = c Z^T q`. Where `g c` falls below 2^-32 it goes into the matrix,
/// `Z = g c Z; c = 1`, which depends on nothing but the tokens so far.
pub struct GatedDelta {
    backend: Backend,
    weights: Arc<Weights>,
    layout: RecurrentLayout,
}

/// What a layer was made of.
pub(crate) struct Weights {
    pub(crate) shape: GatedDeltaShape,
    /// `[conv_kernel, channels]`: a tap's weights side by side.
    pub(crate) conv: Tensor,
    /// `[value_heads]`
    pub(crate) a_log: Tensor,
    /// `[value_heads]`
    pub(crate) dt_bias: Tensor,
    /// `[value_dim]`
    pub(crate) norm: Tensor,
}

/// The rows of one sequence in a call.
#[derive(Debug)]
pub struct DeltaSegment {
    /// How many rows.
    pub rows: usize,
    /// Its state and pending records.
    pub step: RecurrentStep,
}

/// What a call gives.
#[derive(Debug)]
pub struct DeltaOutput {
    /// `[rows, value_heads * value_dim]`, f32: after norm and gate, before the output projection.
    pub mixed: Tensor,
    /// For each segment, what its cache takes back.
    pub segments: Vec<DeltaAdvance>,
}

/// What a cache takes back: the arguments of [`RecurrentCache::finish`](recant_core::RecurrentCache::finish).
#[derive(Debug)]
pub struct DeltaAdvance {
    /// `conv`, `state` and `scale`. With [`Backend::Cpu`] the state is the tensor that came in, written in place.
    pub arrays: Vec<Tensor>,
    /// `key`, `decay`, `update` and `input`, or nothing if the call was not recorded.
    pub records: Vec<Tensor>,
}

impl std::fmt::Debug for GatedDelta {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GatedDelta")
            .field("backend", &self.backend)
            .field("shape", &self.weights.shape)
            .finish_non_exhaustive()
    }
}

impl GatedDelta {
    /// A layer from its small weights, all held as f32.
    ///
    /// # Shapes
    /// `conv_weight`: `[channels, conv_kernel]`, where channels are `2 * key_heads * key_dim + value_heads * value_dim`
    /// and the last tap meets the newest row. `a_log`, `dt_bias`: `[value_heads]`. `norm`: `[value_dim]`, multiplied as
    /// it is. Each f32, bf16 or f16.
    ///
    /// # Errors
    /// Another shape, type or device, sizes that do not go together, or an `a_log` or `dt_bias` that is not a number.
    pub fn new(
        backend: Backend,
        shape: GatedDeltaShape,
        conv_weight: &Tensor,
        a_log: &Tensor,
        dt_bias: &Tensor,
        norm: &Tensor,
    ) -> Result<Self> {
        shape.check()?;
        OP.shape("conv_weight", conv_weight, &[shape.channels(), shape.conv_kernel])?;
        OP.shape("a_log", a_log, &[shape.value_heads])?;
        OP.shape("dt_bias", dt_bias, &[shape.value_heads])?;
        OP.shape("norm", norm, &[shape.value_dim])?;
        let weights = Weights {
            shape,
            conv: OP
                .weight(backend, "conv_weight", conv_weight)?
                .t()?
                .contiguous()?,
            a_log: OP.weight(backend, "a_log", a_log)?,
            dt_bias: OP.weight(backend, "dt_bias", dt_bias)?,
            norm: OP.weight(backend, "norm", norm)?,
        };
        for (operand, values) in [("a_log", &weights.a_log), ("dt_bias", &weights.dt_bias)] {
            if values.to_vec1::<f32>()?.iter().any(|x| x.is_nan()) {
                return Err(OP.value(format!("`{operand}` holds NaN; the checkpoint is damaged")));
            }
        }
        let array = |name, shape: &[usize]| ArraySpec {
            name,
            shape: shape.to_vec(),
            dtype: DType::F32,
        };
        let GatedDeltaShape {
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            ..
        } = shape;
        let layout = RecurrentLayout {
            arrays: vec![
                array("conv", &[shape.conv_kernel - 1, shape.channels()]),
                array("state", &[value_heads, key_dim, value_dim]),
                array("scale", &[value_heads]),
            ],
            records: vec![
                array("key", &[key_heads, key_dim]),
                array("decay", &[value_heads]),
                array("update", &[value_heads, value_dim]),
                array("input", &[shape.channels()]),
            ],
            fold: match backend {
                Backend::Cpu => Arc::new(fold::CpuFold { shape }),
                Backend::Composed => Arc::new(composed::DeltaFold { shape }),
            },
        };
        Ok(Self {
            backend,
            weights: Arc::new(weights),
            layout,
        })
    }

    /// State and records.
    ///
    /// # Shapes
    /// Arrays, f32: `conv` `[conv_kernel - 1, channels]`, the last rows before the convolution; `state`
    /// `[value_heads, key_dim, value_dim]` and `scale` `[value_heads]`, whose product is the recurrent state. Records a
    /// token, f32: `key` `[key_heads, key_dim]`, normed; `decay` `[value_heads]`, the factor g; `update`
    /// `[value_heads, value_dim]`, the u of the step; `input` `[channels]`, the row before the convolution. Its fold leaves,
    /// bit for bit, what the step does.
    pub fn layout(&self) -> RecurrentLayout {
        self.layout.clone()
    }

    /// Runs every segment's rows over its state.
    ///
    /// The state is read and, if the step writes, written once, whatever the number of rows: records in `fold` go into
    /// it for good, then those in `replay` into a working copy, on which the rows run. A recorded call leaves the
    /// working copy behind and gives records instead; one that is not recorded writes it back. With [`Backend::Cpu`] the
    /// `state` arrays are written in place; nothing else is, and [`Backend::Composed`] writes nothing in place.
    ///
    /// # Shapes
    /// `projected`: `[rows, channels | value_heads * value_dim (z) | value_heads (b) | value_heads (a)]`, f32, the
    /// segments' rows end to end.
    ///
    /// # Errors
    /// Another shape, type or device, not contiguous, or a state that shares storage with another operand. Nothing was
    /// written.
    pub fn forward(&self, projected: &Tensor, segments: &mut [DeltaSegment]) -> Result<DeltaOutput> {
        self.check(projected, segments)?;
        match self.backend {
            Backend::Cpu => forward::forward(&self.weights, projected, segments),
            Backend::Composed => composed::gated_delta(&self.weights, projected, segments),
        }
    }

    fn check(&self, projected: &Tensor, segments: &[DeltaSegment]) -> Result<()> {
        let shape = &self.weights.shape;
        let rows = OP.rows("projected", projected, shape.projected())?;
        OP.dtype("projected", projected, DType::F32)?;
        let sum = segments
            .iter()
            .try_fold(0_usize, |sum, segment| sum.checked_add(segment.rows));
        if sum != Some(rows) {
            let expected = format!("[rows, {}] with the segments' {sum:?} rows", shape.projected());
            return Err(OP.shape_error("projected", projected, expected));
        }
        for DeltaSegment { step, .. } in segments {
            check_fold(shape, &step.arrays, &step.fold)?;
            check_fold(shape, &step.arrays, &step.replay)?;
        }
        Ok(())
    }
}

/// Refuses what cannot be folded.
pub(crate) fn check_fold(shape: &GatedDeltaShape, arrays: &[Tensor], slices: &[RecordSlice]) -> Result<()> {
    check_arrays(shape, arrays)?;
    slices.iter().try_for_each(|slice| check_records(shape, slice))
}

/// Refuses arrays that are not `conv`, `state` and `scale`.
fn check_arrays(shape: &GatedDeltaShape, arrays: &[Tensor]) -> Result<()> {
    let [conv, state, scale] = arrays else {
        return Err(OP.value(format!(
            "{} arrays; expected `conv`, `state` and `scale`",
            arrays.len()
        )));
    };
    OP.shape("conv", conv, &[shape.conv_kernel - 1, shape.channels()])?;
    OP.shape(
        "state",
        state,
        &[shape.value_heads, shape.key_dim, shape.value_dim],
    )?;
    OP.shape("scale", scale, &[shape.value_heads])?;
    OP.dtype("conv", conv, DType::F32)?;
    OP.dtype("state", state, DType::F32)?;
    OP.dtype("scale", scale, DType::F32)
}

/// Refuses records that are not `key`, `decay`, `update` and `input` of at least as many rows as count.
fn check_records(shape: &GatedDeltaShape, slice: &RecordSlice) -> Result<()> {
    let [key, decay, update, input] = slice.arrays.as_slice() else {
        return Err(OP.value(format!(
            "records of {} arrays; expected `key`, `decay`, `update` and `input`",
            slice.arrays.len()
        )));
    };
    let rows = key.dims().first().copied().unwrap_or(0);
    if slice.rows.start > slice.rows.end || slice.rows.end > rows {
        return Err(OP.value(format!("rows {:?} of {rows} records", slice.rows)));
    }
    OP.shape("key", key, &[rows, shape.key_heads, shape.key_dim])?;
    OP.shape("decay", decay, &[rows, shape.value_heads])?;
    OP.shape("update", update, &[rows, shape.value_heads, shape.value_dim])?;
    OP.shape("input", input, &[rows, shape.channels()])?;
    for (operand, array) in [
        ("key", key),
        ("decay", decay),
        ("update", update),
        ("input", input),
    ] {
        OP.dtype(operand, array, DType::F32)?;
    }
    Ok(())
}
