//! What a checkpoint holds, told from its headers: also of one that cannot be loaded.

mod kind;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use recant_layers::{Config, LayerKind};
use recant_weights::{Folder, Part};
use serde::Serialize;
use serde_json::Value;

use crate::loaded::family;
use crate::{ChatTemplate, Text};
pub use kind::ModuleKind;

/// Tensors of a multi-token-prediction head that every one has, of any family.
const HEAD: [&str; 10] = [
    "fc.weight",
    "layers.0.input_layernorm.weight",
    "layers.0.post_attention_layernorm.weight",
    "layers.0.self_attn.k_proj.weight",
    "layers.0.self_attn.o_proj.weight",
    "layers.0.self_attn.q_proj.weight",
    "layers.0.self_attn.v_proj.weight",
    "norm.weight",
    "pre_fc_norm_embedding.weight",
    "pre_fc_norm_hidden.weight",
];
/// Most of a configuration that is looked at where its checkpoint cannot be opened.
const MAX_CONFIG: u64 = 1 << 20;
/// Most layers that a refusal names.
const SHOWN: usize = 8;

/// What a checkpoint holds.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct Report {
    /// The folder or file.
    pub path: PathBuf,
    /// The family that runs it, if one does.
    pub family: Option<String>,
    /// What its configuration calls itself.
    pub model_type: Option<String>,
    /// Its layers, by what mixes tokens in them, as its configuration says.
    pub layers: Option<Layers>,
    /// Numbers of the language model and its output head.
    pub parameters: u64,
    /// Bytes of all its tensors.
    pub bytes: u64,
    /// What it is made of, by kind, those with tensors only.
    pub modules: Vec<Module>,
    /// Numbers of the language model by the form they are stored in.
    pub formats: BTreeMap<String, u64>,
    /// Whether it has a multi-token-prediction head.
    pub mtp: Mtp,
    /// Whether it has a tokenizer that can be read.
    pub tokenizer: bool,
    /// Whether it has a chat template that can be read.
    pub template: bool,
    /// Why it would not be loaded, as far as headers tell. Shapes are compared with the configuration when it is loaded.
    pub refusals: Vec<String>,
    /// What is settled by a rule or left alone.
    pub notes: Vec<String>,
}

/// Layers of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Layers {
    /// All of them.
    pub total: usize,
    /// Gated DeltaNet layers.
    pub linear: usize,
    /// Full attention layers.
    pub full: usize,
}

/// Tensors of one kind.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct Module {
    /// What they are.
    pub kind: ModuleKind,
    /// How many.
    pub tensors: usize,
    /// Numbers in them.
    pub parameters: u64,
    /// Bytes of them, scales included.
    pub bytes: u64,
    /// Numbers by the form they are stored in.
    pub formats: BTreeMap<String, u64>,
}

/// A multi-token-prediction head.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "state")]
#[non_exhaustive]
pub enum Mtp {
    /// There is none.
    Absent,
    /// It is whole, as far as names tell.
    Complete,
    /// Some of its tensors are missing.
    Incomplete {
        /// Names of those, without a prefix.
        missing: Vec<String>,
    },
}

/// Looks into a checkpoint folder or a GGUF file. Nothing but headers and small files is read, and nothing is fetched.
///
/// It fails at nothing: what cannot be read is among the [`refusals`](Report::refusals).
///
/// ```no_run
/// let report = recant::inspect("Qwen3.5-9B");
/// println!("{} parameters, {} bytes", report.parameters, report.bytes);
/// for reason in &report.refusals {
///     println!("refused: {reason}");
/// }
/// ```
pub fn inspect(path: impl AsRef<Path>) -> Report {
    let path = path.as_ref();
    let mut report = Report {
        path: path.to_owned(),
        family: None,
        model_type: None,
        layers: None,
        parameters: 0,
        bytes: 0,
        modules: Vec::new(),
        formats: BTreeMap::new(),
        mtp: Mtp::Absent,
        tokenizer: false,
        template: false,
        refusals: Vec::new(),
        notes: Vec::new(),
    };
    match Folder::open(path) {
        Ok(folder) => {
            report.read_config(&folder);
            report.read_tensors(&folder);
            report.read_text(&folder);
        }
        Err(error) => {
            report.refuse(error);
            report.read_bare_config(path);
        }
    }
    report
}

impl Report {
    fn refuse(&mut self, reason: impl std::fmt::Display) {
        let reason = reason.to_string();
        // One flaw can be met in several places.
        if !self.refusals.contains(&reason) {
            self.refusals.push(reason);
        }
    }

