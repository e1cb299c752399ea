//! Matrices that MLX quantized, told by their companion `scales`.
//!
//! | mode | group, bits | `weight` | `scales` | `biases` | a weight |
//! |---|---|---|---|---|---|
//! | affine | 32, 64 or 128; 2, 3, 4, 5, 6 or 8 | u32 `[out, in * bits / 32]` | f32, f16 or bf16 `[out, in / group]` | as scales | s q + b |
//! | mxfp4 | 32, 4 | u32 | u8, a power of two (E8M0) | - | s e2m1(q) |
//! | nvfp4 | 16, 4 | u32 | u8, a float (E4M3) | - | s e2m1(q), times `global_scale` / 2688 if there is one |
//! | mxfp8 | 32, 8 | u32 | u8, E8M0 | - | s e4m3(q) |
//!
//! A row of `weight` is one little-endian stream of bits. Stacks of experts have one more dimension in front of all, and one
//! `global_scale` an expert.

mod config;
mod decode;

use crate::error::{Error, Result};
use crate::folder::{Dtype, TensorInfo};
use crate::Stored;

pub(crate) use config::{check, entry, global, quantization, Entry};
pub(crate) use decode::e4m3;

/// Ends of the names of a quantized matrix' companions.
pub(crate) const COMPANIONS: [&str; 3] = [".scales", ".biases", ".global_scale"];

/// How numbers are packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Affine,
    Mxfp4,
    Nvfp4,
    Mxfp8,
}

impl Mode {
    const ALL: [Self; 4] = [Self::Affine, Self::Mxfp4, Self::Nvfp4, Self::Mxfp8];

    fn name(self) -> &'static str {
        match self {
            Self::Affine => "affine",
            Self::Mxfp4 => "mxfp4",
            Self::Nvfp4 => "nvfp4",
            Self::Mxfp8 => "mxfp8",
        }
    }

    fn of(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|mode| mode.name() == name)
    }

    /// Group and bits where nothing is said of them.
    fn defaults(self) -> (usize, usize) {
        match self {
            Self::Affine => (64, 4),
            Self::Mxfp4 => (32, 4),
            Self::Nvfp4 => (16, 4),
            Self::Mxfp8 => (32, 8),
        }
    }
}

/// How one matrix is packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Packing {
    pub(crate) mode: Mode,
    pub(crate) bits: usize,
    pub(crate) group: usize,
}

impl std::fmt::Display for Packing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { mode, bits, group } = self;
        write!(f, "{} of {bits} bits in groups of {group}", mode.name())
    }
}

impl Packing {
    /// Whether it is one that is read.
    fn is_known(self) -> bool {
        match self.mode {
            Mode::Affine => matches!(self.bits, 2..=6 | 8) && matches!(self.group, 32 | 64 | 128),
            mode => mode.defaults() == (self.group, self.bits),
        }
    }
}

/// The tensors of one quantized matrix, or of a stack of them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Parts<'a> {
    pub(crate) weight: &'a TensorInfo,
    pub(crate) scales: &'a TensorInfo,
    pub(crate) biases: Option<&'a TensorInfo>,
    pub(crate) global_scale: Option<&'a TensorInfo>,
}

impl<'a> Parts<'a> {
    /// Finds the parts of the matrix whose names begin with `path`, if there are `scales` of it.
    pub(crate) fn find(path: &str, find: impl Fn(&str) -> Option<&'a TensorInfo>) -> Result<Option<Self>> {
        let part = |end: &str| find(&format!("{path}{end}"));
        let Some(scales) = part(".scales") else {
            return Ok(None);
        };
        let Some(weight) = part(".weight") else {
            return Err(refused(
                scales,
                "there is no `weight` beside these `scales`; the download is incomplete",
            ));
        };
        Ok(Some(Self {
            weight,
            scales,
            biases: part(".biases"),
            global_scale: part(".global_scale"),
        }))
    }

