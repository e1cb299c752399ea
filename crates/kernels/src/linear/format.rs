//! Weights of 8 and 4 bits as checkpoints store them.

use candle_core::{DType, Device, Tensor};
use half::f16;

use crate::tensors::{Held, Op};
use crate::Result;

use super::rows::CHUNK;
use super::steps::{GroupScales, HeldSteps, Steps};

pub(super) const OP: Op = Op("group weights");

/// How weights are rounded by [`GroupWeights::quantize`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupFormat {
    /// Bits of a weight: 8 or 4.
    pub bits: usize,
    /// Input features that share a scale: a multiple of 16. Multiples of 32 are faster.
    pub group: usize,
    /// Whether a group has a bias beside its scale. Without, zero is exact and a group's range is symmetric.
    pub affine: bool,
    /// Type of scales and biases: f32, f16 or bf16.
    pub scales: DType,
}

/// What activations are rounded to where they meet [`GroupWeights`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ActivationPrecision {
    /// To signed bytes, 32 of a row with a scale of their own: products are whole numbers, which is several times as fast.
    /// Weights of [`Coding::E4m3`] are no whole numbers and are multiplied as [`Full`](Self::Full) says.
    #[default]
    Int8,
    /// Not at all: f32.
    Full,
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
    /// 0xff, are read as 480 and -480; whoever loads weights is to refuse them.
    ///
    /// Activations are not rounded where they meet it, whatever their precision.
    E4m3,
}

impl Coding {
    /// Bits of a weight.
    pub fn bits(self) -> usize {
        match self {
            Self::Whole { bits, .. } => bits,
            Self::Table(_) => 4,
            Self::E4m3 => 8,
        }
    }

    /// What bits stand for.
    pub(super) fn number(self, q: u8) -> f32 {
        match self {
            Self::Whole { zero, .. } => f32::from(q) - f32::from(zero),
            Self::Table(table) => f32::from(table[usize::from(q & 15)]),
            Self::E4m3 => e4m3(q),
        }
    }
}

/// Read as f16, the bits are 2^-8 of the number, subnormal ones included.
fn e4m3(q: u8) -> f32 {
    let bits = (i16::from(q.cast_signed()) << 7).cast_unsigned() & 0xbfff;
    f16::from_bits(bits).to_f32() * 256.0
}

/// A weight matrix of 8 or 4 bits a weight: `weight = scale * number + bias`, scale and bias of a group of input features, and the
/// number what [`Coding`] says.
///
/// It holds without loss what MLX calls affine of 8 and 4 bits (`zero` 0, with biases), and GGUF's Q8_0 (`zero` 128, its signed
/// bytes plus 128), Q4_0 (`zero` 8), Q4_1 (`zero` 0, its minima as biases) and k-quants (scales and biases of
/// [two levels](GroupScales::TwoLevel)), once the order of the bits is the one below; with a
/// table GGUF's IQ4_NL and IQ4_XS, and mxfp4 and nvfp4, whose e2m1 doubled are whole numbers; and FP8, by row or in blocks, whose
/// scales are given for each row.
#[derive(Debug, Clone)]
pub struct GroupWeights {
    pub(super) coding: Coding,
    pub(super) group: usize,
    pub(super) quants: Tensor,
    pub(super) scales: GroupScales,
    pub(super) biases: Option<GroupScales>,
    pub(super) activations: ActivationPrecision,
}

/// The elements of [`GroupWeights`].
pub(super) struct Groups<'a> {
    pub(super) in_features: usize,
    pub(super) group: usize,
    pub(super) quants: &'a [u8],
    pub(super) scales: Steps<'a>,
    pub(super) biases: Option<Steps<'a>>,
}

impl Groups<'_> {
    pub(super) fn out_features(&self) -> usize {
        self.scales.numbers.len() / (self.in_features / self.group)
    }
}

impl GroupWeights {
    /// Weights from their parts.
    ///
    /// # Shapes
    /// `quants`: `[out, in * bits / 8]`, u8: a row is one little-endian stream of bits, so of 4 bits the low half of a byte
    /// comes first. `scales` and `biases`: a number for each row and group, as [`GroupScales`] says, both of one type and in as many
    /// levels. A group may be a whole row.
    ///
    /// # Errors
    /// Bits other than 4 and 8, a group that is no multiple of 16, input features that are no multiple of 32 or of the group, a zero that is no
    /// number of so many bits, another shape, type or device, or a tensor that is not contiguous.
    pub fn new(
        coding: Coding,
        group: usize,
        quants: Tensor,
        scales: impl Into<GroupScales>,
        biases: Option<GroupScales>,
    ) -> Result<Self> {
        let scales = scales.into();
        let bits = coding.bits();
        check(bits, group)?;
        if let Coding::Whole {
            bits: 4,
            zero: zero @ 16..,
        } = coding
        {
            return Err(OP.value(format!("a zero of {zero}, which is no number of 4 bits")));
        }
        let numbers = scales.numbers();
        let (out, groups) = match *numbers.dims() {
            [out, groups] if groups > 0 => (out, groups),
            _ => return Err(OP.shape_error("scales", numbers, "[out, in / group] with in > 0".to_owned())),
        };
        scales.check("scales", [out, groups])?;
        let features = groups
            .checked_mul(group)
            .filter(|features| features.checked_mul(bits).is_some())
            .ok_or_else(|| OP.value(format!("{groups} groups of {group} are too many features")))?;
        if !features.is_multiple_of(CHUNK) {
            return Err(OP.value(format!(
                "{groups} groups of {group} features; expected a multiple of {CHUNK} features"
            )));
        }
        let bytes = features * bits / 8;
        OP.shape("quants", &quants, &[out, bytes])?;
        OP.dtype("quants", &quants, DType::U8)?;
        OP.readable("quants", &quants)?;
        if let Some(biases) = &biases {
            OP.dtype("biases", biases.numbers(), numbers.dtype())?;
            biases.check("biases", [out, groups])?;
        }
        let new = Self {
            coding,
            group,
            quants,
            scales,
            biases,
            activations: ActivationPrecision::Full,
        };
        Ok(new.with_activations(ActivationPrecision::default()))
    }

