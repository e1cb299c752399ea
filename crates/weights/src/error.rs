//! What can be wrong with a checkpoint folder, in words that say what to do.

use std::path::{Path, PathBuf};

use crate::folder::TensorInfo;

/// The result of every operation in this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Names shown in a message before the rest is only counted.
const SHOWN: usize = 8;
/// Characters of one foreign string shown in a message.
const SHOWN_CHARS: usize = 240;

/// An error of a checkpoint folder or of the way its tensors were asked for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file or folder could not be opened, mapped or read.
    #[error("cannot read {}: {source}", file.display())]
    Io {
        /// The file or folder.
        file: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },

    /// The path is no folder, or has no configuration.
    #[error("{} is no checkpoint folder: expected a folder with config.json and safetensors files, found {found}", path.display())]
    NoFolder {
        /// The path.
        path: PathBuf,
        /// What is there.
        found: &'static str,
    },

    /// The folder holds no weights in a layout that is read here.
    #[error(
        "{} holds no checkpoint: expected model.safetensors, or shards with model.safetensors.index.json; \
         found {found}; download the whole repository again, or convert it to safetensors",
        folder.display()
    )]
    NoCheckpoint {
        /// The folder.
        folder: PathBuf,
        /// Files in it that look like weights.
        found: String,
    },

    /// A JSON file is not what it should be.
    #[error("{}: expected {expected}, found {found}; download the file again", file.display())]
    Json {
        /// The file.
        file: PathBuf,
        /// What it should have held.
        expected: String,
        /// What it held, or what the parser said.
        found: String,
    },

    /// The index and the shards do not agree, or the index names a file that it may not name.
    #[error("{}: {reason}", index.display())]
    Index {
        /// The index file.
        index: PathBuf,
        /// What is wrong with it.
        reason: String,
    },

    /// Shards that the index names are not in the folder.
    #[error(
        "{} names {} that the folder lacks: {}; the download is incomplete, fetch the missing files",
        index.display(), count(shards.len(), "shard"), list(shards)
    )]
    MissingShards {
        /// The index file.
        index: PathBuf,
        /// Names of the absent files.
        shards: Vec<String>,
    },

    /// A weight file is not well-formed safetensors.
    #[error("{} is not a valid safetensors file: {reason}; download it again", file.display())]
    Header {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        reason: String,
    },

    /// The checkpoint is quantized.
    #[error(
        "{} is quantized ({format}), as told by {evidence}; expected F32, BF16 or F16 tensors, FP8 (E4M3) or NVFP4 as the Hub has \
         them, or MLX' affine of 2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128, mxfp4, nvfp4 or mxfp8: use such a checkpoint \
         of this model",
        folder.display()
    )]
    Quantized {
        /// The folder.
        folder: PathBuf,
        /// The format, as far as it can be named.
        format: String,
        /// The config key or the tensor that shows it.
        evidence: String,
    },

    /// The parts of a quantized matrix contradict one another or the configuration, or one is missing or damaged.
    #[error("tensor {tensor} in {}: {reason}", file.display())]
    Packed {
        /// The name in the file of the part that shows it.
        tensor: String,
        /// The file.
        file: PathBuf,
        /// What was expected and found.
        reason: String,
    },

    /// The checkpoint is in a layout that cannot be told.
    #[error("{}: {reason}; convert the checkpoint again, or use it as Hugging Face publishes it", folder.display())]
    Layout {
        /// The folder.
        folder: PathBuf,
        /// The tensor that shows it, its shape, and what was expected.
        reason: String,
    },

    /// Tensor names are in no known scheme, or in several at once.
    #[error("{}: {reason}", folder.display())]
    Names {
        /// The folder.
        folder: PathBuf,
        /// The names, and what was expected.
        reason: String,
    },

    /// A tensor that the model needs is not in the checkpoint.
    #[error(
        "{} has no tensor {tensor} (expected with shape {expected:?}); \
         the checkpoint is incomplete or its config.json belongs to another model",
        folder.display()
    )]
    MissingTensor {
        /// The folder.
        folder: PathBuf,
        /// The canonical name.
        tensor: String,
        /// The shape that was asked for.
        expected: Vec<usize>,
    },

    /// A tensor has another shape than the model needs.
    #[error(
        "tensor {tensor} in {}: expected shape {expected:?}, found {found:?}; \
         config.json and the weights do not belong together",
        file.display()
    )]
    Shape {
        /// The name in the file.
        tensor: String,
        /// The file.
        file: PathBuf,
        /// The shape that was asked for.
        expected: Vec<usize>,
        /// The shape in the file.
        found: Vec<usize>,
    },

    /// A tensor has a dtype that is not read.
    #[error(
        "tensor {tensor} in {}: expected dtype F32, BF16 or F16, found {found}; \
         use the unquantized checkpoint of this model",
        file.display()
    )]
    Dtype {
        /// The name in the file.
        tensor: String,
        /// The file.
        file: PathBuf,
        /// The dtype in the file.
        found: String,
    },

    /// A tensor was asked for again.
    #[error("tensor {tensor} was already taken or discarded; a model takes each tensor once")]
    TakenTwice {
        /// The canonical name.
        tensor: String,
    },

    /// Text tensors of the checkpoint that the model did not take.
    #[error(
        "{} holds {} that the model does not use: {}; config.json belongs to another model, \
         or this model kind is not supported",
        folder.display(), count(tensors.len(), "text tensor"), list(tensors)
    )]
    Unused {
        /// The folder.
        folder: PathBuf,
        /// Their names in the files, in name order.
        tensors: Vec<String>,
    },

    /// A file is not well-formed GGUF.
    #[error("{} is not a valid GGUF file: {reason}; download it again", file.display())]
    Gguf {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        reason: String,
    },

    /// A value in the metadata of a GGUF file is missing or not what it should be.
    #[error("{}: metadata key {key}: expected {expected}, found {found}; use a file of a supported model", file.display())]
    GgufKey {
        /// The file.
        file: PathBuf,
        /// The key.
        key: String,
        /// What it should have held.
        expected: String,
        /// What it held.
        found: String,
    },

    /// A tensor of a GGUF file cannot be used.
    #[error("tensor {tensor} in {}: {reason}", file.display())]
    GgufTensor {
        /// The name in the file.
        tensor: String,
        /// The file.
        file: PathBuf,
        /// What is wrong with it, and what to do.
        reason: String,
    },

    /// A tensor could not be made from the file's bytes.
    #[error("tensor {tensor}: {source}")]
    Tensor {
        /// The name in the file.
        tensor: String,
        /// What candle said.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl Error {
    pub(crate) fn io(file: &Path, source: std::io::Error) -> Self {
        Self::Io {
            file: file.to_owned(),
            source,
        }
    }

    pub(crate) fn json(file: &Path, expected: &str, found: impl std::fmt::Display) -> Self {
        Self::Json {
            file: file.to_owned(),
            expected: expected.to_owned(),
            found: clipped(&found.to_string()),
        }
    }

    pub(crate) fn index(index: &Path, reason: impl Into<String>) -> Self {
        Self::Index {
            index: index.to_owned(),
            reason: reason.into(),
        }
    }

    pub(crate) fn header(file: &Path, reason: impl std::fmt::Display) -> Self {
        Self::Header {
            file: file.to_owned(),
            reason: clipped(&reason.to_string()),
        }
    }

    pub(crate) fn gguf(file: &Path, reason: String) -> Self {
        Self::Gguf {
            file: file.to_owned(),
            reason: clipped(&reason),
        }
    }

    pub(crate) fn gguf_tensor(tensor: &TensorInfo, reason: &str) -> Self {
        Self::GgufTensor {
            tensor: tensor.name.clone(),
            file: tensor.file.clone(),
            reason: reason.to_owned(),
        }
    }

    pub(crate) fn names(folder: &Path, reason: impl Into<String>) -> Self {
        Self::Names {
            folder: folder.to_owned(),
            reason: reason.into(),
        }
    }
}

/// The first few of some names, comma separated, and how many more there are.
pub(crate) fn list<S: AsRef<str>>(names: &[S]) -> String {
    let mut text = names
        .iter()
        .take(SHOWN)
        .map(|name| clipped(name.as_ref()))
        .collect::<Vec<_>>()
        .join(", ");
    if names.len() > SHOWN {
        text.push_str(&format!(" and {} more", names.len() - SHOWN));
    }
    text
}

/// `1 tensor`, `2 tensors`.
pub(crate) fn count(n: usize, noun: &str) -> String {
    format!("{n} {noun}{}", if n == 1 { "" } else { "s" })
}

/// A string from a file, printable and cut to a bounded length.
pub(crate) fn clipped(text: &str) -> String {
    let mut shown: String = text
        .chars()
        .take(SHOWN_CHARS)
        .map(|c| if c.is_control() { '\u{fffd}' } else { c })
        .collect();
    if text.chars().nth(SHOWN_CHARS).is_some() {
        shown.push_str("...");
    }
    shown
}
