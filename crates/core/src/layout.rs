//! The shapes of a model's caches, which also tell one model's caches from another's.

use std::fmt;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};

use crate::{RecordSlice, Result};

/// Shape of one attention layer's keys and values: a token's row is `[kv_heads, head_dim]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttentionLayout {
    /// Key/value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Type of the keys and values that the layer appends. A cache may store them in another.
    pub dtype: DType,
}

/// Type in which an attention cache stores keys and values.
///
/// A narrower one halves what they take, and what attention reads at a long context. A row is rounded once, to nearest,
/// when it is appended, and from then on every query reads the rounded row, that of its own token included: so results
/// differ from those with f32, and keep the grouping law as those do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum KvType {
    /// As the layer gives them, which is f32 in the models of this workspace: nothing is rounded.
    #[default]
    Native,
    /// 16 bits, of which 11 are of precision. What is beyond 65,504 becomes infinite.
    F16,
    /// 16 bits, of which 8 are of precision, with the range of f32.
    Bf16,
}

impl KvType {
    /// The type of stored rows, of a layer that appends rows of type `native`.
    pub fn of(self, native: DType) -> DType {
        match self {
            Self::Native => native,
            Self::F16 => DType::F16,
            Self::Bf16 => DType::BF16,
        }
    }
}

/// Name, shape and type of an array.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArraySpec {
    /// Name, unique in its layer.
    pub name: &'static str,
    /// Shape; for a record, that of one token.
    pub shape: Vec<usize>,
    /// Type.
    pub dtype: DType,
}

impl ArraySpec {
    /// Bytes of one such array.
    pub fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.size_in_bytes()
    }

    /// Refuses a tensor of another shape or type. `leading` is the number of rows in front of the shape, if it has any.
    pub fn check(&self, tensor: &Tensor, leading: Option<usize>) -> Result<()> {
        let dims = tensor.dims();
        let (rows, inner) = dims.split_at(dims.len().min(leading.iter().len()));
        if rows != leading.as_slice() || inner != self.shape || tensor.dtype() != self.dtype {
            let expected: Vec<usize> = leading.iter().chain(&self.shape).copied().collect();
            return Err(crate::Error::mismatch(
                format!("array `{}`", self.name),
                format!("{:?} of {expected:?}", self.dtype),
                format!("{:?} of {dims:?}", tensor.dtype()),
            ));
        }
        Ok(())
    }
}

/// Folds records into the arrays of a recurrent layer.
///
/// The result must be, bit for bit, what the layer's own step leaves after the same tokens.
pub trait Fold: Send + Sync {
    /// The arrays after the records were folded in, in order. `arrays` are not written to, and the result shares no
    /// storage with them.
    fn fold(&self, arrays: &[Tensor], records: &[RecordSlice]) -> Result<Vec<Tensor>>;
}

/// Arrays and records of one recurrent layer.
#[derive(Clone)]
pub struct RecurrentLayout {
    /// The state: all zero before the first token.
    pub arrays: Vec<ArraySpec>,
    /// What is kept for each token that may have to be taken back.
    pub records: Vec<ArraySpec>,
    /// How records become state.
    pub fold: Arc<dyn Fold>,
}

impl fmt::Debug for RecurrentLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecurrentLayout")
            .field("arrays", &self.arrays)
            .field("records", &self.records)
            .finish_non_exhaustive()
    }
}

impl PartialEq for RecurrentLayout {
    fn eq(&self, other: &Self) -> bool {
        self.arrays == other.arrays && self.records == other.records
    }
}

impl Eq for RecurrentLayout {}

/// What one layer needs to be cached in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LayerLayout {
    /// Keys and values.
    Attention(AttentionLayout),
    /// Arrays that fold all tokens in.
    Recurrent(RecurrentLayout),
}

impl LayerLayout {
    /// `attention` or `recurrent`, for messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Attention(_) => "attention",
            Self::Recurrent(_) => "recurrent",
        }
    }
}

/// The caches of one model: its layers' layouts, and the model they belong to.
///
/// Two layouts are equal when the models' fingerprints and all layers are; a model refuses caches of another layout.
#[derive(Debug, Clone)]
pub struct StackLayout {
    /// Identity of the weights. Two checkpoints of equal shape differ in it.
    pub fingerprint: String,
    /// One entry a layer.
    pub layers: Vec<LayerLayout>,
    /// Where the arrays live.
    pub device: Device,
}

impl PartialEq for StackLayout {
    fn eq(&self, other: &Self) -> bool {
        self.fingerprint == other.fingerprint
            && self.layers == other.layers
            && self.device.same_device(&other.device)
    }
}