    /// The same weights, to be multiplied with activations of another precision, if they can be.
    pub fn with_activations(self, activations: ActivationPrecision) -> Self {
        match self.coding {
            Coding::E4m3 => self,
            _ => Self { activations, ..self },
        }
    }

    /// The weights in f32: `[out, in]`.
    ///
    /// # Errors
    /// Memory for it.
    pub fn dequantize(&self) -> Result<Tensor> {
        let (out, features) = (self.out_features(), self.in_features());
        let quants = self.quants.flatten_all()?.to_vec1::<u8>()?;
        let scales = self.scales.widen()?;
        let biases = self.biases.as_ref().map(GroupScales::widen).transpose()?;
        let bits = self.coding.bits();
        let mask = ((1_u16 << bits) - 1) as u8;
        let weight = |i: usize| {
            let q = (quants[i * bits / 8] >> (i * bits % 8)) & mask;
            let number = self.coding.number(q);
            match &biases {
                Some(biases) => scales[i / self.group].mul_add(number, biases[i / self.group]),
                None => scales[i / self.group] * number,
            }
        };
        let weights: Vec<f32> = (0..out * features).map(weight).collect();
        Ok(Tensor::from_vec(weights, (out, features), &Device::Cpu)?)
    }

    /// Rows of the matrix.
    pub fn out_features(&self) -> usize {
        self.scales.numbers().dims()[0]
    }

    /// Columns of the matrix.
    pub fn in_features(&self) -> usize {
        self.scales.numbers().dims()[1] * self.group
    }

    /// What the bits of a weight stand for.
    pub fn coding(&self) -> Coding {
        self.coding
    }

    /// The bits of the weights: `[out, in * bits / 8]`, u8, as [`new`](Self::new) takes them.
    pub fn quants(&self) -> &Tensor {
        &self.quants
    }

    /// Scales of the groups.
    pub fn scales(&self) -> &GroupScales {
        &self.scales
    }

    /// Biases of the groups, if they have any, of the type of the scales.
    pub fn biases(&self) -> Option<&GroupScales> {
        self.biases.as_ref()
    }

    /// Whether both can be packed as one matrix.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        let kind = |x: &Self| {
            (
                x.coding,
                x.group,
                x.scales.form(),
                x.biases.as_ref().map(GroupScales::form),
                x.activations,
            )
        };
        kind(self) == kind(other)
    }

    /// Runs `f` on the elements.
    pub(super) fn hold(&self) -> Result<HeldGroups<'_>> {
        Ok(HeldGroups {
            of: self,
            quants: OP.hold_bytes("quants", &self.quants)?,
            scales: self.scales.hold("scales")?,
            biases: self
                .biases
                .as_ref()
                .map(|biases| biases.hold("biases"))
                .transpose()?,
        })
    }
}

/// The parts of [`GroupWeights`], held for reading.
pub(super) struct HeldGroups<'a> {
    of: &'a GroupWeights,
    quants: Held<'a>,
    scales: HeldSteps<'a>,
    biases: Option<HeldSteps<'a>>,
}

impl HeldGroups<'_> {
    pub(super) fn groups(&self) -> Result<Groups<'_>> {
        Ok(Groups {
            in_features: self.of.in_features(),
            group: self.of.group,
            quants: self.quants.slice()?,
            scales: self.scales.steps()?,
            biases: self.biases.as_ref().map(HeldSteps::steps).transpose()?,
        })
    }
}

pub(super) fn check(bits: usize, group: usize) -> Result<()> {
    if bits != 4 && bits != 8 {
        return Err(OP.value(format!("weights of {bits} bits; expected 4 or 8")));
    }
    if group == 0 || !group.is_multiple_of(CHUNK / 2) {
        return Err(OP.value(format!(
            "groups of {group} features; expected a multiple of {}",
            CHUNK / 2
        )));
    }
    Ok(())
}
