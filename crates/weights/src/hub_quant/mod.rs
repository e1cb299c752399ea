//! Matrices in FP8 (E4M3) and NVFP4 as releases of the Hub store them, each told by its dtype and the tensors beside it.
//!
//! | release | numbers | beside them | a weight |
//! |---|---|---|---|
//! | FP8 in blocks | `weight` F8_E4M3 `[out, in]` | `weight_scale_inv` or `weight_scale` `[ceil(out / 128), ceil(in / 128)]` | e4m3(q) s |
//! | FP8 by row | the same | `weight_scale` `[out, 1]` or `[out]` | e4m3(q) s |
//! | FP8 of one scale | the same | `weight_scale` of one number | e4m3(q) s |
//! | NVFP4, ModelOpt | `weight` U8 `[out, in / 2]`, low half first | `weight_scale` F8_E4M3 `[out, in / 16]`, `weight_scale_2` F32 of one number | e2m1(q) (s s2) |
//! | NVFP4, compressed-tensors | `weight_packed`, the same | `weight_scale` likewise, `weight_global_scale` F32 of one number | e2m1(q) (s / g) |
//!
//! Scales of FP8 are F32, BF16 or F16. All multiply, `weight_scale_inv` too, but for `weight_global_scale`, which divides.
//! Blocks have the sizes that the configuration says, 128 x 128 where it says nothing, and those at the ends of rows and
//! columns may be cut short. `input_scale` and `input_global_scale` are of activations, which are not rounded in this way here.

mod config;
mod decode;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::error::{clipped, Error, Result};
use crate::folder::{Dtype, TensorInfo};
use crate::mlx;

pub(crate) use config::Declared;

/// What stands for `.weight` in NVFP4 of compressed-tensors.
const PACKED: &str = ".weight_packed";

/// Ends of the names of a quantized matrix' parts, `.weight` aside.
pub(crate) const COMPANIONS: [&str; 7] = [
    PACKED,
    ".weight_scale",
    ".weight_scale_inv",
    ".weight_scale_2",
    ".weight_global_scale",
    ".input_scale",
    ".input_global_scale",
];

/// Numbers of NVFP4 that share a scale.
const GROUP: usize = 16;

/// What tells other formats, by the end of a name.
const FOREIGN: [(&str, &str); 11] = [
    (".qweight", "GPTQ or AWQ"),
    (".qzeros", "GPTQ or AWQ"),
    (".g_idx", "GPTQ"),
    (".weight_g_idx", "compressed-tensors with groups in another order"),
    (".weight_shape", "compressed-tensors, whole numbers"),
    (".weight_zero_point", "compressed-tensors with zero points"),
    (".pre_quant_scale", "AWQ of ModelOpt"),
    (".weight.absmax", "bitsandbytes"),
    (".weight.quant_map", "bitsandbytes"),
    (".weight.SCB", "bitsandbytes of 8 bits"),
    (".SCB", "bitsandbytes of 8 bits"),
];

/// How the names of floats below 16 bits begin.
const SMALL_FLOATS: [&str; 3] = ["F8_", "F6_", "F4"];

/// How the scales of a matrix lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scheme {
    /// FP8, one scale.
    One,
    /// FP8, a scale a row.
    Rows,
    /// FP8, a scale a block of so many rows and columns.
    Blocks([usize; 2]),
    /// NVFP4.
    Nvfp4,
}

impl Scheme {
    /// What may occur where nothing is said.
    const ALL: [Self; 4] = [Self::One, Self::Rows, Self::Blocks([128, 128]), Self::Nvfp4];

    /// Rows and columns that share a scale of a matrix of FP8.
    fn block(self, [rows, columns]: [usize; 2]) -> [usize; 2] {
        match self {
            Self::Blocks([height, width]) => [height.min(rows), width.min(columns)],
            Self::Rows => [1, columns],
            _ => [rows, columns],
        }
    }

