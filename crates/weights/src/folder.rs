//! A checkpoint folder: its JSON files, its tensors and its fingerprint.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use memmap2::Mmap;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::error::{list, Error, Result};
use crate::format;
use crate::gguf::{self, Gguf};
use crate::header;
use crate::index::Index;
use crate::mapping;
use crate::weights::Weights;

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
/// Longest index read, in bytes: the limit of a header, which holds more of each tensor.
const MAX_INDEX: u64 = 100_000_000;
/// Longest configuration read, in bytes. As a tree of values it can take a hundred times that in memory.
const MAX_CONFIG: u64 = 16 << 20;
/// Bytes hashed at each end of a tensor.
const SAMPLE: usize = 4096;

/// How the elements of a tensor are stored.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Dtype {
    /// 32-bit floats.
    F32,
    /// bfloat16.
    BF16,
    /// 16-bit floats.
    F16,
    /// Anything else, by the name the file gives it, such as `F8_E4M3` or `U32`: read as a part of a quantized matrix only.
    Other(String),
}

impl From<safetensors::Dtype> for Dtype {
    fn from(dtype: safetensors::Dtype) -> Self {
        match dtype {
            safetensors::Dtype::F32 => Self::F32,
            safetensors::Dtype::BF16 => Self::BF16,
            safetensors::Dtype::F16 => Self::F16,
            other => Self::Other(other.to_string()),
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "F32",
            Self::BF16 => "BF16",
            Self::F16 => "F16",
            Self::Other(name) => name,
        })
    }
}

/// What a header says about one tensor.
#[derive(Debug, Clone)]
pub struct TensorInfo {
    /// Its name in the file.
    pub name: String,
    /// The file that holds it.
    pub file: PathBuf,
    /// How its elements are stored.
    pub dtype: Dtype,
    /// Its dimensions, outermost first.
    pub shape: Vec<usize>,
    /// Which of the folder's maps holds it, and where.
    pub(crate) map: usize,
    pub(crate) bytes: Range<usize>,
}

impl TensorInfo {
    /// Its size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// Where it lies, or a slice of it, in its file's map.
    fn range(&self, slice: Option<Slice>) -> Range<usize> {
        let Range { start, end } = self.bytes;
        match slice {
            Some(Slice { index, count }) => {
                let each = (end - start) / count;
                start + index * each..start + (index + 1) * each
            }
            None => start..end,
        }
    }
}

/// One of the parts that a tensor's first dimension counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Slice {
    pub(crate) index: usize,
    /// How many there are. Not 0, and more than `index`.
    pub(crate) count: usize,
}

/// A checkpoint folder in Hub layout, or a model in GGUF, opened and its headers checked; no tensor data is read yet.
///
/// Weight files stay mapped while it lives; see the [crate's note](crate#memory-mapping).
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    config: Value,
    generation_config: Option<Value>,
    tokenizer_config: Option<Value>,
    /// In name order.
    tensors: Vec<TensorInfo>,
    maps: Vec<Mmap>,
    /// What a checkpoint in GGUF has beside.
    gguf: Option<Gguf>,
    fingerprint: OnceLock<String>,
}

impl Folder {
    /// Opens a folder: reads its JSON files, and parses and checks the header of every weight file.
    ///
    /// With `model.safetensors.index.json` the index alone says which files are read; others beside it are ignored.
    /// Without it, `model.safetensors` is the whole checkpoint.
    ///
    /// A model in GGUF is opened by the path of any of its files, or of a folder without `config.json` that holds one such model
    /// (`mmproj*.gguf` beside it is not read). Its metadata stand for the JSON files.
    ///
    /// # Errors
    ///
    /// A `config.json` that is missing or no JSON object; no weights; a shard that the index names and the folder lacks;
    /// index and shards that disagree about a tensor; a shard name that leaves the folder; a weight file that is cut
    /// short or whose header is malformed. Whether the checkpoint's format is supported is asked by
    /// [`weights`](Self::weights).
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref().to_owned();
        if let Some(file) = gguf_file(&path)? {
            return Self::open_gguf(&file);
        }
        let config_path = path.join("config.json");
        let found = if path.is_dir() {
            (!config_path.exists()).then_some("a folder without config.json")
        } else if path.exists() {
            Some("a file")
        } else {
            Some("nothing at that path")
        };
        if let Some(found) = found {
            return Err(Error::NoFolder { path, found });
        }
        let config = read_optional(&config_path)?.ok_or_else(|| {
            Error::json(
                &config_path,
                "a JSON object with the model's configuration",
                "null",
            )
        })?;