    fn read_config(&mut self, folder: &Folder) {
        self.model_type = folder.config()["model_type"].as_str().map(str::to_owned);
        let family = match family(folder) {
            Ok(family) => family,
            Err(error) => return self.refuse(error),
        };
        self.family = Some(family.name().to_owned());
        match Config::from_json(family, folder.config(), folder.generation_config()) {
            Ok(config) => {
                let full = config.layer_kinds.iter().filter(|kind| **kind == LayerKind::Full);
                let (total, full) = (config.layer_kinds.len(), full.count());
                self.layers = Some(Layers {
                    total,
                    linear: total - full,
                    full,
                });
                self.notes.extend(config.warnings);
            }
            Err(error) => self.refuse(error),
        }
    }

    /// What a configuration says of itself where nothing else can be read.
    fn read_bare_config(&mut self, path: &Path) {
        let read = || {
            let mut text = Vec::new();
            let file = File::open(path.join("config.json"))?;
            file.take(MAX_CONFIG).read_to_end(&mut text).map(|_| text)
        };
        let text = read().unwrap_or_default();
        let config: Value = serde_json::from_slice(&text).unwrap_or_default();
        self.model_type = config["model_type"].as_str().map(str::to_owned);
    }

    fn read_tensors(&mut self, folder: &Folder) {
        let mut modules: BTreeMap<ModuleKind, Module> = BTreeMap::new();
        let (mut head, mut layers) = (BTreeSet::new(), BTreeSet::new());
        let mut names = BTreeSet::new();
        for (tensor, part) in folder.placed() {
            let kind = ModuleKind::of(part);
            let module = modules.entry(kind).or_insert_with(|| Module {
                kind,
                tensors: 0,
                parameters: 0,
                bytes: 0,
                formats: BTreeMap::new(),
            });
            let described = folder.describe(tensor);
            module.tensors += 1;
            module.bytes += tensor.bytes();
            module.parameters += described.parameters;
            self.bytes += tensor.bytes();
            if described.parameters > 0 {
                *module.formats.entry(described.format.clone()).or_default() += described.parameters;
            }
            match part {
                Part::Text(name) => {
                    self.parameters += described.parameters;
                    if described.parameters > 0 {
                        *self.formats.entry(described.format).or_default() += described.parameters;
                    }
                    layers.extend(layer_of(name));
                    names.insert(unpacked(name));
                }
                Part::Mtp(name) => {
                    head.insert(unpacked(name));
                }
                _ => {}
            }
        }
        self.modules = modules.into_values().collect();
        self.mtp = mtp(&head);
        if let Err(error) = folder.weights() {
            self.refuse(error);
        }
        if let Err(error) = folder.mtp() {
            self.refuse(error);
        }
        if let Mtp::Incomplete { missing } = &self.mtp {
            let reason = format!(
                "its multi-token-prediction head cannot be used: it lacks {}",
                missing.join(", ")
            );
            self.notes.push(reason);
        }
        if self.family.is_none() {
            return;
        }
        for name in ["embed_tokens.weight", "norm.weight"] {
            if !names.contains(name) {
                self.refuse(format!("there is no tensor {name}"));
            }
        }
        if let Some(Layers { total, .. }) = self.layers {
            let expected: BTreeSet<usize> = (0..total).collect();
            for (what, odd) in [
                ("there are no tensors of", expected.difference(&layers)),
                ("config.json knows nothing of", layers.difference(&expected)),
            ] {
                let odd: Vec<String> = odd.map(usize::to_string).collect();
                if !odd.is_empty() {
                    let more = if odd.len() > SHOWN { " and more" } else { "" };
                    let shown = odd[..odd.len().min(SHOWN)].join(", ");
                    self.refuse(format!("{what} layers {shown}{more}"));
                }
            }
        }
    }

    fn read_text(&mut self, folder: &Folder) {
        match Text::of(folder) {
            Ok(_) => self.tokenizer = true,
            Err(error) => self.refuse(error),
        }
        match ChatTemplate::of(folder) {
            Ok(found) => self.template = found.is_some(),
            Err(error) => self.notes.push(error.to_string()),
        }
    }
}

fn mtp(names: &BTreeSet<&str>) -> Mtp {
    if names.is_empty() {
        return Mtp::Absent;
    }
    let missing: Vec<String> = HEAD
        .iter()
        .filter(|name| !names.contains(*name))
        .map(|name| (*name).to_owned())
        .chain((!names.iter().any(|name| name.contains(".mlp."))).then(|| "layers.0.mlp".to_owned()))
        .collect();
    if missing.is_empty() {
        Mtp::Complete
    } else {
        Mtp::Incomplete { missing }
    }
}

/// The name of a matrix that some formats call `weight_packed`.
fn unpacked(name: &str) -> &str {
    name.strip_suffix("_packed").unwrap_or(name)
}

/// The number in `layers.N.`.
fn layer_of(name: &str) -> Option<usize> {
    let (number, _) = name.strip_prefix("layers.")?.split_once('.')?;
    number.parse().ok()
}
