//! Scales and biases of groups as checkpoints store them.

use candle_core::{DType, Tensor};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::tensors::Held;
use crate::Result;

use super::format::OP;

/// What a byte of [`GroupScales::TwoLevel`] has for zero.
pub(super) const BYTE_ZERO: u8 = 128;

/// Scales, or biases, of the groups of a matrix `[out, in]`.
#[derive(Debug, Clone)]
pub enum GroupScales {
    /// As they are: `[out, in / group]`, f32, f16 or bf16.
    Plain(Tensor),
    /// Small whole numbers, times factors that runs of groups share, as k-quants of GGUF have them. The product is exact in f32,
    /// and so are results those of such scales in f32.
    TwoLevel {
        /// Whole numbers from -128 to 127, plus 128: `[out, in / group]`, u8.
        numbers: Tensor,
        /// `[out, in / run]`, f16. A run has 1, 2, 4, 8 or another power of two of groups.
        factors: Tensor,
    },
}

impl From<Tensor> for GroupScales {
    fn from(scales: Tensor) -> Self {
        Self::Plain(scales)
    }
}

impl GroupScales {
    /// The tensor of scales in one level.
    pub fn plain(&self) -> Option<&Tensor> {
        match self {
            Self::Plain(scales) => Some(scales),
            Self::TwoLevel { .. } => None,
        }
    }

    /// What has a number for each group.
    pub(super) fn numbers(&self) -> &Tensor {
        let (Self::Plain(numbers) | Self::TwoLevel { numbers, .. }) = self;
        numbers
    }

    /// Type of the numbers, and runs of a row: what is the same of weights that are packed as one matrix.
    pub(super) fn form(&self) -> (DType, usize) {
        match self {
            Self::Plain(scales) => (scales.dtype(), 0),
            Self::TwoLevel { numbers, factors } => (numbers.dtype(), factors.dims().last().map_or(0, |n| *n)),
        }
    }

    /// Refuses what kernels do not read.
    pub(super) fn check(&self, operand: &'static str, [out, groups]: [usize; 2]) -> Result<()> {
        OP.shape(operand, self.numbers(), &[out, groups])?;
        OP.readable(operand, self.numbers())?;
        let Self::TwoLevel { numbers, factors } = self else {
            return OP.float(operand, self.numbers());
        };
        OP.dtype(operand, numbers, DType::U8)?;
        let fits = |runs: usize| runs > 0 && groups.is_multiple_of(runs) && (groups / runs).is_power_of_two();
        match *factors.dims() {
            [rows, runs] if rows == out && fits(runs) => {}
            _ => {
                let expected = format!("[{out}, runs] with runs of 1, 2, 4, 8 ... of {groups} groups");
                return Err(OP.shape_error("factors", factors, expected));
            }
        }
        OP.dtype("factors", factors, DType::F16)?;
        OP.readable("factors", factors)
    }

    /// The products, a row after the other.
    pub(super) fn widen(&self) -> Result<Vec<f32>> {
        let flat = |x: &Tensor| -> Result<Vec<f32>> { Ok(x.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?) };
        let mut numbers = flat(self.numbers())?;
        if let Self::TwoLevel { factors, .. } = self {
            let factors = flat(factors)?;
            let run = (numbers.len() / factors.len().max(1)).max(1);
            for (numbers, factor) in numbers.chunks_mut(run).zip(factors) {
                for number in numbers {
                    *number = factor * (*number - f32::from(BYTE_ZERO));
                }
            }
        }
        Ok(numbers)
    }

    pub(super) fn hold(&self, operand: &'static str) -> Result<HeldSteps<'_>> {
        Ok(match self {
            Self::Plain(scales) => HeldSteps {
                dtype: scales.dtype(),
                numbers: OP.hold(operand, scales)?,
                factors: None,
                shift: 0,
            },
            Self::TwoLevel { numbers, factors } => HeldSteps {
                dtype: DType::U8,
                numbers: OP.hold_bytes(operand, numbers)?,
                factors: Some(OP.hold("factors", factors)?),
                shift: (numbers.dims()[1] / factors.dims()[1]).trailing_zeros(),
            },
        })
    }
}

/// [`GroupScales`], held for reading.
pub(super) struct HeldSteps<'a> {
    dtype: DType,
    numbers: Held<'a>,
    factors: Option<Held<'a>>,
    shift: u32,
}

impl HeldSteps<'_> {
    pub(super) fn steps(&self) -> Result<Steps<'_>> {
        Ok(Steps {
            numbers: Numbers::of(&self.numbers, self.dtype)?,
            factors: self.factors.as_ref().map(Held::slice).transpose()?,
            shift: self.shift,
        })
    }
}

/// The elements of [`GroupScales`].
#[derive(Clone, Copy)]
pub(super) struct Steps<'a> {
    pub(super) numbers: Numbers<'a>,
    pub(super) factors: Option<&'a [f16]>,
    /// A run has `1 << shift` groups.
    pub(super) shift: u32,
}

/// Numbers of one of the types that scales come in.
#[derive(Clone, Copy)]
pub(super) enum Numbers<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    Bf16(&'a [bf16]),
    /// Whole numbers plus [`BYTE_ZERO`].
    Bytes(&'a [u8]),
}

impl<'a> Numbers<'a> {
    pub(super) fn of(held: &'a Held<'_>, dtype: DType) -> Result<Self> {
        Ok(match dtype {
            DType::F16 => Self::F16(held.slice()?),
            DType::BF16 => Self::Bf16(held.slice()?),
            DType::U8 => Self::Bytes(held.slice()?),
            _ => Self::F32(held.slice()?),
        })
    }

    /// The numbers from `first` on, as many as `to` takes.
    pub(super) fn widen(self, first: usize, to: &mut [f32]) {
        let range = first..first + to.len();
        match self {
            Self::F32(x) => to.copy_from_slice(&x[range]),
            Self::F16(x) => x[range].convert_to_f32_slice(to),
            Self::Bf16(x) => x[range].convert_to_f32_slice(to),
            Self::Bytes(x) => {
                for (to, x) in to.iter_mut().zip(&x[range]) {
                    *to = f32::from(*x) - f32::from(BYTE_ZERO);
                }
            }
        }
    }

    pub(super) fn len(self) -> usize {
        match self {
            Self::F32(x) => x.len(),
            Self::F16(x) => x.len(),
            Self::Bf16(x) => x.len(),
            Self::Bytes(x) => x.len(),
        }
    }
}
