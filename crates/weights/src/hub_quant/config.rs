//! What `config.json` says of matrices in FP8 and NVFP4.
//!
//! It says which ways of scaling may occur, and how large blocks are. Which matrix is stored in which way is told by the matrix:
//! lists of modules are not looked at, since some forget a module. What it says of activations is of no concern.

use std::fmt;
use std::path::Path;

use serde_json::{Map, Value};

use super::{Scheme, GROUP};
use crate::error::{clipped, Error, Result};
use crate::mlx;

/// What ModelOpt calls itself.
const MODELOPT: [&str; 3] = ["modelopt", "modelopt_fp4", "modelopt_mixed"];

/// What a configuration says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Declared {
    /// Where it says so.
    key: String,
    schemes: Vec<Scheme>,
}

impl fmt::Display for Declared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let schemes: Vec<String> = self.schemes.iter().map(Scheme::to_string).collect();
        write!(f, "`{}` in config.json says {}", self.key, schemes.join(", "))
    }
}

impl Declared {
    /// Ways of scaling that may occur.
    pub(super) fn schemes(&self) -> &[Scheme] {
        &self.schemes
    }

    /// What is said, if it is of one of these formats: another is refused elsewhere.
    ///
    /// # Errors
    /// [`Error::Quantized`] where a part of it is not read.
    pub(crate) fn of(folder: &Path, config: &Value) -> Result<Option<Self>> {
        let Some((key, Value::Object(own))) = mlx::quantization(config) else {
            return Ok(None);
        };
        let schemes = match own.get("quant_method").and_then(Value::as_str) {
            Some("fp8") => fp8(own),
            Some("compressed-tensors") => compressed_tensors(own),
            Some(method) if MODELOPT.contains(&method) => modelopt(own),
            _ => return Ok(None),
        };
        match schemes {
            Ok(schemes) => Ok(Some(Self { key, schemes })),
            Err(found) => Err(quantized(folder, &key, found)),
        }
    }

    /// The same, and what is said of single modules is looked at too, of which there may be as many as matrices.
    pub(crate) fn checked(folder: &Path, config: &Value) -> Result<Option<Self>> {
        let declared = Self::of(folder, config)?;
        if let (Some(_), Some((key, value))) = (&declared, mlx::quantization(config)) {
            let modules = value.get("quantized_layers").and_then(Value::as_object);
            for own in modules
                .into_iter()
                .flat_map(Map::values)
                .filter_map(Value::as_object)
            {
                modelopt(own).map_err(|found| quantized(folder, &key, found))?;
            }
        }
        Ok(declared)
    }
}

fn quantized(folder: &Path, key: &str, format: String) -> Error {
    Error::Quantized {
        folder: folder.to_owned(),
        format,
        evidence: format!("`{key}` in config.json"),
    }
}

/// Ways of scaling, or what is said that is not read.
type Found = std::result::Result<Vec<Scheme>, String>;

/// A value that is there.
fn given<'v>(own: &'v Map<String, Value>, key: &str) -> Option<&'v Value> {
    own.get(key).filter(|value| !value.is_null())
}

/// A value that is not read, with its name.
fn unread(what: &str, value: &Value) -> String {
    format!("{what} {}", clipped(&value.to_string()))
}

fn fp8(own: &Map<String, Value>) -> Found {
    if let Some(format) = given(own, "fmt").filter(|format| *format != "e4m3") {
        return Err(unread("quant_method fp8, fmt", format));
    }
    match own.get("weight_block_size") {
        None => Ok(vec![Scheme::Blocks([128, 128]), Scheme::Rows, Scheme::One]),
        // So it is said that there are no blocks.
        Some(Value::Null) => Ok(vec![Scheme::Rows, Scheme::One]),
        Some(said) => {
            Ok(vec![blocks(said).ok_or_else(|| {
                unread("quant_method fp8, weight_block_size", said)
            })?])
        }
    }
}

/// Rows and columns of a block.
fn blocks(said: &Value) -> Option<Scheme> {
    let [rows, columns] = said.as_array()?.as_slice() else {
        return None;
    };
    let size = |value: &Value| usize::try_from(value.as_u64()?).ok().filter(|size| *size > 0);
    Some(Scheme::Blocks([size(rows)?, size(columns)?]))
}

fn compressed_tensors(own: &Map<String, Value>) -> Found {
    let format = |own: &Map<String, Value>| match given(own, "format") {
        Some(said) => match said.as_str() {
            Some("float-quantized" | "naive-quantized" | "nvfp4-pack-quantized" | "mixed-precision") => {
                Ok(())
            }
            _ => Err(unread("quant_method compressed-tensors, format", said)),
        },
        None => Ok(()),
    };
    format(own)?;
    // Either changes what weights or activations are.
    if let Some(said) =
        given(own, "transform_config").filter(|said| !is_empty(said) && !is_empty(&said["config_groups"]))
    {
        return Err(unread("quant_method compressed-tensors, transform_config", said));
    }
    if let Some(said) =
        given(own, "sparsity_config").filter(|said| !is_empty(said) && said["format"] != "dense")
    {
        return Err(unread("quant_method compressed-tensors, sparsity_config", said));
    }
    let mut schemes = Vec::new();
    for group in given(own, "config_groups")
        .and_then(Value::as_object)
        .into_iter()
        .flat_map(Map::values)
    {
        let Some(group) = group.as_object() else {
            return Err(unread("quant_method compressed-tensors, a config group", group));
        };
        format(group)?;
        if let Some(weights) = given(group, "weights") {
            let scheme = of_group(weights)
                .ok_or_else(|| unread("quant_method compressed-tensors, weights", weights))?;
            if !schemes.contains(&scheme) {
                schemes.push(scheme);
            }
        }
    }
    if schemes.is_empty() {
        return Err(
            "quant_method compressed-tensors without a config group that says how weights are stored"
                .to_owned(),
        );
    }
    Ok(schemes)
}

fn is_empty(said: &Value) -> bool {
    match said {
        Value::Object(entries) => entries.is_empty(),
        said => said.is_null(),
    }
}

/// How a group of modules has its weights.
fn of_group(weights: &Value) -> Option<Scheme> {
    if weights["type"] != "float" || weights["symmetric"] == false {
        return None;
    }
    match (weights["num_bits"].as_u64()?, weights["strategy"].as_str()?) {
        (8, "tensor") => Some(Scheme::One),
        (8, "channel") => Some(Scheme::Rows),
        (8, "block") => blocks(&weights["block_structure"]),
        (4, "tensor_group") if weights["group_size"] == GROUP => Some(Scheme::Nvfp4),
        _ => None,
    }
}

fn modelopt(own: &Map<String, Value>) -> Found {
    let said = own.get("quant_algo").unwrap_or(&Value::Null);
    Ok(match said.as_str() {
        Some("FP8") => vec![Scheme::One],
        Some("FP8_PER_CHANNEL_PER_TOKEN") => vec![Scheme::Rows],
        Some("FP8_PB_WO") => vec![Scheme::Blocks([128, 128])],
        Some("NVFP4" | "W4A16_NVFP4") => match given(own, "group_size").filter(|group| **group != GROUP) {
            None => vec![Scheme::Nvfp4],
            Some(group) => return Err(unread("NVFP4 of ModelOpt, group_size", group)),
        },
        Some("MIXED_PRECISION") => Scheme::ALL.to_vec(),
        _ => return Err(unread("quant_method modelopt, quant_algo", said)),
    })
}
