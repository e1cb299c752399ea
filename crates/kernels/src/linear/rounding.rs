//! Weights to groups.

use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};

use crate::pool::{self, Shared};
use crate::simd::{self, Kernel, Simd};
use crate::Result;

use super::format::{check, Coding, GroupFormat, GroupWeights, OP};
use super::rows::CHUNK;
use super::steps::{GroupScales, Numbers};

impl GroupWeights {
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
            [out, features] if features > 0 && features % group == 0 && features % CHUNK == 0 => {
                (out, features)
            }
            _ => {
                return Err(OP.shape_error(
                    "weight",
                    weight,
                    format!("[out, in] with in a multiple of {group} and of {CHUNK}"),
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
        let biases = format
            .affine
            .then(|| store(lows).map(GroupScales::from))
            .transpose()?;
        let zero = format.zero();
        Self::new(Coding::Whole { bits, zero }, group, quants, store(steps)?, biases)
    }
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
        let quants = weights.quants.flatten_all().and_then(|x| x.to_vec1());
        let scales = [Some(&weights.scales), weights.biases.as_ref()];
        let scales: Result<Vec<_>> = scales.into_iter().flatten().map(GroupScales::widen).collect();
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
    fn a_weight_is_rounded_to_the_nearest_that_the_stored_scale_gives() {
        let number = |i: u32| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 24) as f32 - 0.5;
        let numbers: Vec<f32> = (0..64 * 64).map(number).collect();
        let weight = Tensor::from_slice(&numbers, (64, 64), &Device::Cpu).expect("a matrix");
        for bits in [8, 4] {
            let weights = GroupWeights::quantize(&weight, format(bits, false)).expect("groups");
            let (_, scales) = parts(&weights);
            let back = weights.dequantize().and_then(|x| Ok(x.flatten_all()?.to_vec1()?));
            let back: Vec<f32> = back.expect("weights");
            for (i, (x, back)) in numbers.iter().zip(&back).enumerate() {
                let step = scales[i / 32];
                assert!(
                    (x - back).abs() <= step * 0.5001,
                    "{bits} bits: {x}, {back}, {step}"
                );
            }
        }
    }

    #[test]
    fn groups_of_zeros_are_zeros() {
        let zeros = Tensor::zeros((2, 64), DType::F32, &Device::Cpu).expect("zeros");
        for (bits, affine) in [(8, false), (8, true), (4, false), (4, true)] {
            let weights = GroupWeights::quantize(&zeros, format(bits, affine)).expect("groups");
            let (quants, scales) = parts(&weights);
            let zero = match (bits, affine) {
                (_, true) => 0,
                (4, false) => 0x88,
                _ => 0x80,
            };
            assert!(quants.iter().all(|q| *q == zero), "{quants:?}");
            assert!(scales.iter().all(|x| *x == 0.0), "{scales:?}");
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