        let mut folder = Self {
            generation_config: read_optional(&path.join("generation_config.json"))?,
            tokenizer_config: read_optional(&path.join("tokenizer_config.json"))?,
            config,
            tensors: Vec::new(),
            maps: Vec::new(),
            gguf: None,
            fingerprint: OnceLock::new(),
            path,
        };
        folder.read_headers()?;
        folder.tensors.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(folder)
    }

    fn open_gguf(file: &Path) -> Result<Self> {
        let gguf::Opened {
            path,
            config,
            tokenizer_config,
            mut tensors,
            maps,
            gguf,
        } = gguf::open(file)?;
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(Self {
            path,
            config,
            generation_config: None,
            tokenizer_config: Some(tokenizer_config),
            tensors,
            maps,
            gguf: Some(gguf),
            fingerprint: OnceLock::new(),
        })
    }

    /// The folder, or the first file of a model in GGUF.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// `config.json`, a JSON object.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// `generation_config.json`, a JSON object. None where the file is absent or holds `null`.
    pub fn generation_config(&self) -> Option<&Value> {
        self.generation_config.as_ref()
    }

    /// `tokenizer_config.json`, a JSON object. None where the file is absent or holds `null`.
    pub fn tokenizer_config(&self) -> Option<&Value> {
        self.tokenizer_config.as_ref()
    }

    /// Where `tokenizer.json` belongs. The file may not exist, and does not where there is a [`vocabulary`](Self::vocabulary).
    pub fn tokenizer_path(&self) -> PathBuf {
        self.path.join("tokenizer.json")
    }

    /// Every tensor of the checkpoint, vision and multi-token prediction included, in name order.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorInfo> {
        self.tensors.iter()
    }

    pub(crate) fn in_name_order(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// A SHA-256 in lower-case hexadecimal that tells checkpoints apart.
    ///
    /// It covers every tensor's name, dtype, shape, and its first and last 4 KiB. It does not depend on the
    /// configuration, the tokenizer, the folder's place, or how the tensors are spread over files.
    ///
    /// Two checkpoints with the same fingerprint have the same tensors up to changes in the middle of tensors above
    /// 8 KiB, so a fine-tune that touches whole matrices shows, a hand edit of one element may not. It is no proof
    /// against someone who wants two checkpoints to look the same. Computed on the first call.
    pub fn fingerprint(&self) -> &str {
        self.fingerprint.get_or_init(|| {
            let mut hash = Sha256::new();
            hash.update(b"recant checkpoint 1\0");
            for tensor in &self.tensors {
                // Lengths go before what they measure, so no two lists of tensors give the same bytes.
                for text in [tensor.name.as_str(), &tensor.dtype.to_string()] {
                    hash.update((text.len() as u64).to_le_bytes());
                    hash.update(text);
                }
                hash.update((tensor.shape.len() as u64).to_le_bytes());
                for &size in &tensor.shape {
                    hash.update((size as u64).to_le_bytes());
                }
                let data = self.data(tensor);
                let head = data.len().min(SAMPLE);
                hash.update(&data[..head]);
                hash.update(&data[head.max(data.len().saturating_sub(SAMPLE))..]);
                // The system reads ahead, and the map holds what it read.
                self.release(tensor, None);
            }
            hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
        })
    }

    /// The checkpoint's tensors under canonical names, each to be taken once.
    ///
    /// # Errors
    ///
    /// [`Error::Quantized`] and [`Error::Layout`] for formats that are not read, [`Error::Names`] where names are in no
    /// known scheme, in several at once, or stand for the same weight twice.
    pub fn weights(&self) -> Result<Weights<'_>> {
        if let Some(gguf) = &self.gguf {
            gguf.check(self.tensors())?;
            return Weights::new(self);
        }
        format::check(&self.path, &self.config, &self.tensors)?;
        Weights::new(self)
    }

    /// Whether it is a model in GGUF.
    pub fn is_gguf(&self) -> bool {
        self.gguf.is_some()
    }

    pub(crate) fn gguf(&self) -> Option<&Gguf> {
        self.gguf.as_ref()
    }

    /// The metadata of a model in GGUF.
    pub(crate) fn gguf_metadata(&self) -> Option<gguf::Metadata<'_>> {
        let gguf = self.gguf.as_ref()?;
        Some(gguf.metadata(&self.path, self.maps.first()?))
    }

    /// A tensor's bytes in the map.
    pub(crate) fn data(&self, tensor: &TensorInfo) -> &[u8] {
        &self.maps[tensor.map][tensor.bytes.clone()]
    }

    /// The bytes of a tensor, or of a slice of it.
    pub(crate) fn slice(&self, tensor: &TensorInfo, slice: Option<Slice>) -> &[u8] {
        &self.maps[tensor.map][tensor.range(slice)]
    }

    /// Takes the pages of a tensor, or of a slice of it, out of the process, whose memory they would seem to be. What is read
    /// again comes again, from the file.
    pub(crate) fn release(&self, tensor: &TensorInfo, slice: Option<Slice>) {
        mapping::release(&self.maps[tensor.map], tensor.range(slice));
    }

    fn read_headers(&mut self) -> Result<()> {
        let index_path = self.path.join(INDEX);
        if let Some(text) = read(&index_path, MAX_INDEX)? {
            let index = Index::parse(&index_path, &text)?;
            let missing: Vec<String> = index
                .shards()
                .into_iter()
                .filter(|shard| !self.path.join(shard).exists())
                .map(str::to_owned)
                .collect();
            if !missing.is_empty() {
                return Err(Error::MissingShards {
                    index: index_path,
                    shards: missing,
                });
            }
            for shard in index.shards() {
                let entries = self.read_header(&self.path.join(shard))?;
                let held: BTreeSet<&str> = entries.iter().map(|tensor| tensor.name.as_str()).collect();
                index.check(&index_path, shard, &held)?;
                self.tensors.extend(entries);
            }
            return Ok(());
        }
        let single = self.path.join(SINGLE);
        if !single.exists() {
            return Err(Error::NoCheckpoint {
                folder: self.path.clone(),
                found: weight_files(&self.path)?,
            });
        }
        self.tensors = self.read_header(&single)?;
        Ok(())
    }

    /// Maps a weight file and reads its header.
    fn read_header(&mut self, file: &Path) -> Result<Vec<TensorInfo>> {
        let map = mapping::map(file)?;
        let tensors = header::parse(file, &map)?
            .into_iter()
            .map(|entry| TensorInfo {
                name: entry.name,
                file: file.to_owned(),
                dtype: entry.dtype.into(),
                shape: entry.shape,
                map: self.maps.len(),
                bytes: entry.bytes,
            })
            .collect();
        self.maps.push(map);
        Ok(tensors)
    }
}

