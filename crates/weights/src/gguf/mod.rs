//! Checkpoints in GGUF, as llama.cpp's converter writes them for `qwen35`, `qwen35moe` and `qwen3next`.
//!
//! A file is read as though it were the Hub folder of the same model: metadata become a configuration, names become canonical,
//! value heads go back to their order, and quantized blocks become groups of whole numbers. Nothing is rounded on the way;
//! see `blocks.rs` for why. Only a factor of a whole matrix, which can lie beside one of NVFP4, makes f32 products with scales that are
//! rounded once.
//!
//! # What moves where
//!
//! The converter deals value heads out where there are more of them than key heads (`heads.rs`). Rows are moved back in any
//! type. The columns of `ssm_out` lie inside blocks, of which the 256 columns of a k-quant span two heads of 128; but once a
//! block has become groups of 16 or 32 columns, each with a scale of its own, whole groups are moved, and no weight changes.

mod blocks;
mod config;
mod header;
mod heads;
mod matrix;
mod names;
mod parts;
mod steps;
mod types;
mod vocabulary;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use candle_core::{DType, Tensor};
use memmap2::Mmap;
use serde_json::Value as Json;

use crate::error::{count, list, Error, Result};
use crate::folder::{Dtype, TensorInfo};
use crate::{mapping, Stored};
pub(crate) use config::Metadata;
use config::{Facts, Model};
use header::{Header, Value};
use heads::{Heads, Order};
use names::Names;
use types::GgmlType;

pub(crate) use parts::{is_gguf, model_in};
pub use vocabulary::{Cutting, TokenKind, Vocabulary};

/// What a checkpoint in GGUF has beside its tensors.
#[derive(Debug)]
pub(crate) struct Gguf {
    /// The metadata of the first file.
    metadata: BTreeMap<String, Value>,
    heads: Heads,
    names: Names,
    /// What the scales of a matrix are multiplied by, by its name in the file.
    factors: BTreeMap<String, f32>,
}

/// A model in GGUF, its headers parsed and checked.
pub(crate) struct Opened {
    /// Its first file.
    pub(crate) path: PathBuf,
    pub(crate) config: Json,
    pub(crate) tokenizer_config: Json,
    pub(crate) tensors: Vec<TensorInfo>,
    /// The files, in order.
    pub(crate) maps: Vec<Mmap>,
    pub(crate) gguf: Gguf,
}

/// Opens the model that a file belongs to, which may be any part of it.
pub(crate) fn open(file: &Path) -> Result<Opened> {
    let files = parts::all(file)?;
    let maps = files
        .iter()
        .map(|file| mapping::map(file))
        .collect::<Result<Vec<_>>>()?;
    let headers = files
        .iter()
        .zip(&maps)
        .map(|(file, map)| Ok((header::parse(file, map)?, &map[..])))
        .collect::<Result<Vec<_>>>()?;
    parts::check(&files, &headers)?;

    let path = files[0].clone();
    let mut tensors = Vec::new();
    for (map, (file, (header, _))) in files.iter().zip(&headers).enumerate() {
        tensors.extend(header.tensors.iter().map(|entry| TensorInfo {
            name: entry.name.clone(),
            file: file.clone(),
            dtype: dtype(entry.kind),
            shape: entry.shape.clone(),
            map,
            bytes: entry.bytes.clone(),
        }));
    }
    let mut headers = headers.into_iter();
    let (Header { metadata, .. }, bytes) = headers
        .next()
        .ok_or_else(|| Error::gguf(file, "there is no file".to_owned()))?;
    let read = Metadata {
        file: &path,
        values: &metadata,
        bytes,
    };
    let model = Model::read(read)?;
    let heads = model.heads(read)?;
    let names = sorted_names(&path, &tensors, &model)?;
    let config = model.config(read, &heads, facts(read, &path, &tensors, &names)?)?;
    let factors = factors(&tensors, &names, &maps)?;
    Ok(Opened {
        tokenizer_config: vocabulary::tokenizer_config(read)?,
        config,
        tensors,
        gguf: Gguf {
            heads,
            names,
            factors,
            metadata,
        },
        path,
        maps,
    })
}

fn dtype(kind: GgmlType) -> Dtype {
    match kind.name() {
        "F32" => Dtype::F32,
        "F16" => Dtype::F16,
        "BF16" => Dtype::BF16,
        name => Dtype::Other(name.to_owned()),
    }
}

