//! Matrices as checkpoints hold them.

use candle_core::Tensor;

use crate::error::{Error, Result};

/// A matrix `[out, in]`, on the CPU.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Stored {
    /// `[out, in]`, f32, bf16 or f16.
    Float(Tensor),
    /// 8- or 4-bit numbers in groups that share a scale.
    Groups(StoredGroups),
}

/// A matrix of 8- or 4-bit numbers: `weight = scale * (q - zero) + bias`, scale and bias of a group of input features.
#[derive(Debug, Clone)]
pub struct StoredGroups {
    /// Bits of a number: 8 or 4.
    pub bits: usize,
    /// Input features that share a scale: 16 or a multiple of 32.
    pub group: usize,
    /// The number that stands for zero, or for the bias where there is one.
    pub zero: u8,
    /// `[out, in * bits / 8]`, u8: a row is one little-endian stream of bits, so of 4 bits the low half of a byte comes first.
    pub quants: Tensor,
    /// `[out, in / group]`, f32, f16 or bf16.
    pub scales: Tensor,
    /// `[out, in / group]`, of the type of the scales. None: zeros.
    pub biases: Option<Tensor>,
}

impl Stored {
    /// Applies to each tensor of the matrix what moves, selects or splits rows (the first dimension) and leaves what is in a
    /// row alone.
    ///
    /// # Errors
    /// What `f` says.
    pub fn map_rows(
        &self,
        mut f: impl FnMut(&Tensor) -> candle_core::Result<Tensor>,
    ) -> candle_core::Result<Self> {
        Ok(match self {
            Self::Float(tensor) => Self::Float(f(tensor)?),
            Self::Groups(groups) => Self::Groups(StoredGroups {
                quants: f(&groups.quants)?,
                scales: f(&groups.scales)?,
                biases: groups.biases.as_ref().map(f).transpose()?,
                ..*groups
            }),
        })
    }

    /// The matrices of a stack, whose tensors all have one more dimension in front.
    pub(crate) fn unstacked(&self, name: &str) -> Result<Vec<Self>> {
        let count = match self {
            Self::Float(tensor) => tensor.dims()[0],
            Self::Groups(groups) => groups.scales.dims()[0],
        };
        (0..count)
            .map(|i| self.map_rows(|tensor| tensor.get(i)))
            .collect::<candle_core::Result<_>>()
            .map_err(|source| Error::Tensor {
                tensor: name.to_owned(),
                source: source.into(),
            })
    }
}
