//! Scales and biases of a matrix while its blocks are read.

use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};
use rayon::prelude::*;

use super::blocks::{Levels, Steps};

/// What is added to a whole number to be a byte.
const ZERO: f32 = 128.0;

/// Scales, or biases, in as many levels as the type has.
pub(super) struct Levelled {
    levels: Levels,
    rows: usize,
    groups: usize,
    /// Groups that share a factor.
    run: usize,
    /// Little-endian.
    numbers: Vec<u8>,
    /// Empty where there is one level.
    factors: Vec<f16>,
}

/// Those of a row.
pub(super) struct Row<'a> {
    levels: Levels,
    run: usize,
    numbers: &'a mut [u8],
    factors: &'a mut [f16],
}

impl Levelled {
    pub(super) fn new(levels: Levels, rows: usize, groups: usize, run: usize) -> Self {
        let (size, runs) = match levels {
            Levels::One(dtype) => (dtype.size_in_bytes(), 0),
            Levels::Two => (1, groups / run),
        };
        Self {
            levels,
            rows,
            groups,
            run,
            numbers: vec![0; rows * groups * size],
            factors: vec![f16::ZERO; rows * runs],
        }
    }

    /// Rows, to be filled side by side.
    pub(super) fn by_row(&mut self) -> impl IndexedParallelIterator<Item = Row<'_>> {
        let (levels, run, rows) = (self.levels, self.run, self.rows.max(1));
        let (width, runs) = (self.numbers.len() / rows, self.factors.len() / rows);
        let factors: Vec<&mut [f16]> = match runs {
            0 => (0..self.rows).map(|_| &mut [][..]).collect(),
            runs => self.factors.chunks_exact_mut(runs).collect(),
        };
        self.numbers
            .par_chunks_exact_mut(width.max(1))
            .zip(factors)
            .map(move |(numbers, factors)| Row {
                levels,
                run,
                numbers,
                factors,
            })
    }

    /// Numbers `[rows, groups]`, and factors `[rows, runs]` if there are two levels.
    pub(super) fn tensors(self) -> candle_core::Result<(Tensor, Option<Tensor>)> {
        let shape = (self.rows, self.groups);
        Ok(match self.levels {
            Levels::One(dtype) => {
                let shape = [self.rows, self.groups];
                (
                    Tensor::from_raw_buffer(&self.numbers, dtype, &shape, &Device::Cpu)?,
                    None,
                )
            }
            Levels::Two => {
                let factors =
                    Tensor::from_vec(self.factors, (self.rows, self.groups / self.run), &Device::Cpu)?;
                (
                    Tensor::from_vec(self.numbers, shape, &Device::Cpu)?,
                    Some(factors),
                )
            }
        })
    }
}

impl Row<'_> {
    /// Sets the number of a group to that of a block's group `i`, whose product is given.
    pub(super) fn put(&mut self, group: usize, steps: &Steps, i: usize, product: f32) {
        match self.levels {
            Levels::One(DType::F16) => self.bytes(group, f16::from_f32(product).to_le_bytes()),
            Levels::One(DType::BF16) => self.bytes(group, bf16::from_f32(product).to_le_bytes()),
            Levels::One(_) => self.bytes(group, product.to_le_bytes()),
            Levels::Two => {
                self.numbers[group] = (steps.numbers[i] + ZERO) as u8;
                self.factors[group / self.run] = f16::from_f32(steps.factor);
            }
        }
    }

    fn bytes<const N: usize>(&mut self, group: usize, bytes: [u8; N]) {
        self.numbers[group * N..(group + 1) * N].copy_from_slice(&bytes);
    }
}