    /// Whether scales of FP8 have the shape that this asks for.
    fn fits(self, shape: [usize; 2], scales: &[usize]) -> bool {
        match self {
            Self::One => matches!(scales, [] | [1] | [1, 1]),
            Self::Rows => matches!(*scales, [rows] | [rows, 1] if rows == shape[0]),
            Self::Blocks(_) => *scales == blocks(shape, self.block(shape)),
            Self::Nvfp4 => false,
        }
    }

    /// The shape of scales of FP8, in words.
    fn expected(self, shape: [usize; 2]) -> String {
        match self {
            Self::One => "one number".to_owned(),
            Self::Rows => format!("[{}, 1] (by row)", shape[0]),
            _ => format!("{:?} ({self})", blocks(shape, self.block(shape))),
        }
    }
}

impl std::fmt::Display for Scheme {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::One => f.write_str("FP8 of one scale"),
            Self::Rows => f.write_str("FP8 by row"),
            Self::Blocks([rows, columns]) => write!(f, "FP8 in blocks of {rows} x {columns}"),
            Self::Nvfp4 => f.write_str("NVFP4"),
        }
    }
}

/// Blocks down and across.
fn blocks(shape: [usize; 2], block: [usize; 2]) -> [usize; 2] {
    [shape[0].div_ceil(block[0]), shape[1].div_ceil(block[1])]
}

/// The tensors of one quantized matrix.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Parts<'a> {
    /// Its numbers: `weight` or `weight_packed`.
    pub(crate) weight: &'a TensorInfo,
    scale: &'a TensorInfo,
    /// Of NVFP4.
    global: Option<Global<'a>>,
}

/// The scale of all groups of a matrix.
#[derive(Debug, Clone, Copy)]
struct Global<'a> {
    tensor: &'a TensorInfo,
    /// Whether scales are divided by it.
    divides: bool,
}

impl<'a> Parts<'a> {
    /// Finds the parts of the matrix whose names begin with `path`, if it is quantized in one of these ways.
    ///
    /// # Errors
    /// Parts that are missing, or that belong to nothing.
    pub(crate) fn find(path: &str, find: impl Fn(&str) -> Option<&'a TensorInfo>) -> Result<Option<Self>> {
        let part = |end: &str| find(&format!("{path}{end}"));
        let (plain, packed) = (part(".weight"), part(PACKED));
        let scales = [
            ".weight_scale",
            ".weight_scale_inv",
            ".weight_scale_2",
            ".weight_global_scale",
        ]
        .map(part);
        let [scale, inverse, second, divisor] = scales;
        let found = match (plain, packed) {
            (Some(_), Some(packed)) => {
                return Err(refused(
                    packed,
                    "there is a `weight` beside it; expected one of both",
                ))
            }
            (None, Some(weight)) => Self {
                weight,
                scale: beside(weight, scale, "weight_scale")?,
                global: Some(Global {
                    tensor: beside(weight, divisor, "weight_global_scale")?,
                    divides: true,
                }),
            },
            (Some(weight), None) if is(weight, "U8") => Self {
                weight,
                scale: beside(weight, scale, "weight_scale")?,
                global: Some(Global {
                    tensor: beside(weight, second, "weight_scale_2")?,
                    divides: false,
                }),
            },
            (Some(weight), None) if is(weight, "F8_E4M3") => Self {
                weight,
                scale: beside(weight, scale.or(inverse), "weight_scale_inv` or `weight_scale")?,
                global: None,
            },
            (plain, None) => {
                let left = scales.into_iter().flatten();
                let inputs = [".input_scale", ".input_global_scale"]
                    .map(part)
                    .into_iter()
                    .flatten();
                return match (left.chain(inputs).next(), plain) {
                    (None, _) => Ok(None),
                    (Some(scale), Some(weight)) => Err(refused(
                        scale,
                        &format!(
                            "nothing uses it: {} beside it is {}; expected F8_E4M3 or U8",
                            weight.name, weight.dtype
                        ),
                    )),
                    (Some(scale), None) => Err(refused(
                        scale,
                        "there is no `weight` beside this scale; the checkpoint is incomplete",
                    )),
                };
            }
        };
        let is_used = |scale: &TensorInfo| {
            let global = found.global.map(|global| &global.tensor.name);
            scale.name == found.scale.name || Some(&scale.name) == global
        };
        match scales.into_iter().flatten().find(|scale| !is_used(scale)) {
            Some(left) => Err(refused(
                left,
                &format!(
                    "nothing uses it: {} in {} is scaled by {}",
                    found.weight.name, found.weight.dtype, found.scale.name
                ),
            )),
            None => Ok(Some(found)),
        }
    }

