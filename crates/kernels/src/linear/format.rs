//! Weights of 8 and 4 bits as checkpoints store them.

use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{DType, Device, Tensor};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::pool::{self, Shared};
use crate::simd::{self, Kernel, Simd};
use crate::tensors::{Held, Op};
use crate::Result;

use super::rows::CHUNK;

const OP: Op = Op("group weights");

/// How weights are rounded by [`GroupWeights::quantize`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupFormat {
    /// Bits of a weight: 8 or 4.
    pub bits: usize,
    /// Input features that share a scale: a multiple of 32.
    pub group: usize,
    /// Whether a group has a bias beside its scale. Without, zero is exact and a group's range is symmetric.
    pub affine: bool,
    /// Type of scales and biases: f32, f16 or bf16.
    pub scales: DType,
}

impl GroupFormat {
    /// The number that stands for zero, or 0 where there are biases.
    fn zero(self) -> u8 {
        if self.affine {
            0
        } else {
            1 << (self.bits - 1)
        }
    }

    /// A scale or a bias as it is stored.
    #[inline(always)]
    fn stored(self, x: f32) -> f32 {
        match self.scales {
            DType::F16 => f16::from_f32(x).to_f32(),
            DType::BF16 => bf16::from_f32(x).to_f32(),
            _ => x,
        }
    }
}

/// Rounds a row. It uses no operation of the instruction set; the compiler does.
struct Rounding<'a> {
    format: GroupFormat,
    weights: &'a [f32],
    quants: &'a mut [u8],
    /// Scales, as they are stored.
    steps: &'a mut [f32],
    /// Smallest weights, as they are stored.
    lows: &'a mut [f32],
}

impl Kernel for Rounding<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let GroupFormat {
            bits, group, affine, ..
        } = self.format;
        let most = ((1_u32 << bits) - 1) as f32;
        let zero = f32::from(self.format.zero());
        let weights = self.weights.chunks_exact(group);
        let quants = self.quants.chunks_exact_mut(group * bits / 8);
        for (((x, quants), step), low) in weights.zip(quants).zip(self.steps).zip(self.lows) {
            let least = x.iter().copied().fold(f32::INFINITY, f32::min);
            let greatest = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            // Weights are rounded to what the stored scales give, not to what they were before they were stored.
            *step = self.format.stored(if affine {
                (greatest - least) / most
            } else {
                least.abs().max(greatest.abs()) / (most - zero)
            });
            *low = self.format.stored(least);
            if *step == 0.0 {
                let zeros = if bits == 4 { 0x11 } else { 1 };
                quants.fill(self.format.zero() * zeros);
                continue;
            }
            let from = if affine { *low } else { 0.0 };
            let round = |x: f32| (((x - from) / *step).round_ties_even() + zero).clamp(0.0, most) as u8;
            if bits == 4 {
                for (byte, pair) in quants.iter_mut().zip(x.as_chunks::<2>().0) {
                    *byte = round(pair[0]) | round(pair[1]) << 4;
                }
            } else {
                for (byte, x) in quants.iter_mut().zip(x) {
                    *byte = round(*x);
                }
            }
        }
    }
}

/// What activations are rounded to where they meet [`GroupWeights`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ActivationPrecision {
    /// To signed bytes, 32 of a row with a scale of their own: products are whole numbers, which is several times as fast.
    #[default]
    Int8,
    /// Not at all: f32.
    Full,
}

/// A weight matrix of 8- or 4-bit numbers: `weight = scale * (q - zero) + bias`, scale and bias of a group of input features.
///
/// It holds without loss what MLX calls affine of 8 and 4 bits (`zero` 0, with biases), and GGUF's Q8_0 (`zero` 128, its signed
/// bytes plus 128), Q4_0 (`zero` 8) and Q4_1 (`zero` 0, its minima as biases), once the order of the bits is the one below.
#[derive(Debug, Clone)]
pub struct GroupWeights {
    pub(super) bits: usize,
    pub(super) group: usize,
    pub(super) zero: u8,
    pub(super) quants: Tensor,
    pub(super) scales: Tensor,
    pub(super) biases: Option<Tensor>,
    pub(super) activations: ActivationPrecision,
}

/// Numbers of one of the types that scales come in.
#[derive(Clone, Copy)]
pub(super) enum Numbers<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    Bf16(&'a [bf16]),
}

