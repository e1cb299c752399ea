//! How wide a weight is.

use clap::ValueEnum;
use recant::candle::DType;
use recant::{ActivationPrecision, GroupFormat, LoadOptions};

/// Weights that share a scale.
const GROUP: usize = 32;

/// What matrices are stored as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Width {
    /// As checkpoints are published.
    Bf16,
    /// Signed bytes, 32 with an f16 scale, as GGUF's Q8_0.
    Int8,
    /// Half bytes, 32 with an f16 scale, as GGUF's Q4_0.
    Int4,
}

impl Width {
    pub(crate) const ALL: [Self; 3] = [Self::Bf16, Self::Int8, Self::Int4];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
        }
    }

    fn format(self) -> Option<GroupFormat> {
        let bits = match self {
            Self::Bf16 => return None,
            Self::Int8 => 8,
            Self::Int4 => 4,
        };
        Some(GroupFormat {
            bits,
            group: GROUP,
            affine: false,
            scales: DType::F16,
        })
    }

    /// How a model of this width is loaded.
    pub(crate) fn options(self, activations: ActivationPrecision) -> LoadOptions {
        LoadOptions {
            quantize: self.format(),
            activations,
            ..LoadOptions::default()
        }
    }

    /// Bytes of a matrix of so many weights, scales included.
    pub(crate) fn bytes(self, weights: usize) -> usize {
        match self.format() {
            None => weights * DType::BF16.size_in_bytes(),
            Some(format) => {
                weights * format.bits / 8 + weights / format.group * format.scales.size_in_bytes()
            }
        }
    }
}