/// The file in GGUF that is meant by a path: a file of that name, or the one model in a folder without `config.json`.
fn gguf_file(path: &Path) -> Result<Option<PathBuf>> {
    if gguf::is_gguf(path) {
        return Ok(Some(path.to_owned()));
    }
    if path.is_dir() && !path.join("config.json").exists() {
        return gguf::model_in(path);
    }
    Ok(None)
}

/// A file's bytes, `most` of them, or None where there is no such file.
fn read(path: &Path, most: u64) -> Result<Option<Vec<u8>>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io(path, error)),
    };
    let mut text = Vec::new();
    file.take(most + 1)
        .read_to_end(&mut text)
        .map_err(|error| Error::io(path, error))?;
    if text.len() as u64 > most {
        return Err(Error::json(
            path,
            &format!("at most {most} bytes of JSON"),
            "a longer file",
        ));
    }
    Ok(Some(text))
}

fn parse_object(path: &Path, text: &[u8]) -> Result<Option<Value>> {
    let value: Value =
        serde_json::from_slice(text).map_err(|error| Error::json(path, "a JSON object", error))?;
    match value {
        Value::Object(_) => Ok(Some(value)),
        Value::Null => Ok(None),
        _ => Err(Error::json(path, "a JSON object", "another kind of value")),
    }
}

/// A JSON object from a file that may be absent; None for that and for `null`.
fn read_optional(path: &Path) -> Result<Option<Value>> {
    match read(path, MAX_CONFIG)? {
        Some(text) => parse_object(path, &text),
        None => Ok(None),
    }
}

/// The files in a folder that look like weights of some kind, for a message.
fn weight_files(folder: &Path) -> Result<String> {
    let mut names: Vec<String> = std::fs::read_dir(folder)
        .map_err(|error| Error::io(folder, error))?
        .filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()))
        .filter(|name| {
            [".safetensors", ".gguf", ".bin", ".pt", ".pth"]
                .iter()
                .any(|end| name.ends_with(end))
        })
        .collect();
    names.sort();
    Ok(if names.is_empty() {
        "no weight file at all".to_owned()
    } else {
        list(&names)
    })
}
