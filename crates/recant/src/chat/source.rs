//! Where a checkpoint keeps its template.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::DEFAULT;
use crate::{limited, Error, Result};

/// Bytes of the longest file that is read: those that models have are a thousand times shorter.
const MOST: u64 = 16 << 20;

/// Tokens that templates know by these names.
const TOKENS: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];

pub(super) struct Found {
    pub(super) path: PathBuf,
    /// By name.
    pub(super) templates: Vec<(String, String)>,
    pub(super) tokens: Map<String, Value>,
}

/// The template of a folder, if it has one.
pub(super) fn find(folder: &Path) -> Result<Option<Found>> {
    let config_path = folder.join("tokenizer_config.json");
    let config = read_json(&config_path)?.unwrap_or(Value::Null);
    let tokens = tokens(&config);
    let found = |path: PathBuf, templates| {
        Ok(Some(Found {
            path,
            templates,
            tokens,
        }))
    };
    let path = folder.join("chat_template.jinja");
    if let Some(source) = read(&path)? {
        return found(path, vec![(DEFAULT.to_owned(), source)]);
    }
    let legacy_path = folder.join("chat_template.json");
    let legacy = read_json(&legacy_path)?.unwrap_or(Value::Null);
    for (path, json) in [(config_path, config), (legacy_path, legacy)] {
        if let Some(templates) = templates(&path, &json["chat_template"])? {
            return found(path, templates);
        }
    }
    Ok(None)
}

/// The template of a checkpoint whose configuration of the tokenizer is not in a file of its own.
pub(super) fn in_config(path: &Path, config: &Value) -> Result<Option<Found>> {
    let templates = templates(path, &config["chat_template"])?;
    Ok(templates.map(|templates| Found {
        path: path.to_owned(),
        templates,
        tokens: tokens(config),
    }))
}

/// One template, or several with names.
fn templates(path: &Path, value: &Value) -> Result<Option<Vec<(String, String)>>> {
    let named = match value {
        Value::Null => return Ok(None),
        Value::String(source) => return Ok(Some(vec![(DEFAULT.to_owned(), source.clone())])),
        Value::Array(named) => named,
        _ => {
            return Err(wrong(
                path,
                "`chat_template` is neither a string nor a list of named templates",
            ))
        }
    };
    let mut templates = Vec::new();
    for entry in named {
        let (Some(name), Some(source)) = (entry["name"].as_str(), entry["template"].as_str()) else {
            let reason = "an entry of `chat_template` lacks `name` or `template`, both strings";
            return Err(wrong(path, reason));
        };
        templates.push((name.to_owned(), source.to_owned()));
    }
    if !templates.iter().any(|(name, _)| name == DEFAULT) {
        let names: Vec<&str> = templates.iter().map(|(name, _)| name.as_str()).collect();
        let names = names.join(", ");
        return Err(wrong(
            path,
            format!("none of the chat templates is named \"{DEFAULT}\"; there are: {names}"),
        ));
    }
    Ok(Some(templates))
}

fn tokens(config: &Value) -> Map<String, Value> {
    let token = |name: &str| {
        let token = &config[name];
        let content = token.as_str().or_else(|| token["content"].as_str())?;
        Some((name.to_owned(), content.into()))
    };
    TOKENS.into_iter().filter_map(token).collect()
}

fn read_json(path: &Path) -> Result<Option<Value>> {
    let parse =
        |text: String| serde_json::from_str(&text).map_err(|e| wrong(path, format!("is no JSON: {e}")));
    read(path)?.map(parse).transpose()
}

fn read(path: &Path) -> Result<Option<String>> {
    let text = limited::read(path, MOST)
        .and_then(|bytes| String::from_utf8(bytes).map_err(|e| io::Error::new(ErrorKind::InvalidData, e)));
    match text {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(wrong(path, format!("cannot be read: {error}"))),
    }
}

fn wrong(path: &Path, reason: impl Into<String>) -> Error {
    Error::ChatTemplate {
        path: path.to_owned(),
        reason: reason.into(),
    }
}