impl<'a> Numbers<'a> {
    fn of(held: &'a Held<'_>, dtype: DType) -> Result<Self> {
        Ok(match dtype {
            DType::F16 => Self::F16(held.slice()?),
            DType::BF16 => Self::Bf16(held.slice()?),
            _ => Self::F32(held.slice()?),
        })
    }

    /// The numbers from `first` on, as many as `to` takes.
    fn widen(self, first: usize, to: &mut [f32]) {
        let range = first..first + to.len();
        match self {
            Self::F32(x) => to.copy_from_slice(&x[range]),
            Self::F16(x) => x[range].convert_to_f32_slice(to),
            Self::Bf16(x) => x[range].convert_to_f32_slice(to),
        }
    }

    pub(super) fn f32(self) -> Option<&'a [f32]> {
        match self {
            Self::F32(x) => Some(x),
            _ => None,
        }
    }

    pub(super) fn f16(self) -> Option<&'a [f16]> {
        match self {
            Self::F16(x) => Some(x),
            _ => None,
        }
    }

    pub(super) fn bf16(self) -> Option<&'a [bf16]> {
        match self {
            Self::Bf16(x) => Some(x),
            _ => None,
        }
    }
}

/// The elements of [`GroupWeights`].
pub(super) struct Groups<'a> {
    pub(super) in_features: usize,
    pub(super) group: usize,
    pub(super) zero: u8,
    pub(super) quants: &'a [u8],
    pub(super) scales: Numbers<'a>,
    pub(super) biases: Option<Numbers<'a>>,
}

impl GroupWeights {
    /// Weights from their parts.
    ///
    /// # Shapes
    /// `quants`: `[out, in * bits / 8]`, u8: a row is one little-endian stream of bits, so of 4 bits the low half of a byte
    /// comes first. `scales` and `biases`: `[out, in / group]`, f32, f16 or bf16, both of one type.
    ///
    /// # Errors
    /// Bits other than 4 and 8, a group that is no multiple of 32 or does not divide the input features, a zero that is no
    /// number of so many bits, another shape, type or device, or a tensor that is not contiguous.
    pub fn new(
        bits: usize,
        group: usize,
        zero: u8,
        quants: Tensor,
        scales: Tensor,
        biases: Option<Tensor>,
    ) -> Result<Self> {
        check(bits, group)?;
        if bits == 4 && zero > 15 {
            return Err(OP.value(format!("a zero of {zero}, which is no number of 4 bits")));
        }
        let [out, groups] = *scales.dims() else {
            return Err(OP.shape_error("scales", &scales, "[out, in / group]".to_owned()));
        };
        if groups == 0 {
            return Err(OP.shape_error("scales", &scales, "[out, in / group] with in > 0".to_owned()));
        }
        OP.float("scales", &scales)?;
        OP.readable("scales", &scales)?;
        let bytes = groups
            .checked_mul(group)
            .and_then(|features| features.checked_mul(bits));
        let bytes =
            bytes.ok_or_else(|| OP.value(format!("{groups} groups of {group} are too many features")))? / 8;
        OP.shape("quants", &quants, &[out, bytes])?;
        OP.dtype("quants", &quants, DType::U8)?;
        OP.readable("quants", &quants)?;
        if let Some(biases) = &biases {
            OP.shape("biases", biases, &[out, groups])?;
            OP.dtype("biases", biases, scales.dtype())?;
            OP.readable("biases", biases)?;
        }
        Ok(Self {
            bits,
            group,
            zero,
            quants,
            scales,
            biases,
            activations: ActivationPrecision::default(),
        })
    }

    /// The same weights, to be multiplied with activations of another precision.
    pub fn with_activations(self, activations: ActivationPrecision) -> Self {
        Self { activations, ..self }
    }

