//! From the bytes of releases to what kernels read.
//!
//! Codes stay as they are, and so do scales of FP8: a weight is the product of both. Scales of NVFP4 come in two parts, whose
//! product or quotient is rounded to f32, as every reference does; they are halved, since e2m1 is held doubled, which is exact.
//! A scale of a block is repeated for each of its rows. Where a block is cut short at the end of a row, groups are as long as
//! divides both.
//!
//! Kernels read rows in chunks of 32 features and scales of at least 16. What does not come out even is widened to f32: codes
//! times scales, rounded to f32, which is exact for scales in BF16 and F16.

use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};
use rayon::prelude::*;

use super::{refused, Declared, Parts, Scheme, GROUP};
use crate::error::{Error, Result};
use crate::folder::{Dtype, TensorInfo};
use crate::mlx::e4m3;
use crate::{Coding, Stored, StoredGroups};

/// What e2m1 stands for.
const E2M1: [f32; 16] = [
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
];
/// Kernels read so many features at once.
const CHUNK: usize = 32;
/// Features of the shortest group that kernels read, and what divides the others.
const STEP: usize = 16;

impl<'a> Parts<'a> {
    /// Reads the matrix `[out, in]`.
    ///
    /// `said`: what the configuration says. `bytes`: the data of a tensor.
    pub(crate) fn read(
        self,
        shape: [usize; 2],
        said: Option<&Declared>,
        bytes: impl Fn(&TensorInfo) -> &'a [u8],
    ) -> Result<Stored> {
        let scheme = self.check(said)?;
        if self.shape()? != shape {
            let per_byte = if self.global.is_some() { 2 } else { 1 };
            return Err(Error::Shape {
                tensor: self.weight.name.clone(),
                file: self.weight.file.clone(),
                expected: vec![shape[0], shape[1] / per_byte],
                found: self.weight.shape.clone(),
            });
        }
        match scheme {
            Scheme::Nvfp4 => self.read_nvfp4(shape, bytes),
            scheme => self.read_fp8(shape, scheme.block(shape), bytes),
        }
    }

    fn read_fp8(
        self,
        shape: [usize; 2],
        [height, width]: [usize; 2],
        bytes: impl Fn(&TensorInfo) -> &'a [u8],
    ) -> Result<Stored> {
        let [rows, columns] = shape;
        let (codes, scales) = (bytes(self.weight), bytes(self.scale));
        if let Some(at) = codes.par_iter().position_first(|code| code & 0x7f == 0x7f) {
            return Err(refused(
                self.weight,
                &format!(
                    "row {}, column {} is {:#04x}, which is no number; the checkpoint is damaged",
                    at / columns,
                    at % columns,
                    codes[at]
                ),
            ));
        }
        let (dtype, wide) = floats(&self.scale.dtype, scales);
        self.check_scales(&wide)?;
        let across = columns.div_ceil(width);
        let of = |row: usize, column: usize| row / height * across + column / width;

        let group = common_divisor(width, columns);
        if !columns.is_multiple_of(CHUNK) || !group.is_multiple_of(STEP) {
            let weight = |i: usize| e4m3(codes[i]) * wide[of(i / columns, i % columns)];
            return self.widened(shape, weight);
        }
        let size = dtype.size_in_bytes();
        let repeated: Vec<u8> = (0..rows * (columns / group))
            .map(|i| of(i / (columns / group), i % (columns / group) * group))
            .flat_map(|at| &scales[at * size..][..size])
            .copied()
            .collect();
        let tensors = || -> candle_core::Result<StoredGroups> {
            Ok(StoredGroups {
                coding: Coding::E4m3,
                group,
                quants: Tensor::from_raw_buffer(codes, DType::U8, &shape, &Device::Cpu)?,
                scales: Tensor::from_raw_buffer(&repeated, dtype, &[rows, columns / group], &Device::Cpu)?,
                biases: None,
                factors: None,
            })
        };
        tensors()
            .map(Stored::Groups)
            .map_err(|source| self.failed(source))
    }

