//! From MLX' words to the bits that kernels read. Nothing is rounded.

use candle_core::{DType, Device, Tensor};
use half::bf16;
use rayon::prelude::*;

use super::{Mode, Packing};
use crate::folder::Dtype;
use crate::{Coding, Stored, StoredGroups};

/// What a `global_scale` is divided by: the largest numbers of e4m3 and e2m1, multiplied.
const GLOBAL: f32 = 448.0 * 6.0;

/// Largest E8M0 by which every e2m1 is a finite f32: 6 * 2^125.
const MOST_E8M0: u8 = 252;

/// Why a matrix cannot be had.
pub(super) enum Damage {
    Value(String),
    Tensor(candle_core::Error),
}

impl From<candle_core::Error> for Damage {
    fn from(error: candle_core::Error) -> Self {
        Self::Tensor(error)
    }
}

/// A matrix or a stack of them, of checked shapes.
pub(super) struct Matrix<'a> {
    pub(super) packing: Packing,
    /// Dimensions before the last.
    pub(super) lead: &'a [usize],
    pub(super) features: usize,
    /// Of scales and biases.
    pub(super) dtype: &'a Dtype,
    pub(super) weight: &'a [u8],
    pub(super) scales: &'a [u8],
    pub(super) biases: Option<&'a [u8]>,
    /// Little-endian f32, one a matrix.
    pub(super) factors: Option<&'a [u8]>,
}