    /// Its tensors.
    pub(crate) fn all(self) -> impl Iterator<Item = &'a TensorInfo> {
        let others = [self.biases, self.global_scale].into_iter().flatten();
        [self.weight, self.scales].into_iter().chain(others)
    }

    /// Words and scales of a row.
    fn columns(self) -> (usize, usize) {
        let last = |tensor: &TensorInfo| tensor.shape.last().copied().unwrap_or(0);
        (last(self.weight), last(self.scales))
    }

    /// Checks all that does not ask how long a row is.
    pub(crate) fn check(self) -> Result<()> {
        let Self {
            weight,
            scales,
            biases,
            global_scale,
        } = self;
        if !is(weight, "U32") {
            return Err(refused(
                weight,
                &format!("beside `scales`, expected dtype U32, found {}", weight.dtype),
            ));
        }
        let (words, groups) = self.columns();
        let (rank, lead) = (weight.shape.len(), weight.shape.len().saturating_sub(1));
        if !matches!(rank, 2 | 3)
            || scales.shape.len() != rank
            || scales.shape[..lead] != weight.shape[..lead]
            || words == 0
            || groups == 0
        {
            return Err(refused(
                scales,
                &format!(
                    "expected a scale for each group of the {:?} words of {}, found shape {:?}",
                    weight.shape, weight.name, scales.shape
                ),
            ));
        }
        let affine = matches!(scales.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16);
        match biases {
            _ if !affine && !is(scales, "U8") => {
                return Err(refused(
                    scales,
                    &format!(
                        "expected scales in F32, F16 or BF16 (affine) or U8 (mxfp4, nvfp4, mxfp8), found {}",
                        scales.dtype
                    ),
                ))
            }
            None if affine => {
                return Err(refused(
                    scales,
                    &format!(
                        "scales in {} are affine, which has `biases` too, but there are none; \
                         the checkpoint is incomplete",
                        scales.dtype
                    ),
                ))
            }
            Some(biases) if !affine => {
                return Err(refused(
                    biases,
                    "its scales are U8, and only affine, whose scales are floats, has `biases`",
                ))
            }
            Some(biases) if biases.shape != scales.shape || biases.dtype != scales.dtype => {
                return Err(refused(
                    biases,
                    &format!(
                        "expected the shape and dtype of its scales, {:?} {}, found {:?} {}",
                        scales.shape, scales.dtype, biases.shape, biases.dtype
                    ),
                ))
            }
            _ => {}
        }
        if let Some(global) = global_scale {
            let count = global.shape.iter().product::<usize>();
            let expected = weight.shape[..rank - 2].iter().product::<usize>();
            if global.dtype != Dtype::F32 || count != expected || global.shape.len() > 1 {
                return Err(refused(
                    global,
                    &format!(
                        "expected one F32 number a matrix, {expected} in all, found {:?} {}",
                        global.shape, global.dtype
                    ),
                ));
            }
        }
        // Bits times group are known before the length of a row is.
        let possible: Vec<Packing> = self.possible().collect();
        if possible.is_empty() {
            return Err(refused(
                weight,
                &format!(
                    "{words} words and {groups} {} scales a row are packed in no way that is known: expected affine of 2, 3, \
                     4, 5, 6 or 8 bits in groups of 32, 64 or 128, mxfp4, nvfp4 or mxfp8; use another conversion",
                    scales.dtype
                ),
            ));
        }
        if global_scale.is_some() && possible.iter().all(|packing| packing.mode != Mode::Nvfp4) {
            return Err(refused(
                scales,
                "it has a `global_scale`, which only nvfp4 has, but its shapes are not those of nvfp4",
            ));
        }
        if possible[0].mode == Mode::Nvfp4 && groups % 2 != 0 {
            return Err(refused(
                weight,
                &format!(
                    "nvfp4 rows of {} numbers; expected a multiple of 32",
                    groups * possible[0].group
                ),
            ));
        }
        Ok(())
    }

    /// The known ways of packing that have as many words and scales a row.
    pub(crate) fn possible(self) -> impl Iterator<Item = Packing> {
        let (words, groups) = self.columns();
        let affine = !is(self.scales, "U8");
        let floats = Mode::ALL[1..].iter().map(|mode| (*mode, mode.defaults()));
        let affines = [32, 64, 128]
            .into_iter()
            .flat_map(|group| [2, 3, 4, 5, 6, 8].map(|bits| (Mode::Affine, (group, bits))));
        affines
            .chain(floats)
            .map(|(mode, (group, bits))| Packing { mode, bits, group })
            .filter(move |packing| (packing.mode == Mode::Affine) == affine)
            .filter(move |packing| {
                let features = groups.checked_mul(packing.group);
                features.and_then(|n| n.checked_mul(packing.bits)) == words.checked_mul(32)
            })
    }

    /// Whether a row can be packed in this way.
    pub(crate) fn can_be(self, packing: Packing) -> bool {
        self.possible().any(|possible| possible == packing)
    }

    /// How rows of `features` numbers are packed: with their length known, shapes leave no choice.
    fn packing(self, features: usize) -> Option<Packing> {
        let (_, groups) = self.columns();
        self.possible()
            .find(|packing| groups.checked_mul(packing.group) == Some(features))
    }

    /// Reads the matrix: `shape` is that of the numbers, `[out, in]`; or one of a stack, whose shape is `[count, out, in]`.
    ///
    /// `entry`: what the configuration says of it. `bytes`: the data of a tensor that belongs to the matrix.
    pub(crate) fn read(
        self,
        shape: &[usize],
        stacked: bool,
        entry: Option<Entry>,
        bytes: impl Fn(&TensorInfo) -> &'a [u8],
    ) -> Result<Stored> {
        self.check()?;
        let misshaped = || Error::Shape {
            tensor: self.weight.name.clone(),
            file: self.weight.file.clone(),
            expected: shape.to_vec(),
            found: self.weight.shape.clone(),
        };
        let Some((&features, lead)) = shape.split_last() else {
            return Err(misshaped());
        };
        let (words, groups) = self.columns();
        if self.weight.shape[..self.weight.shape.len() - 1] != *lead {
            return Err(misshaped());
        }
        let Some(packing) = self.packing(features) else {
            return Err(refused(
                self.weight,
                &format!(
                    "{words} words and {groups} scales a row are not {features} numbers in any way that is known; \
                     config.json and the weights do not belong together"
                ),
            ));
        };
        if let Some(entry) = entry {
            entry.check(self, packing)?;
        }
        decode::Matrix {
            packing,
            lead: &lead[usize::from(stacked).min(lead.len())..],
            features,
            dtype: &self.scales.dtype,
            weight: bytes(self.weight),
            scales: bytes(self.scales),
            biases: self.biases.map(&bytes),
            factors: self.global_scale.map(&bytes),
        }
        .decode()
        .map_err(|damage| match damage {
            decode::Damage::Value(reason) => refused(self.weight, &reason),
            decode::Damage::Tensor(source) => Error::Tensor {
                tensor: self.weight.name.clone(),
                source: source.into(),
            },
        })
    }
}

fn is(tensor: &TensorInfo, dtype: &str) -> bool {
    tensor.dtype == Dtype::Other(dtype.to_owned())
}

fn refused(tensor: &TensorInfo, reason: &str) -> Error {
    Error::Packed {
        tensor: tensor.name.clone(),
        file: tensor.file.clone(),
        reason: reason.to_owned(),
    }
}
