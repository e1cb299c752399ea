//! What `config.json` says of quantized matrices.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value};

use super::{is, refused, Mode, Packing, Parts};
use crate::error::{clipped, Error, Result};
use crate::folder::TensorInfo;

/// What a configuration says of one matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Entry {
    /// It is packed so.
    Packed(Packing),
    /// It is not quantized.
    Plain,
}

impl Entry {
    /// Refuses a matrix that cannot be what is said, whatever the length of its rows.
    fn allows(self, parts: Parts<'_>) -> Result<()> {
        match self {
            Self::Packed(said) if !parts.can_be(said) => Err(refused(
                parts.weight,
                &format!(
                    "config.json says that it is {said}, which the shapes of its words {:?} and {} scales {:?} are not",
                    parts.weight.shape, parts.scales.dtype, parts.scales.shape
                ),
            )),
            Self::Packed(_) => Ok(()),
            Self::Plain => Err(refused(
                parts.scales,
                "config.json says that its matrix is not quantized, but here are its scales",
            )),
        }
    }

    /// Refuses a matrix that is packed otherwise.
    pub(crate) fn check(self, parts: Parts<'_>, found: Packing) -> Result<()> {
        self.allows(parts)?;
        match self {
            Self::Packed(said) if said != found => Err(refused(
                parts.weight,
                &format!("config.json says that it is {said}, but its shapes are those of {found}"),
            )),
            _ => Ok(()),
        }
    }
}

/// What `config.json` says of quantization, all of it: `quantization` if there is one, else `quantization_config`, in the root
/// before the text part.
pub(crate) fn quantization(config: &Value) -> Option<(String, &Value)> {
    let parts = [("", Some(config)), ("text_config.", config.get("text_config"))];
    parts
        .into_iter()
        .flat_map(|(place, part)| ["quantization", "quantization_config"].map(|key| (place, part, key)))
        .find_map(|(place, part, key)| {
            let value = part?.get(key).filter(|value| !value.is_null())?;
            Some((format!("{place}{key}"), value))
        })
}

/// What `config.json` says of the matrix whose name in the file begins with `path`, if it names it.
pub(crate) fn entry(folder: &Path, config: &Value, path: &str) -> Result<Option<Entry>> {
    let Some((key, value)) = quantization(config) else {
        return Ok(None);
    };
    match value.get(path) {
        Some(Value::Bool(false)) => Ok(Some(Entry::Plain)),
        Some(Value::Object(own)) => Ok(Some(Entry::Packed(packing(folder, &key, path, own)?))),
        _ => Ok(None),
    }
}

/// What `config.json` says of the matrices that it does not name.
pub(crate) fn global(folder: &Path, config: &Value) -> Result<Option<Entry>> {
    match quantization(config) {
        Some((key, Value::Object(own))) => Ok(Some(Entry::Packed(packing(folder, &key, "", own)?))),
        _ => Ok(None),
    }
}

fn packing(folder: &Path, key: &str, path: &str, own: &Map<String, Value>) -> Result<Packing> {
    let refuse = |found: String| Error::Quantized {
        folder: folder.to_owned(),
        format: found,
        evidence: match path {
            "" => format!("`{key}` in config.json"),
            path => format!("`{key}` of {} in config.json", clipped(path)),
        },
    };
    let mode = match own.get("mode") {
        None | Some(Value::Null) => Mode::Affine,
        Some(said) => said
            .as_str()
            .and_then(Mode::of)
            .ok_or_else(|| refuse(format!("mode {}", clipped(&said.to_string()))))?,
    };
    let (group, bits) = mode.defaults();
    let number = |name: &str, default: usize| match own.get(name) {
        None | Some(Value::Null) => Ok(default),
        Some(said) => said
            .as_u64()
            .and_then(|n| usize::try_from(n).ok())
            .ok_or_else(|| refuse(format!("{name} {}", clipped(&said.to_string())))),
    };
    let packing = Packing {
        mode,
        bits: number("bits", bits)?,
        group: number("group_size", group)?,
    };
    if packing.is_known() {
        Ok(packing)
    } else {
        Err(refuse(packing.to_string()))
    }
}

/// Refuses what is quantized in a way that is not read, and parts and configuration that contradict one another. Nothing is
/// read for it but headers.
pub(crate) fn check(folder: &Path, config: &Value, tensors: &[&TensorInfo]) -> Result<()> {
    check_config(folder, config)?;
    let by_name: BTreeMap<&str, &TensorInfo> = tensors.iter().map(|t| (t.name.as_str(), *t)).collect();
    for tensor in tensors {
        let name = tensor.name.as_str();
        if let Some(path) = name.strip_suffix(".scales") {
            let Some(parts) = Parts::find(path, |name| by_name.get(name).copied())? else {
                continue;
            };
            parts.check()?;
            if let Some(entry) = entry(folder, config, path)? {
                entry.allows(parts)?;
            }
            continue;
        }
        let path = [".biases", ".global_scale", ".weight"]
            .iter()
            .find_map(|end| name.strip_suffix(end));
        let Some(path) = path.filter(|path| !by_name.contains_key(format!("{path}.scales").as_str())) else {
            continue;
        };
        if !name.ends_with(".weight") || is(tensor, "U32") {
            return Err(refused(
                tensor,
                "it is a part of a quantized matrix, but there are no `scales` beside it; the checkpoint is incomplete",
            ));
        }
        if let Some(Entry::Packed(said)) = entry(folder, config, path)? {
            return Err(refused(
                tensor,
                &format!(
                    "config.json says that it is {said}, but it is {} and has no scales",
                    tensor.dtype
                ),
            ));
        }
    }
    Ok(())
}

/// Refuses a configuration of another kind of quantization.
fn check_config(folder: &Path, config: &Value) -> Result<()> {
    let Some((key, value)) = quantization(config) else {
        return Ok(());
    };
    let own = value.as_object().filter(|own| {
        !own.contains_key("quant_method") && own.contains_key("bits") && own.contains_key("group_size")
    });
    match own {
        Some(own) => packing(folder, &key, "", own).map(|_| ()),
        None => Err(Error::Quantized {
            folder: folder.to_owned(),
            format: described(value),
            evidence: format!("`{key}` in config.json"),
        }),
    }
}

/// The format that a quantization entry declares, in a few words.
fn described(quantization: &Value) -> String {
    let said: Vec<String> = [
        "quant_method",
        "fmt",
        "quant_algo",
        "format",
        "mode",
        "bits",
        "group_size",
    ]
    .iter()
    .filter_map(|key| {
        let value = quantization.get(key)?;
        let shown = match value {
            Value::String(text) => clipped(text),
            Value::Number(number) => number.to_string(),
            _ => return None,
        };
        Some(format!("{key} {shown}"))
    })
    .collect();
    if said.is_empty() {
        "format not named".to_owned()
    } else {
        said.join(", ")
    }
}
