//! Matrices as checkpoints hold them.

use candle_core::Tensor;

/// A matrix `[out, in]`, on the CPU.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Stored {
    /// `[out, in]`, f32, bf16 or f16.
    Float(Tensor),
    /// 8 or 4 bits a weight, in groups that share a scale.
    Groups(StoredGroups),
}

/// What the bits of a weight in a group stand for: a number that its group's scale is multiplied with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Coding {
    /// A whole number less `zero`.
    Whole {
        /// Bits of a number: 8 or 4.
        bits: usize,
        /// What stands for zero, or for the bias where there is one.
        zero: u8,
    },
    /// The entry of this table that four bits count.
    Table([i8; 16]),
    /// A byte of E4M3: a sign, four bits of exponent, three of mantissa, no infinities. The two that are no numbers, 0x7f and
    /// 0xff, do not occur.
    E4m3,
}

impl Coding {
    /// Of e2m1, every number doubled: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives are halves of whole numbers.
    pub(crate) const DOUBLE_E2M1: Self =
        Self::Table([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]);

    /// Bits of a weight.
    pub fn bits(self) -> usize {
        match self {
            Self::Whole { bits, .. } => bits,
            Self::Table(_) => 4,
            Self::E4m3 => 8,
        }
    }
}

/// A matrix of 8 or 4 bits a weight: `weight = scale * number + bias`, scale and bias of a group of input features.
#[derive(Debug, Clone)]
pub struct StoredGroups {
    /// What the bits of a weight stand for.
    pub coding: Coding,
    /// Input features that share a scale: 16 or a multiple of 32, up to a whole row.
    pub group: usize,
    /// `[out, in * bits / 8]`, u8: a row is one little-endian stream of bits, so of 4 bits the low half of a byte comes first.
    pub quants: Tensor,
    /// `[out, in / group]`, f32, f16 or bf16; with [`factors`](Self::factors) u8, whole numbers from -128 to 127 plus 128.
    pub scales: Tensor,
    /// `[out, in / group]`, of the type of the scales. None: zeros.
    pub biases: Option<Tensor>,
    /// What scales and biases are multiplied with, if they come in two levels, as those of k-quants do.
    pub factors: Option<Factors>,
}

/// Numbers that whole numbers are multiplied with to be scales and biases: `[out, in / run]`, f16, where a run has 1, 2, 4, 8 or
/// another power of two of groups. Products are exact in f32.
#[derive(Debug, Clone)]
pub struct Factors {
    /// Of scales.
    pub scales: Tensor,
    /// Of biases, where there are any.
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
                biases: groups.biases.as_ref().map(&mut f).transpose()?,
                factors: match &groups.factors {
                    Some(factors) => Some(Factors {
                        scales: f(&factors.scales)?,
                        biases: factors.biases.as_ref().map(&mut f).transpose()?,
                    }),
                    None => None,
                },
                ..*groups
            }),
        })
    }
}
