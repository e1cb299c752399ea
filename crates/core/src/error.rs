//! What can go wrong with a cache or a model, in words that say what to do.

use std::path::PathBuf;

/// The result of every operation in this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of a cache, a cache stack, a cache file or a model call.
///
/// Unless a method's documentation says otherwise, the caches it was called on are unchanged when it returns one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// More tokens were to be dropped than the cache can give back.
    #[error(
        "cannot trim {asked} tokens: the {kind} holds {len} and can give back {trimmable}; \
         open a checkpoint before feeding tokens that may have to be taken back"
    )]
    Trim {
        /// The cache's kind, as [`Cache::kind`](crate::Cache::kind) names it.
        kind: String,
        /// Tokens asked for.
        asked: usize,
        /// Tokens held.
        len: usize,
        /// Tokens that can be dropped right now.
        trimmable: usize,
    },

    /// A layer's cache refused. The stack as a whole is unchanged unless the method says otherwise.
    #[error("layer {layer} ({kind}): {source}")]
    Layer {
        /// Index of the layer, from 0.
        layer: usize,
        /// The cache's kind.
        kind: String,
        /// What the layer's cache said.
        source: Box<Error>,
    },

    /// Whoever asked for the work does not want it any more.
    #[error("cancelled")]
    Cancelled,

    /// A checkpoint was used where it is not the open one, or opened twice.
    #[error("checkpoint: {0}")]
    Checkpoint(String),

    /// More tokens were fed between a checkpoint and its commit than records are kept for.
    #[error(
        "cannot record {asked} more tokens: {held} are recorded since the checkpoint and the limit is {limit}; \
         commit first, feed fewer tokens, or raise `CacheOptions::record_limit`"
    )]
    RecordLimit {
        /// Tokens in the call.
        asked: usize,
        /// Records held since the checkpoint.
        held: usize,
        /// Most records that may be held.
        limit: usize,
    },

    /// A kernel was stopped while it wrote the cache's state, so the state is unknown.
    #[error("the {kind} was being written when a call was cut off, and its state is unknown; reset it or load a snapshot")]
    Torn {
        /// The cache's kind.
        kind: String,
    },

    /// The layers of a stack hold different numbers of tokens, since a call failed midway without a checkpoint.
    #[error(
        "the layers hold different numbers of tokens (layer 0 has {first}, layer {layer} has {len}): \
         a call failed midway; restore the open checkpoint, reset the stack or load a snapshot"
    )]
    Uneven {
        /// Tokens held by layer 0.
        first: usize,
        /// The first layer that differs.
        layer: usize,
        /// Tokens held by it.
        len: usize,
    },

    /// Caches, arrays or a snapshot do not fit what was expected of them.
    #[error("{what}: expected {expected}, found {found}")]
    Mismatch {
        /// What was looked at.
        what: String,
        /// What it should have been.
        expected: String,
        /// What it was.
        found: String,
    },

    /// A token id that the model has no embedding for.
    #[error("token {id} at position {position} is outside the model's vocabulary of {vocab_size} entries")]
    Token {
        /// The id.
        id: u32,
        /// Its position in the sequence.
        position: usize,
        /// Entries in the vocabulary.
        vocab_size: usize,
    },

    /// The call would go past the longest sequence that the model takes.
    #[error("{len} tokens are held and {tokens} more were given, but the model takes {max} at most; shorten the input or start anew")]
    Context {
        /// Tokens held.
        len: usize,
        /// Tokens in the call.
        tokens: usize,
        /// Longest sequence.
        max: usize,
    },

    /// A model was asked for something that models need not have.
    #[error("this {family} model does not offer {what}; use a model that does, or do without")]
    NotOffered {
        /// The model's family.
        family: String,
        /// What was asked for.
        what: &'static str,
    },

    /// A cache file could not be written or read, or is not what it should be.
    #[error("cache file {}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },

    /// A tensor operation failed.
    #[error("tensor operation: {0}")]
    Tensor(#[source] Box<dyn std::error::Error + Send + Sync>),

    /// An error of a model, a layer or a cache written elsewhere.
    #[error(transparent)]
    Other(Box<dyn std::error::Error + Send + Sync>),
}

impl Error {
    /// Wraps an error of another crate.
    pub fn other(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::Other(error.into())
    }

    /// Refuses to trim more tokens than a cache can give back right now.
    pub fn check_trim(cache: &dyn crate::Cache, asked: usize) -> Result<()> {
        let trimmable = cache.trimmable();
        if asked <= trimmable {
            return Ok(());
        }
        Err(Self::Trim {
            kind: cache.kind().to_owned(),
            asked,
            len: cache.len(),
            trimmable,
        })
    }

    /// A thing that is not what it should be.
    pub fn mismatch(
        what: impl Into<String>,
        expected: impl std::fmt::Display,
        found: impl std::fmt::Display,
    ) -> Self {
        Self::Mismatch {
            what: what.into(),
            expected: expected.to_string(),
            found: found.to_string(),
        }
    }

    /// Says which layer an error came from.
    pub fn in_layer(self, layer: usize, kind: &str) -> Self {
        Self::Layer {
            layer,
            kind: kind.to_owned(),
            source: Box::new(self),
        }
    }
}

impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Self {
        Self::Tensor(Box::new(error))
    }
}