    /// Rows and columns of the matrix.
    pub(crate) fn shape(self) -> Result<[usize; 2]> {
        let per_byte = if self.global.is_some() { 2 } else { 1 };
        match *self.weight.shape {
            [rows, bytes] if rows > 0 && (1..=usize::MAX / 2).contains(&bytes) => Ok([rows, bytes * per_byte]),
            _ => Err(refused(
                self.weight,
                &format!(
                    "expected a matrix of two dimensions, found shape {:?}; of experts in this format, those are read that are \
                     stored each on its own",
                    self.weight.shape
                ),
            )),
        }
    }

    /// Checks parts against one another and against what the configuration says, and tells how scales lie.
    pub(crate) fn check(self, said: Option<&Declared>) -> Result<Scheme> {
        let shape = self.shape()?;
        let allowed = said.map_or(&Scheme::ALL[..], Declared::schemes);
        let own = |scheme: &&Scheme| (**scheme == Scheme::Nvfp4) == self.global.is_some();
        let possible: Vec<Scheme> = allowed.iter().filter(own).copied().collect();
        if let (true, Some(said)) = (possible.is_empty(), said) {
            let found = if self.global.is_some() { "NVFP4" } else { "FP8" };
            return Err(refused(self.weight, &format!("it is {found}, but {said}")));
        }
        match self.global {
            Some(global) => self.check_nvfp4(shape, global.tensor),
            None => self.check_fp8(shape, &possible, said),
        }
    }

    fn check_nvfp4(self, [rows, columns]: [usize; 2], global: &TensorInfo) -> Result<Scheme> {
        let groups = [rows, columns / GROUP];
        if !columns.is_multiple_of(GROUP) || self.scale.shape != groups || !is(self.scale, "F8_E4M3") {
            return Err(refused(
                self.scale,
                &format!(
                    "expected a scale in F8_E4M3 for each {GROUP} of the {columns} numbers in a row of {}, {groups:?}, \
                     found {:?} {}",
                    self.weight.name, self.scale.shape, self.scale.dtype
                ),
            ));
        }
        if global.dtype != Dtype::F32 || !Scheme::One.fits([rows, columns], &global.shape) {
            return Err(refused(
                global,
                &format!(
                    "expected one number in F32, found {:?} {}",
                    global.shape, global.dtype
                ),
            ));
        }
        Ok(Scheme::Nvfp4)
    }

    fn check_fp8(self, shape: [usize; 2], possible: &[Scheme], said: Option<&Declared>) -> Result<Scheme> {
        let scale = self.scale;
        if matches!(scale.dtype, Dtype::Other(_)) {
            return Err(refused(
                scale,
                &format!("expected scales in F32, BF16 or F16, found {}", scale.dtype),
            ));
        }
        let fits = |scheme: &&Scheme| scheme.fits(shape, &scale.shape);
        possible.iter().find(fits).copied().ok_or_else(|| {
            let expected: Vec<String> = possible.iter().map(|scheme| scheme.expected(shape)).collect();
            let said = said.map(|said| format!(", since {said}")).unwrap_or_default();
            refused(
                scale,
                &format!(
                    "scales of {} {shape:?}: expected {}{said}, found shape {:?}",
                    self.weight.name,
                    expected.join(" or "),
                    scale.shape
                ),
            )
        })
    }
}