fn sorted_names(path: &Path, tensors: &[TensorInfo], model: &Model) -> Result<Names> {
    let mut all = BTreeSet::new();
    for tensor in tensors {
        if !all.insert(tensor.name.as_str()) {
            return Err(Error::gguf_tensor(
                tensor,
                "another part of the model holds it too",
            ));
        }
    }
    let names = Names::sort(&all, model.trunk, model.blocks);
    if names.unknown.is_empty() {
        return Ok(names);
    }
    Err(Error::names(
        path,
        format!(
            "{} in no known naming: {}; expected the names of llama.cpp's converter for {}",
            count(names.unknown.len(), "tensor"),
            list(&names.unknown),
            model.architecture
        ),
    ))
}

/// The factors of whole matrices, of which each is one number.
fn factors(tensors: &[TensorInfo], names: &Names, maps: &[Mmap]) -> Result<BTreeMap<String, f32>> {
    let mut factors = BTreeMap::new();
    let by_name: BTreeMap<&str, &TensorInfo> = tensors.iter().map(|t| (t.name.as_str(), t)).collect();
    for (weight, name) in &names.factors {
        let (info, of) = (by_name[name.as_str()], by_name[weight.as_str()]);
        let refused = |reason: String| Err(Error::gguf_tensor(info, &reason));
        if of.dtype.to_string() != "NVFP4" {
            return refused(format!(
                "it is a factor of {weight}, which is of type {}; expected NVFP4",
                of.dtype
            ));
        }
        if info.dtype != Dtype::F32 || info.shape != [1] {
            return refused(format!(
                "it is of type {} and shape {:?}; expected one F32 number for all of {weight}: factors of each expert are not \
                 read, use a file of another type of quantization",
                info.dtype, info.shape
            ));
        }
        let mut bytes = [0; 4];
        bytes.copy_from_slice(&maps[info.map][info.bytes.clone()]);
        let factor = f32::from_le_bytes(bytes);
        if !factor.is_finite() {
            return refused(format!("it is {factor}; expected a number"));
        }
        factors.insert(weight.clone(), factor);
    }
    Ok(factors)
}

fn facts(metadata: Metadata<'_>, path: &Path, tensors: &[TensorInfo], names: &Names) -> Result<Facts> {
    let vocab = tensors
        .iter()
        .find(|tensor| tensor.name == "token_embd.weight")
        .map(|tensor| tensor.shape[0])
        .ok_or_else(|| Error::MissingTensor {
            folder: path.to_owned(),
            tensor: "token_embd.weight".to_owned(),
            expected: Vec::new(),
        })?;
    Ok(Facts {
        vocab,
        tied: !names.model.contains_key("lm_head.weight"),
        biased: names.model.keys().any(|name| name.ends_with(".q_proj.bias")),
        head_alone: !names.head.is_empty() && !names.model.keys().any(|name| name.starts_with("layers.")),
        eos: vocabulary::eos(metadata)?,
    })
}

