//! Checkpoint folders written for one test.
#![allow(dead_code, unreachable_pub)]

use std::path::{Path, PathBuf};

use recant_weights::{Error, Folder, Stored, StoredGroups};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{json, Value};
use tempfile::TempDir;

/// One tensor to write. Its bytes follow from its name, so that no two tensors are alike.
#[derive(Clone)]
pub struct Spec {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
}

pub fn tensor(name: &str, dtype: Dtype, shape: &[usize]) -> Spec {
    Spec {
        name: name.to_owned(),
        dtype,
        shape: shape.to_vec(),
    }
}

pub fn bf16(name: &str, shape: &[usize]) -> Spec {
    tensor(name, Dtype::BF16, shape)
}

impl Spec {
    pub fn bytes(&self) -> Vec<u8> {
        let seed = self
            .name
            .bytes()
            .fold(17u32, |h, b| h.wrapping_mul(31).wrapping_add(b.into()));
        let length = self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8;
        (0..length as u32)
            .map(|i| (seed.wrapping_add(i).wrapping_mul(2_654_435_761) >> 24) as u8)
            .collect()
    }
}

pub fn write(file: &Path, tensors: &[Spec]) {
    let data: Vec<Vec<u8>> = tensors.iter().map(Spec::bytes).collect();
    let views = tensors.iter().zip(&data).map(|(spec, data)| {
        let view = TensorView::new(spec.dtype, spec.shape.clone(), data).unwrap();
        (spec.name.as_str(), view)
    });
    safetensors::serialize_to_file(views, None, file).unwrap();
}

/// A small language model: two linear layers' worth of names under a prefix, and an output head.
pub fn model(prefix: &str, head: &str) -> Vec<Spec> {
    let mut tensors = vec![
        bf16(&format!("{prefix}embed_tokens.weight"), &[8, 4]),
        bf16(&format!("{prefix}norm.weight"), &[4]),
        bf16(head, &[8, 4]),
    ];
    for layer in 0..2 {
        let layer = format!("{prefix}layers.{layer}.");
        tensors.push(tensor(&format!("{layer}linear_attn.A_log"), Dtype::F32, &[2]));
        tensors.push(bf16(&format!("{layer}linear_attn.conv1d.weight"), &[6, 1, 4]));
        tensors.push(tensor(&format!("{layer}mlp.up_proj.weight"), Dtype::F16, &[3, 4]));
    }
    tensors
}

/// The canonical names and shapes of [`model`].
pub fn parts() -> Vec<(String, Vec<usize>)> {
    model("", "lm_head.weight")
        .into_iter()
        .map(|spec| (spec.name, spec.shape))
        .collect()
}

pub fn raw() -> Vec<Spec> {
    model("model.language_model.", "lm_head.weight")
}

/// A folder that is gone after the test.
pub struct Checkpoint(pub TempDir);

impl Checkpoint {
    /// A folder with a configuration and nothing else.
    pub fn empty() -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        folder.json("config.json", &json!({"model_type": "qwen3_5"}));
        folder
    }

    pub fn single(tensors: &[Spec]) -> Self {
        let folder = Self::empty();
        write(&folder.file("model.safetensors"), tensors);
        folder
    }

    /// Shards with an index that is right about them.
    pub fn sharded(shards: &[(&str, &[Spec])]) -> Self {
        let folder = Self::empty();
        let mut map = serde_json::Map::new();
        for (name, tensors) in shards {
            write(&folder.file(name), tensors);
            for spec in *tensors {
                map.insert(spec.name.clone(), json!(name));
            }
        }
        folder.index(Value::Object(map));
        folder
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn json(&self, name: &str, value: &Value) {
        std::fs::write(self.file(name), value.to_string()).unwrap();
    }

    pub fn index(&self, weight_map: Value) {
        self.json("model.safetensors.index.json", &json!({"weight_map": weight_map}));
    }

    #[track_caller]
    pub fn open(&self) -> Folder {
        Folder::open(self.0.path()).unwrap_or_else(|error| panic!("refused: {error}"))
    }

    /// The error that the folder is refused with, at opening.
    #[track_caller]
    pub fn refused(&self) -> Error {
        Folder::open(self.0.path()).expect_err("opened")
    }

    /// The error that the folder's weights are refused with.
    #[track_caller]
    pub fn weights_refused(&self) -> Error {
        self.open().weights().expect_err("weights were given")
    }
}

#[track_caller]
pub fn says(error: &Error, parts: &[&str]) {
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
}

/// The groups that a matrix is stored in.
#[track_caller]
pub fn groups(stored: Stored) -> StoredGroups {
    match stored {
        Stored::Groups(groups) => groups,
        other => panic!("{other:?}"),
    }
}
