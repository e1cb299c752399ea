//! Checkpoints written for a test, and what becomes of them.

use std::collections::BTreeMap;
use std::path::Path;

use recant::candle::{DType, Tensor};
use recant::core::{CacheOptions, LanguageModel, Rows, Segment};
use recant::LoadOptions;
use recant_layers::HybridModel;
use recant_weights::{Folder, Inventory, Source};
use serde_json::{json, Value};
use tempfile::TempDir;

use super::{bits, seeded, Result};

/// Where the Hub puts the text model.
pub const HUB: &str = "model.language_model.";

pub type Tensors = BTreeMap<String, Tensor>;

/// Remembers what a model asks for: canonical names and tensors.
struct Recorder {
    source: seeded::Seeded,
    tensors: Tensors,
}

impl Source for Recorder {
    fn has(&self, name: &str) -> bool {
        self.source.has(name)
    }

    fn take(&mut self, name: &str, shape: &[usize]) -> recant_weights::Result<Tensor> {
        let tensor = self.source.take(name, shape)?;
        self.tensors.insert(name.to_owned(), tensor.clone());
        Ok(tensor)
    }

    fn discard(&mut self, _name: &str) {}
}

/// The tensors of a tiny model, by canonical name.
pub fn tensors(config: &Value) -> Result<Tensors> {
    let mut recorder = Recorder {
        source: seeded::Seeded {
            seed: 5,
            dtype: DType::F32,
        },
        tensors: Tensors::new(),
    };
    seeded::model_of(config, "", &mut recorder, &recant::LoadOptions::default())?;
    Ok(recorder.tensors)
}

/// Puts names behind a prefix; the head's stays at the root.
pub fn prefixed(tensors: &Tensors, prefix: &str, head: &str) -> Tensors {
    let name = |name: &String| match name.as_str() {
        "lm_head.weight" => format!("{head}lm_head.weight"),
        other => format!("{prefix}{other}"),
    };
    tensors.iter().map(|(n, t)| (name(n), t.clone())).collect()
}

pub fn write(dir: &Path, config: &Value, tensors: &Tensors) -> Result<()> {
    std::fs::write(dir.join("config.json"), config.to_string())?;
    safetensors::serialize_to_file(tensors.iter(), None, &dir.join("model.safetensors"))?;
    Ok(())
}

/// In two shards with an index.
pub fn write_shards(dir: &Path, config: &Value, tensors: &Tensors) -> Result<()> {
    std::fs::write(dir.join("config.json"), config.to_string())?;
    let mut map = serde_json::Map::new();
    for shard in 0..2 {
        let file = format!("model-0000{}-of-00002.safetensors", shard + 1);
        let part: Tensors = tensors
            .iter()
            .enumerate()
            .filter(|(i, _)| i % 2 == shard)
            .map(|(_, (n, t))| (n.clone(), t.clone()))
            .collect();
        map.extend(part.keys().map(|name| (name.clone(), json!(file))));
        safetensors::serialize_to_file(part.iter(), None, &dir.join(&file))?;
    }
    let index = json!({"metadata": {}, "weight_map": map});
    std::fs::write(dir.join("model.safetensors.index.json"), index.to_string())?;
    Ok(())
}

pub fn load(dir: &Path) -> Result<(HybridModel, Inventory)> {
    let folder = Folder::open(dir)?;
    let family = seeded::family(folder.config());
    Ok(HybridModel::load(
        family,
        &folder,
        &LoadOptions::default(),
        &mut |_, _| {},
    )?)
}

pub fn refusal(dir: &Path) -> String {
    match load(dir) {
        Ok(_) => "loaded".to_owned(),
        Err(error) => error.to_string(),
    }
}

/// The logits of 60 tokens: long enough that a wrong rotation shows.
pub fn logits(model: &HybridModel) -> Result<Vec<u32>> {
    let tokens: Vec<u32> = (0..60).map(|i| (7 * i + 3) % 250).collect();
    let mut caches = model.new_caches(&CacheOptions::default())?;
    let output = model.forward(&mut [Segment::new(&tokens, &mut caches, Rows::All)])?;
    bits(output.segments[0].logits()?)
}

/// Logits of the model that a folder written by `write` holds.
pub fn logits_of(write: impl FnOnce(&Path) -> Result<()>) -> Result<Vec<u32>> {
    let dir = TempDir::new()?;
    write(dir.path())?;
    logits(&load(dir.path())?.0)
}

pub fn refusal_of(write: impl FnOnce(&Path) -> Result<()>) -> Result<String> {
    let dir = TempDir::new()?;
    write(dir.path())?;
    Ok(refusal(dir.path()))
}