/// Refuses parts that are missing, belong to nothing, or contradict one another or the configuration, and the formats of others.
/// Nothing is read for it but headers.
pub(crate) fn check(folder: &Path, said: Option<&Declared>, tensors: &[&TensorInfo]) -> Result<()> {
    let mut paths = BTreeSet::new();
    for tensor in tensors {
        if let Some(format) = foreign(tensor) {
            return Err(Error::Quantized {
                folder: folder.to_owned(),
                format,
                evidence: format!(
                    "tensor {} ({}) in {}",
                    clipped(&tensor.name),
                    tensor.dtype,
                    tensor.file.display()
                ),
            });
        }
        match path_of(tensor) {
            Some(path) => {
                paths.insert(path);
            }
            None if is_small(tensor) && !mlx::COMPANIONS.iter().any(|end| tensor.name.ends_with(end)) => {
                return Err(refused(
                    tensor,
                    &format!(
                        "{} is read where it is the `weight` of one matrix; of experts in this format, those are read that are \
                         stored each on its own",
                        tensor.dtype
                    ),
                ))
            }
            None => {}
        }
    }
    let by_name: BTreeMap<&str, &TensorInfo> = tensors.iter().map(|t| (t.name.as_str(), *t)).collect();
    for path in paths {
        if let Some(parts) = Parts::find(path, |name| by_name.get(name).copied())? {
            parts.check(said)?;
        }
    }
    Ok(())
}

/// What begins the names of the matrix that a tensor may be a part of.
pub(crate) fn path_of(tensor: &TensorInfo) -> Option<&str> {
    let companion = COMPANIONS.iter().find_map(|end| tensor.name.strip_suffix(end));
    companion.or_else(|| tensor.name.strip_suffix(".weight").filter(|_| is_small(tensor)))
}

/// Whether a tensor has the type of a quantized matrix' numbers.
fn is_small(tensor: &TensorInfo) -> bool {
    is(tensor, "F8_E4M3") || is(tensor, "U8")
}

/// The format that a tensor shows, if it is one that is not read.
fn foreign(tensor: &TensorInfo) -> Option<String> {
    let name = tensor.name.as_str();
    if let Some((_, format)) = FOREIGN.iter().find(|(end, _)| name.ends_with(end)) {
        return Some((*format).to_owned());
    }
    let Dtype::Other(dtype) = &tensor.dtype else {
        return None;
    };
    if name.ends_with(PACKED) && dtype != "U8" {
        return Some("compressed-tensors, whole numbers".to_owned());
    }
    if name.ends_with(".weight_scale") && dtype == "U8" {
        return Some("MXFP4 or MXFP8".to_owned());
    }
    let other_float = SMALL_FLOATS.iter().any(|start| dtype.starts_with(start)) && dtype != "F8_E4M3";
    (other_float || dtype == "I8").then(|| dtype.clone())
}

/// A part that has to be there.
fn beside<'a>(weight: &TensorInfo, part: Option<&'a TensorInfo>, name: &str) -> Result<&'a TensorInfo> {
    part.ok_or_else(|| {
        refused(
            weight,
            &format!(
                "it is {} and there is no `{name}` beside it; the checkpoint is incomplete, or in a format that is not read",
                weight.dtype
            ),
        )
    })
}

/// The name of the tensor that holds a matrix' numbers where they are packed.
pub(crate) fn packed_name(name: &str) -> Option<String> {
    Some(format!("{}{PACKED}", name.strip_suffix(".weight")?))
}

fn is(tensor: &TensorInfo, dtype: &str) -> bool {
    matches!(&tensor.dtype, Dtype::Other(found) if found == dtype)
}

fn refused(tensor: &TensorInfo, reason: &str) -> Error {
    Error::Packed {
        tensor: tensor.name.clone(),
        file: tensor.file.clone(),
        reason: reason.to_owned(),
    }
}