    /// Rounds weights: with biases the range of a group is its smallest to its largest weight, without it is symmetric.
    ///
    /// # Shapes
    /// `weight`: `[out, in]`, f32, bf16 or f16, on the CPU.
    ///
    /// # Errors
    /// A format or a shape as [`new`](Self::new) refuses, or a weight that is not a finite number.
    pub fn quantize(weight: &Tensor, format: GroupFormat) -> Result<Self> {
        let GroupFormat { bits, group, .. } = format;
        check(bits, group)?;
        let (out, features) = match *weight.dims() {
            [out, features] if features > 0 && features % group == 0 => (out, features),
            _ => {
                return Err(OP.shape_error(
                    "weight",
                    weight,
                    format!("[out, in] with in a multiple of {group}"),
                ))
            }
        };
        OP.float("weight", weight)?;
        if !matches!(format.scales, DType::F32 | DType::F16 | DType::BF16) {
            return Err(OP.value(format!(
                "scales of {}; expected f32, f16 or bf16",
                format.scales.as_str()
            )));
        }
        let weight = weight.contiguous()?;
        let held = OP.hold("weight", &weight)?;
        let weights = Numbers::of(&held, weight.dtype())?;
        let (groups, bytes) = (features / group, features * bits / 8);
        let mut quants = vec![0_u8; out * bytes];
        let mut steps = vec![0.0; out * groups];
        let mut lows = vec![0.0; out * groups];
        let damaged = AtomicUsize::new(usize::MAX);
        {
            let isa = simd::isa();
            let (quants, steps, lows) = (
                Shared::new(&mut quants),
                Shared::new(&mut steps),
                Shared::new(&mut lows),
            );
            pool::for_each(out, out * features, &|row| {
                pool::with_scratch(features, |x| {
                    weights.widen(row * features, x);
                    if let Some(column) = x.iter().position(|x| !x.is_finite()) {
                        damaged.fetch_min(row * features + column, Ordering::Relaxed);
                        return;
                    }
                    // SAFETY: one task a row, and rows do not overlap; so for all three.
                    let quants = unsafe { quants.part(row * bytes..(row + 1) * bytes) };
                    // SAFETY: as above.
                    let steps = unsafe { steps.part(row * groups..(row + 1) * groups) };
                    // SAFETY: as above.
                    let lows = unsafe { lows.part(row * groups..(row + 1) * groups) };
                    simd::run(
                        isa,
                        Rounding {
                            format,
                            weights: x,
                            quants,
                            steps,
                            lows,
                        },
                    );
                });
            });
        }
        let damaged = damaged.into_inner();
        if damaged != usize::MAX {
            let (row, column) = (damaged / features, damaged % features);
            let mut found = [0.0];
            weights.widen(damaged, &mut found);
            return Err(OP.value(format!(
                "the weight in row {row}, column {column} is {}; the checkpoint is damaged",
                found[0]
            )));
        }
        let store = |x: Vec<f32>| Tensor::from_vec(x, (out, groups), &Device::Cpu)?.to_dtype(format.scales);
        let quants = Tensor::from_vec(quants, (out, bytes), &Device::Cpu)?;
        let biases = format.affine.then(|| store(lows)).transpose()?;
        Self::new(bits, group, format.zero(), quants, store(steps)?, biases)
    }

    /// The weights in f32: `[out, in]`.
    ///
    /// # Errors
    /// Memory for it.
    pub fn dequantize(&self) -> Result<Tensor> {
        let (out, features) = (self.out_features(), self.in_features());
        let quants = self.quants.flatten_all()?.to_vec1::<u8>()?;
        let numbers =
            |x: &Tensor| -> Result<Vec<f32>> { Ok(x.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?) };
        let scales = numbers(&self.scales)?;
        let biases = self.biases.as_ref().map(numbers).transpose()?;
        let mask = ((1_u16 << self.bits) - 1) as u8;
        let weight = |i: usize| {
            let q = (quants[i * self.bits / 8] >> (i * self.bits % 8)) & mask;
            let centred = f32::from(q) - f32::from(self.zero);
            match &biases {
                Some(biases) => scales[i / self.group].mul_add(centred, biases[i / self.group]),
                None => scales[i / self.group] * centred,
            }
        };
        let weights: Vec<f32> = (0..out * features).map(weight).collect();
        Ok(Tensor::from_vec(weights, (out, features), &Device::Cpu)?)
    }

    /// Rows of the matrix.
    pub fn out_features(&self) -> usize {
        self.scales.dims()[0]
    }

    /// Columns of the matrix.
    pub fn in_features(&self) -> usize {
        self.scales.dims()[1] * self.group
    }

    /// Bits of a weight.
    pub fn bits(&self) -> usize {
        self.bits
    }

    /// Whether both can be packed as one matrix.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        let kind = |x: &Self| {
            (
                x.bits,
                x.group,
                x.zero,
                x.scales.dtype(),
                x.biases.is_some(),
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
            scales: OP.hold("scales", &self.scales)?,
            biases: self
                .biases
                .as_ref()
                .map(|biases| OP.hold("biases", biases))
                .transpose()?,
        })
    }
}