    fn read_nvfp4(self, shape: [usize; 2], bytes: impl Fn(&TensorInfo) -> &'a [u8]) -> Result<Stored> {
        let [rows, columns] = shape;
        let (codes, scales) = (bytes(self.weight), bytes(self.scale));
        let factor = match self.global {
            Some(global) => {
                let (_, numbers) = floats(&global.tensor.dtype, bytes(global.tensor));
                let factor = numbers.first().copied().unwrap_or(f32::NAN);
                if !factor.is_finite() || (global.divides && factor == 0.0) {
                    return Err(refused(
                        global.tensor,
                        &format!("expected a number that scales can be had from, found {factor}; the checkpoint is damaged"),
                    ));
                }
                factor
            }
            None => 1.0,
        };
        let divides = self.global.is_some_and(|global| global.divides);
        let halves: Vec<f32> = scales
            .iter()
            .map(|code| match divides {
                true => e4m3(*code) / 2.0 / factor,
                false => e4m3(*code) / 2.0 * factor,
            })
            .collect();
        // The largest number of e2m1, doubled.
        if let Some(at) = halves.iter().position(|half| !(half * 12.0).is_finite()) {
            return Err(refused(
                self.scale,
                &format!(
                    "row {}, column {} is {:#04x}, which gives weights that are no finite numbers; the checkpoint is damaged",
                    at / (columns / GROUP),
                    at % (columns / GROUP),
                    scales[at]
                ),
            ));
        }
        if !columns.is_multiple_of(CHUNK) {
            let weight = |i: usize| {
                let code = codes[i / 2] >> (i % 2 * 4) & 15;
                E2M1[usize::from(code)] * (halves[i / GROUP] * 2.0)
            };
            return self.widened(shape, weight);
        }
        let tensors = || -> candle_core::Result<StoredGroups> {
            Ok(StoredGroups {
                coding: Coding::DOUBLE_E2M1,
                group: GROUP,
                quants: Tensor::from_raw_buffer(codes, DType::U8, &[rows, columns / 2], &Device::Cpu)?,
                scales: Tensor::from_vec(halves, (rows, columns / GROUP), &Device::Cpu)?,
                biases: None,
                factors: None,
            })
        };
        tensors()
            .map(Stored::Groups)
            .map_err(|source| self.failed(source))
    }

    /// Refuses scales by which the numbers of E4M3 are not finite.
    fn check_scales(self, scales: &[f32]) -> Result<()> {
        match scales.iter().position(|scale| !(scale * 448.0).is_finite()) {
            Some(at) => Err(refused(
                self.scale,
                &format!(
                    "scale {at} is {}, which gives weights that are no finite numbers; the checkpoint is damaged",
                    scales[at]
                ),
            )),
            None => Ok(()),
        }
    }

    fn widened(
        self,
        [rows, columns]: [usize; 2],
        weight: impl Fn(usize) -> f32 + Send + Sync,
    ) -> Result<Stored> {
        let weights: Vec<f32> = (0..rows * columns).into_par_iter().map(weight).collect();
        Tensor::from_vec(weights, (rows, columns), &Device::Cpu)
            .map(Stored::Float)
            .map_err(|source| self.failed(source))
    }

    fn failed(self, source: candle_core::Error) -> Error {
        Error::Tensor {
            tensor: self.weight.name.clone(),
            source: source.into(),
        }
    }
}

/// Little-endian floats, and their type.
fn floats(dtype: &Dtype, bytes: &[u8]) -> (DType, Vec<f32>) {
    let pairs = || bytes.as_chunks().0.iter();
    match dtype {
        Dtype::BF16 => (
            DType::BF16,
            pairs().map(|x| bf16::from_le_bytes(*x).to_f32()).collect(),
        ),
        Dtype::F16 => (
            DType::F16,
            pairs().map(|x| f16::from_le_bytes(*x).to_f32()).collect(),
        ),
        _ => {
            let numbers = bytes.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x));
            (DType::F32, numbers.collect())
        }
    }
}

/// Euclid's.
fn common_divisor(a: usize, b: usize) -> usize {
    match b {
        0 => a,
        b => common_divisor(b, a % b),
    }
}
