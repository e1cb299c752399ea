//! What belongs to a checkpoint beside its weights.

use std::path::Path;

use recant_layers::GroupFormat;
use recant_weights::Folder;
use serde_json::{json, Value};

use super::put;
use crate::{Result, Text};

/// Files that go along with the weights, as far as there are any.
const FILES: [&str; 10] = [
    "LICENSE",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
];

/// Writes the configuration, the tokenizer and the template.
pub(super) fn write(folder: &Folder, format: GroupFormat, target: &Path) -> Result<()> {
    let mut config = config(folder.config(), format);
    if folder.is_gguf() {
        complete(&mut config);
        put_json(target, "config.json", &config)?;
        return from_metadata(folder, target);
    }
    put_json(target, "config.json", &config)?;
    for file in FILES {
        let from = folder.path().join(file);
        if from.is_file() {
            put(&target.join(file), |path| std::fs::copy(&from, path).map(|_| ()))?;
        }
    }
    Ok(())
}

/// The files that a model in GGUF has as metadata.
fn from_metadata(folder: &Folder, target: &Path) -> Result<()> {
    let text = Text::of(folder)?;
    put(&target.join("tokenizer.json"), |path| {
        let saved = text.tokenizer().save(path, false);
        saved.map_err(std::io::Error::other)
    })?;
    // What transformers reads a `tokenizer.json` with, whatever the model.
    let mut config =
        json!({"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": false});
    for (key, value) in folder
        .tokenizer_config()
        .and_then(Value::as_object)
        .into_iter()
        .flatten()
    {
        // One template stands for itself.
        let single = match value.as_array().map(Vec::as_slice) {
            Some([only]) if key == "chat_template" => &only["template"],
            _ => value,
        };
        config[key] = single.clone();
    }
    put_json(target, "tokenizer_config.json", &config)
}

/// The configuration with the format in it, twice, as conversions of MLX have it, and without that of the source.
fn config(config: &Value, format: GroupFormat) -> Value {
    let quantization = json!({"group_size": format.group, "bits": format.bits, "mode": "affine"});
    let mut config = config.clone();
    for key in ["quantization", "quantization_config"] {
        config[key] = quantization.clone();
        if let Some(text) = config.get_mut("text_config").and_then(Value::as_object_mut) {
            text.remove(key);
        }
    }
    config
}

/// Adds what other programs ask for that metadata do not say, since it is the same for all models in GGUF, or say elsewhere.
fn complete(config: &mut Value) {
    let mut fields = Vec::new();
    for name in ["rope_theta", "partial_rotary_factor"] {
        fields.push((name, config["rope_parameters"][name].clone()));
    }
    if config.get("num_experts").is_some() {
        fields.extend([
            ("decoder_sparse_step", json!(1)),
            ("mlp_only_layers", json!([])),
            ("norm_topk_prob", json!(true)),
        ]);
    }
    for (name, value) in fields {
        config[name] = value;
    }
}

fn put_json(target: &Path, file: &str, value: &Value) -> Result<()> {
    put(&target.join(file), |path| std::fs::write(path, value.to_string()))
}