impl Matrix<'_> {
    pub(super) fn decode(&self) -> Result<Stored, Damage> {
        let scales = match self.packing.mode {
            Mode::Affine => self.tensor(self.scales, self.dtype())?,
            Mode::Mxfp4 => self.halved_powers()?,
            Mode::Nvfp4 => self.small_floats()?,
            Mode::Mxfp8 => self.powers()?,
        };
        let (bits, quants) = match self.packing.bits {
            2 => (4, self.unpack::<2, 4>()),
            3 => (4, self.unpack::<3, 4>()),
            5 => (8, self.unpack::<5, 8>()),
            6 => (8, self.unpack::<6, 8>()),
            bits => (bits, self.weight.to_vec()),
        };
        let coding = match self.packing.mode {
            Mode::Affine => Coding::Whole { bits, zero: 0 },
            Mode::Mxfp4 | Mode::Nvfp4 => Coding::DOUBLE_E2M1,
            Mode::Mxfp8 => Coding::E4m3,
        };
        Ok(Stored::Groups(StoredGroups {
            coding,
            group: self.packing.group,
            quants: self.shaped(quants, self.features * bits / 8)?,
            scales,
            biases: self
                .biases
                .map(|bytes| self.tensor(bytes, self.dtype()))
                .transpose()?,
            factors: None,
        }))
    }

    fn dtype(&self) -> DType {
        match self.dtype {
            Dtype::F16 => DType::F16,
            Dtype::BF16 => DType::BF16,
            _ => DType::F32,
        }
    }

    fn groups(&self) -> usize {
        self.features / self.packing.group
    }

    fn shape(&self, last: usize) -> Vec<usize> {
        [self.lead, &[last]].concat()
    }

    fn shaped<T: candle_core::WithDType>(&self, values: Vec<T>, last: usize) -> candle_core::Result<Tensor> {
        Tensor::from_vec(values, self.shape(last), &Device::Cpu)
    }

    /// Numbers a group, as they are in the file.
    fn tensor(&self, bytes: &[u8], dtype: DType) -> candle_core::Result<Tensor> {
        Tensor::from_raw_buffer(bytes, dtype, &self.shape(self.groups()), &Device::Cpu)
    }

    /// Numbers of `FROM` bits, written in `TO` bits.
    fn unpack<const FROM: usize, const TO: usize>(&self) -> Vec<u8> {
        let mut out = vec![0_u8; self.lead.iter().product::<usize>() * self.features * TO / 8];
        let rows = self.weight.par_chunks_exact(self.features * FROM / 8);
        out.par_chunks_exact_mut(self.features * TO / 8)
            .zip(rows)
            .for_each(|(to, from)| {
                let number = |i: usize| {
                    let (byte, shift) = (i * FROM / 8, i * FROM % 8);
                    // A number may begin in one byte and end in the next.
                    let next = from.get(byte + 1).copied().unwrap_or(0);
                    let bits = u16::from_le_bytes([from[byte], next]) >> shift;
                    (bits & ((1 << FROM) - 1)) as u8
                };
                for (i, to) in to.iter_mut().enumerate() {
                    *to = if TO == 8 {
                        number(i)
                    } else {
                        number(2 * i) | number(2 * i + 1) << 4
                    };
                }
            });
        out
    }

    /// Scales of mxfp4: halves of powers of two. bf16 has the exponents of f32, and below them halves enough for 2^-128.
    fn halved_powers(&self) -> Result<Tensor, Damage> {
        if let Some(at) = self.scales.iter().position(|s| *s > MOST_E8M0) {
            return Err(self.damaged(at, "an mxfp4 scale", self.scales[at]));
        }
        let half = self.scales.iter().map(|s| bf16::from_f32(power(*s) / 2.0));
        Ok(self.shaped(half.collect(), self.groups())?)
    }

    /// Scales of mxfp8: powers of two, which bf16 holds.
    fn powers(&self) -> Result<Tensor, Damage> {
        let group = self.packing.group;
        let number = |i: usize| power(self.scales[i / group]) * e4m3(self.weight[i]);
        let count = self.weight.len();
        if let Some(at) = (0..count).into_par_iter().find_first(|i| !number(*i).is_finite()) {
            return Err(self.damaged(at / group, "an mxfp8 number or its scale", self.weight[at]));
        }
        let powers = self.scales.iter().map(|s| bf16::from_f32(power(*s)));
        Ok(self.shaped(powers.collect(), self.groups())?)
    }

    /// Scales of nvfp4, halved: four bits and an exponent, which bf16 holds. With a factor they are f32, rounded as MLX does:
    /// the factor first, then the product.
    fn small_floats(&self) -> Result<Tensor, Damage> {
        if let Some(at) = self.scales.iter().position(|s| e4m3(*s).is_nan()) {
            return Err(self.damaged(at, "an nvfp4 scale", self.scales[at]));
        }
        let half = self.scales.iter().map(|s| e4m3(*s) / 2.0);
        let Some(factors) = self.factors else {
            return Ok(self.shaped(half.map(bf16::from_f32).collect(), self.groups())?);
        };
        let factors: Vec<f32> = factors
            .as_chunks()
            .0
            .iter()
            .map(|bytes| f32::from_le_bytes(*bytes) / GLOBAL)
            .collect();
        let per_matrix = self.scales.len() / factors.len().max(1);
        if let Some(at) = factors.iter().position(|factor| !factor.is_finite()) {
            return Err(Damage::Value(format!(
                "the `global_scale` of matrix {at} is no number; the checkpoint is damaged"
            )));
        }
        let scaled = half.enumerate().map(|(i, s)| s * factors[i / per_matrix]);
        Ok(self.shaped(scaled.collect(), self.groups())?)
    }

    fn damaged(&self, group: usize, what: &str, found: u8) -> Damage {
        let (row, column) = (group / self.groups(), group % self.groups() * self.packing.group);
        Damage::Value(format!(
            "{what} in row {row}, from column {column} on, is {found:#04x}, which gives weights that are no finite numbers; \
             the checkpoint is damaged"
        ))
    }
}

/// A power of two, E8M0: 2^(s - 127).
fn power(s: u8) -> f32 {
    match s {
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        s => f32::from_bits(u32::from(s) << 23),
    }
}