/// The parts of [`GroupWeights`], held for reading.
pub(super) struct HeldGroups<'a> {
    of: &'a GroupWeights,
    quants: Held<'a>,
    scales: Held<'a>,
    biases: Option<Held<'a>>,
}

impl HeldGroups<'_> {
    pub(super) fn groups(&self) -> Result<Groups<'_>> {
        let dtype = self.of.scales.dtype();
        Ok(Groups {
            in_features: self.of.in_features(),
            group: self.of.group,
            zero: self.of.zero,
            quants: self.quants.slice()?,
            scales: Numbers::of(&self.scales, dtype)?,
            biases: self
                .biases
                .as_ref()
                .map(|held| Numbers::of(held, dtype))
                .transpose()?,
        })
    }
}

fn check(bits: usize, group: usize) -> Result<()> {
    if bits != 4 && bits != 8 {
        return Err(OP.value(format!("weights of {bits} bits; expected 4 or 8")));
    }
    if group == 0 || !group.is_multiple_of(CHUNK) {
        return Err(OP.value(format!(
            "groups of {group} features; expected a multiple of {CHUNK}"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn format(bits: usize, affine: bool) -> GroupFormat {
        GroupFormat {
            bits,
            group: 32,
            affine,
            scales: DType::F16,
        }
    }

    fn matrix(out: usize, features: usize) -> Tensor {
        // Few bits, so that all float types hold them.
        let number = |i: usize| ((i * 37 % 101) as f32 - 50.0) / 64.0;
        let numbers = (0..out * features).map(number).collect();
        Tensor::from_vec(numbers, (out, features), &Device::Cpu).expect("a matrix")
    }

    fn parts(weights: &GroupWeights) -> (Vec<u8>, Vec<f32>) {
        let flat = |x: &Tensor| x.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
        let quants = weights.quants.flatten_all().and_then(|x| x.to_vec1());
        let scales = [Some(&weights.scales), weights.biases.as_ref()];
        let scales = scales.into_iter().flatten().map(flat);
        let scales: candle_core::Result<Vec<_>> = scales.collect();
        (quants.expect("quants"), scales.expect("scales").concat())
    }

    #[test]
    fn every_instruction_set_and_float_type_rounds_to_the_same_bits() {
        let weight = matrix(70, 96);
        for (bits, affine) in [(8, false), (8, true), (4, false), (4, true)] {
            let round = |dtype| {
                let weight = weight.to_dtype(dtype).expect("a type");
                parts(&GroupWeights::quantize(&weight, format(bits, affine)).expect("groups"))
            };
            let expected = simd::forced::with(simd::Isa::Portable, || round(DType::F32));
            for isa in simd::available() {
                for dtype in [DType::F32, DType::F16, DType::BF16] {
                    let found = simd::forced::with(*isa, || round(dtype));
                    assert!(
                        found == expected,
                        "{bits} bits, affine: {affine}, {isa:?}, {dtype:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn groups_of_zeros_are_zeros() {
        let zeros = Tensor::zeros((2, 64), DType::F32, &Device::Cpu).expect("zeros");
        for (bits, affine) in [(8, false), (8, true), (4, false), (4, true)] {
            let weights = GroupWeights::quantize(&zeros, format(bits, affine)).expect("groups");
            let back = weights.dequantize().and_then(|x| Ok(x.to_vec2::<f32>()?));
            assert_eq!(back.expect("weights"), vec![vec![0.0; 64]; 2]);
        }
    }

    #[test]
    fn the_first_weight_that_is_no_number_is_named_by_any_number_of_threads() {
        let mut numbers = vec![0.5_f32; 4096 * 32];
        numbers[77 * 32 + 5] = f32::NAN;
        numbers[77 * 32 + 9] = f32::INFINITY;
        numbers[4000 * 32] = f32::INFINITY;
        let weight = Tensor::from_vec(numbers, (4096, 32), &Device::Cpu).expect("a matrix");
        for threads in [1, 4] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
            let found = pool
                .expect("a pool")
                .install(|| GroupWeights::quantize(&weight, format(8, false)));
            let found = found.expect_err("a refusal").to_string();
            assert!(found.contains("row 77, column 5 is NaN"), "{found}");
        }
    }
}