impl Gguf {
    /// The metadata of the first file, whose bytes and path are these.
    pub(crate) fn metadata<'a>(&'a self, file: &'a Path, bytes: &'a [u8]) -> Metadata<'a> {
        Metadata {
            file,
            values: &self.metadata,
            bytes,
        }
    }

    /// The tensors of the model, or of its multi-token-prediction head: canonical name to the name in the file.
    pub(crate) fn names(&self, head: bool) -> BTreeMap<&str, &str> {
        let names = if head { &self.names.head } else { &self.names.model };
        let names = names.iter();
        names
            .map(|(canonical, name)| (canonical.as_str(), name.as_str()))
            .collect()
    }

    /// Refuses tensors of types that are not read, before any is.
    pub(crate) fn check<'a>(&self, tensors: impl Iterator<Item = &'a TensorInfo>) -> Result<()> {
        for tensor in tensors {
            let known = !matches!(tensor.dtype, Dtype::Other(_));
            if !known && blocks::Layout::of(kind(tensor)?).is_none() {
                return Err(Error::gguf_tensor(
                    tensor,
                    &format!(
                        "it is of type {}; expected one of {}: use a file of another type of quantization",
                        tensor.dtype,
                        blocks::READ
                    ),
                ));
            }
        }
        Ok(())
    }

    /// A tensor of floats under its canonical name, `data` being its bytes.
    pub(crate) fn floats(
        &self,
        info: &TensorInfo,
        data: &[u8],
        name: &str,
        shape: &[usize],
    ) -> Result<Tensor> {
        self.expect(info, name, shape)?;
        let size = match *shape {
            // One number a row.
            [count] => [count, 1],
            [ref rows @ .., width] => [rows.iter().product(), width],
            [] => [1, 1],
        };
        let order = self.order(info, name, size)?;
        let floats = matrix::floats(kind(info)?, data, size, &order)
            .map_err(|reason| Error::gguf_tensor(info, &reason))?;
        let told = |source: candle_core::Error| Error::Tensor {
            tensor: info.name.clone(),
            source: source.into(),
        };
        let floats = floats.reshape(shape).map_err(told)?;
        if name.ends_with(".A_log") {
            return logarithm(info, &floats)?.reshape(shape).map_err(told);
        }
        Ok(floats)
    }

    /// A matrix under its canonical name.
    pub(crate) fn matrix(
        &self,
        info: &TensorInfo,
        data: &[u8],
        name: &str,
        shape: [usize; 2],
    ) -> Result<Stored> {
        self.expect(info, name, &shape)?;
        let factor = self.factors.get(&info.name).copied().unwrap_or(1.0);
        matrix::stored(kind(info)?, data, shape, &self.order(info, name, shape)?, factor)
            .map_err(|reason| Error::gguf_tensor(info, &reason))
    }

    /// A matrix of a stack under its canonical name, `data` being the bytes of that matrix.
    pub(crate) fn stacked(
        &self,
        info: &TensorInfo,
        data: &[u8],
        name: &str,
        [count, rows, width]: [usize; 3],
    ) -> Result<Stored> {
        self.expect(info, name, &[count, rows, width])?;
        matrix::stored(kind(info)?, data, [rows, width], &Order::AsStored, 1.0)
            .map_err(|reason| Error::gguf_tensor(info, &reason))
    }

    /// Refuses a tensor that has another shape in the file than one has there of which `shape` is asked.
    fn expect(&self, info: &TensorInfo, name: &str, shape: &[usize]) -> Result<()> {
        let mut expected = shape.to_vec();
        if name.ends_with(".conv1d.weight") {
            expected.retain(|size| *size != 1);
        } else if name.ends_with(".shared_expert_gate.weight") && info.shape.len() == 1 {
            expected.drain(..expected.len().min(1));
        } else if info.name.ends_with(".ssm_ba.weight") && !name.ends_with("_ba.weight") {
            // Two tensors in one.
            if let Some(rows) = expected.first_mut() {
                *rows = rows.saturating_mul(2);
            }
        }
        if info.shape == expected {
            return Ok(());
        }
        Err(Error::Shape {
            tensor: info.name.clone(),
            file: info.file.clone(),
            expected,
            found: info.shape.clone(),
        })
    }

    /// Where the parts of a matrix of this size come from.
    fn order(&self, info: &TensorInfo, name: &str, [rows, width]: [usize; 2]) -> Result<Order> {
        let Some((_, part)) = name.split_once(".linear_attn.") else {
            return Ok(Order::AsStored);
        };
        let pair = !self.heads.dealt;
        let order = match part {
            "in_proj_qkv.weight" | "conv1d.weight" => self.heads.channel_rows(rows),
            "in_proj_z.weight" => self.heads.value_rows(rows),
            "in_proj_b.weight" if pair => self.heads.part_of_pair(0, rows),
            "in_proj_a.weight" if pair => self.heads.part_of_pair(1, rows),
            "in_proj_b.weight" | "in_proj_a.weight" | "A_log" | "dt_bias" => self.heads.head_rows(rows),
            "out_proj.weight" => self.heads.value_columns(width),
            _ => Some(Order::AsStored),
        };
        order.ok_or_else(|| {
            Error::gguf_tensor(
                info,
                "it has another number of rows or columns than the value heads in the metadata have together",
            )
        })
    }
}

/// `A_log` of what the file holds, `-exp(A_log)`: the nearest f32, so that the model's own `-exp` gives back what is in the file
/// to within the rounding of that.
fn logarithm(info: &TensorInfo, stored: &Tensor) -> Result<Tensor> {
    let told = |source: candle_core::Error| Error::Tensor {
        tensor: info.name.clone(),
        source: source.into(),
    };
    let values: Vec<f32> = stored
        .to_dtype(DType::F32)
        .and_then(|x| x.flatten_all()?.to_vec1())
        .map_err(told)?;
    if let Some((head, x)) = values.iter().enumerate().find(|(_, x)| x.is_nan() || **x > 0.0) {
        return Err(Error::gguf_tensor(
            info,
            &format!("value head {head} decays by {x}; expected a number below 0, -exp(A_log)"),
        ));
    }
    let logs: Vec<f32> = values.iter().map(|x| (-f64::from(*x)).ln() as f32).collect();
    Tensor::new(logs, stored.device()).map_err(told)
}

fn kind(info: &TensorInfo) -> Result<GgmlType> {
    let name = info.dtype.to_string();
    GgmlType::named(&name).ok_or_else(|| Error::gguf_tensor(info, &format!("its type {name} is not known")))
}