/// Sign, four bits of exponent, three of mantissa; no infinities.
pub(crate) fn e4m3(x: u8) -> f32 {
    let (exponent, mantissa) = (x >> 3 & 15, f32::from(x & 7));
    let magnitude = match exponent {
        15 if x & 7 == 7 => f32::NAN,
        0 => mantissa / 512.0,
        e => (8.0 + mantissa) * power(e + 117),
    };
    if x < 128 {
        magnitude
    } else {
        -magnitude
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_floats_are_those_of_their_definition() {
        let expected = [
            (0x00, 0.0),
            (0x01, 0.001953125),
            (0x07, 0.013671875),
            (0x08, 0.015625),
            (0x38, 1.0),
            (0x7e, 448.0),
            (0xb8, -1.0),
        ];
        for (x, number) in expected {
            assert_eq!(e4m3(x), number, "{x:#04x}");
        }
        assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan());
        for s in 0..=254_u8 {
            assert_eq!(f64::from(power(s)), 2.0_f64.powi(i32::from(s) - 127), "{s}");
        }
    }

    /// A row of one group.
    fn read(mode: Mode, weight: &[u8], scale: u8) -> Result<Stored, String> {
        let (group, bits) = mode.defaults();
        let found = Matrix {
            packing: Packing { mode, bits, group },
            lead: &[1],
            features: weight.len() * 8 / bits,
            dtype: &Dtype::Other("U8".to_owned()),
            weight,
            scales: &vec![scale; weight.len() * 8 / bits / group],
            biases: None,
            factors: None,
        }
        .decode();
        found.map_err(|damage| match damage {
            Damage::Value(reason) => reason,
            Damage::Tensor(error) => error.to_string(),
        })
    }

    fn numbers(stored: &Stored) -> Vec<f64> {
        let Stored::Groups(groups) = stored else {
            panic!("{stored:?}")
        };
        let scales = groups.scales.to_dtype(DType::F64);
        let scales: Vec<f64> = scales.and_then(|x| x.flatten_all()?.to_vec1()).expect("scales");
        let quants = groups.quants.flatten_all().and_then(|x| x.to_vec1::<u8>());
        let quants = quants.expect("quants");
        let numbers: Vec<f64> = match groups.coding {
            Coding::Whole { .. } => panic!("{groups:?}"),
            Coding::Table(table) => quants
                .iter()
                .flat_map(|q| [q & 15, q >> 4])
                .map(|q| f64::from(table[usize::from(q)]))
                .collect(),
            Coding::E4m3 => quants.iter().map(|q| f64::from(e4m3(*q))).collect(),
        };
        let numbers = numbers.iter().enumerate();
        numbers.map(|(i, x)| scales[i / groups.group] * x).collect()
    }

    const E2M1: [f64; 16] = [
        0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
    ];

    #[test]
    fn the_smallest_and_the_largest_mxfp4_are_exact() {
        let all: Vec<u8> = (0..16).map(|i| (i % 8 * 2) | (i % 8 * 2 + 1) << 4).collect();
        for scale in [0, 1, 2, 3, 127, 251, 252] {
            let power = 2.0_f64.powi(i32::from(scale) - 127);
            let found = numbers(&read(Mode::Mxfp4, &all, scale).expect("a matrix"));
            assert_eq!(found.len(), 32);
            for (found, number) in found.iter().zip(E2M1.iter().cycle()) {
                assert_eq!(*found, number * power, "{scale}");
            }
        }
        for scale in [253, 254, 255] {
            let refused = read(Mode::Mxfp4, &all, scale).expect_err("too large");
            assert!(refused.contains("row 0, from column 0 on"), "{refused}");
        }
    }

    #[test]
    fn the_smallest_and_the_largest_mxfp8_are_exact_and_what_is_too_large_is_refused() {
        let row = |code: u8| vec![code; 32];
        for (code, scale) in [
            (0x01, 0),
            (0x01, 1),
            (0x01, 2),
            (0x0f, 0),
            (0x81, 127),
            (0x7e, 246),
            (0x01, 247),
            (0x01, 254),
            (0x00, 254),
        ] {
            let found = numbers(&read(Mode::Mxfp8, &row(code), scale).expect("a matrix"));
            let expected = f64::from(e4m3(code)) * 2.0_f64.powi(i32::from(scale) - 127);
            assert_eq!(found, vec![expected; 32], "{code:#04x} {scale}");
        }
        for (code, scale) in [(0x7e, 247), (0x7f, 127), (0xff, 127), (0x01, 255), (0x00, 255)] {
            let refused = read(Mode::Mxfp8, &row(code), scale).expect_err("no number");
            assert!(refused.contains("no finite numbers"), "{refused}");
        }
    }

    #[test]
    fn an_nvfp4_scale_that_is_no_number_is_refused() {
        for scale in [0x7f, 0xff] {
            read(Mode::Nvfp4, &[0x12; 16], scale).expect_err("no number");
        }
        let found = numbers(&read(Mode::Nvfp4, &[0x71; 16], 0x01).expect("a matrix"));
        assert_eq!(found[..2], [0.5 / 512.0, 6.0 / 512.0]);
    }
}
