//! Linear layers.

mod kernel;
mod packed;

use candle_core::{DType, Tensor};
use half::{bf16, f16};

use crate::simd;
use crate::tensors::{tensor, Held, Op};
use crate::{Backend, Error, Result};

use packed::{Element, Packed};

const OP: Op = Op("linear");

/// One weight matrix, or several stacked by output row, and a bias if there is one.
///
/// On [`Backend::Cpu`] the weights are held once, in their own type and in the kernel's order; a row of the result does
/// not depend on the rows beside it. Up to 16 rows read the weights from memory once.
pub struct Linear {
    weights: Weights,
    bias: Option<Tensor>,
    in_features: usize,
    out_features: usize,
}

enum Weights {
    F32(Packed<f32>),
    Bf16(Packed<bf16>),
    F16(Packed<f16>),
    /// `[out, in]`
    Plain(Tensor),
}

impl std::fmt::Debug for Linear {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Linear")
            .field("in_features", &self.in_features)
            .field("out_features", &self.out_features)
            .field("dtype", &self.dtype())
            .field("bias", &self.bias.is_some())
            .finish_non_exhaustive()
    }
}

impl Linear {
    /// Takes weights by copy.
    ///
    /// # Shapes
    /// `parts`: each `[n_i, in]`, f32, bf16 or f16; they are stacked, so `out` is the sum of all `n_i`. Parts of
    /// different types are all widened to f32. `bias`: `[out]`, any of these types, used as f32.
    ///
    /// # Errors
    /// No parts, no elements, other shapes or types; for [`Backend::Cpu`] also another device, or a part that is not
    /// contiguous.
    pub fn new(backend: Backend, parts: &[Tensor], bias: Option<&Tensor>) -> Result<Self> {
        let first = parts.first().ok_or_else(|| OP.value("no weight was given"))?;
        let in_features = match *first.dims() {
            [_, in_features] if in_features > 0 => in_features,
            _ => return Err(OP.shape_error("weight", first, "[out, in] with in > 0".to_owned())),
        };
        let mut out_features = 0;
        for part in parts {
            out_features += OP.rows("weight", part, in_features)?;
            OP.float("weight", part)?;
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
        let dtype = match first.dtype() {
            dtype if parts.iter().all(|part| part.dtype() == dtype) => dtype,
            _ => DType::F32,
        };
        let mut same = Vec::with_capacity(parts.len());
        for part in parts {
            if backend == Backend::Cpu {
                OP.readable("weight", part)?;
            }
            same.push(part.to_dtype(dtype)?);
        }
        let weights = match (backend, dtype) {
            (Backend::Composed, _) => Weights::Plain(Tensor::cat(&same, 0)?.contiguous()?),
            (Backend::Cpu, DType::BF16) => Weights::Bf16(pack(&same, in_features)?),
            (Backend::Cpu, DType::F16) => Weights::F16(pack(&same, in_features)?),
            (Backend::Cpu, _) => Weights::F32(pack(&same, in_features)?),
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
        if let Weights::Plain(weight) = &self.weights {
            let y = x.matmul(&weight.to_dtype(DType::F32)?.t()?)?;
            return Ok(match &self.bias {
                Some(bias) => y.broadcast_add(bias)?,
                None => y,
            });
        }
        let held = OP.hold("x", x)?;
        let bias = self
            .bias
            .as_ref()
            .map(|bias| OP.hold_f32("bias", bias))
            .transpose()?;
        let bias = bias.as_ref().map(Held::f32).transpose()?;
        let x = held.f32()?;
        let mut y = vec![0.0; rows * self.out_features];
        let isa = simd::isa();
        match &self.weights {
            Weights::F32(weight) => kernel::forward(isa, weight, bias, x, &mut y),
            Weights::Bf16(weight) => kernel::forward(isa, weight, bias, x, &mut y),
            Weights::F16(weight) => kernel::forward(isa, weight, bias, x, &mut y),
            Weights::Plain(_) => {}
        }
        tensor(y, &[rows, self.out_features])
    }

    /// Rows of the weight: an embedding that shares its matrix with the output layer.
    ///
    /// # Shapes
    /// Result: `[ids, in]`, f32.
    ///
    /// # Errors
    /// An id that the weight has no row for.
    pub fn gather(&self, ids: &[u32]) -> Result<Tensor> {
        let rows = self.out_features;
        if let Some(&id) = ids.iter().find(|&&id| id as usize >= rows) {
            return Err(Error::Id { id, rows });
        }
        if let Weights::Plain(weight) = &self.weights {
            let ids = Tensor::new(ids, weight.device())?;
            return Ok(weight.index_select(&ids, 0)?.to_dtype(DType::F32)?);
        }
        let mut to = vec![0.0; ids.len() * self.in_features];
        for (&id, to) in ids.iter().zip(to.chunks_exact_mut(self.in_features)) {
            match &self.weights {
                Weights::F32(weight) => weight.row(id as usize, to),
                Weights::Bf16(weight) => weight.row(id as usize, to),
                Weights::F16(weight) => weight.row(id as usize, to),
                Weights::Plain(_) => {}
            }
        }
        tensor(to, &[ids.len(), self.in_features])
    }

    /// Columns of the weight.
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// Rows of the weight, of all parts together.
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Type that the weight is held in.
    pub fn dtype(&self) -> DType {
        match &self.weights {
            Weights::F32(_) => DType::F32,
            Weights::Bf16(_) => DType::BF16,
            Weights::F16(_) => DType::F16,
            Weights::Plain(weight) => weight.dtype(),
        }
    }

    /// Bytes held: the weight's own, up to 15 rows of padding, and the bias.
    pub fn bytes(&self) -> usize {
        let weights = match &self.weights {
            Weights::F32(weight) => weight.bytes(),
            Weights::Bf16(weight) => weight.bytes(),
            Weights::F16(weight) => weight.bytes(),
            Weights::Plain(weight) => weight.elem_count() * weight.dtype().size_in_bytes(),
        };
        weights
            + self
                .bias
                .as_ref()
                .map_or(0, |bias| bias.elem_count() * size_of::<f32>())
    }
}

fn pack<T: Element>(parts: &[Tensor], in_features: usize) -> Result<Packed<T>> {
    let held = parts
        .iter()
        .map(|part| OP.hold("weight", part))
        .collect::<Result<Vec<_>>>()?;
    let slices = held.iter().map(Held::slice::<T>).collect::<Result<Vec<_>>>()?;
    Ok(Packed::new(&slices, in_features))
}
