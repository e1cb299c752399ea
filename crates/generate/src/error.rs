//! What can go wrong while generating.

use std::path::PathBuf;

/// The result of every operation in this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of decoding or drafting. The sequence and its caches are as they were before the call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A model or cache refused.
    #[error(transparent)]
    Core(#[from] recant_core::Error),

    /// The prompt is empty, so there is nothing to predict from.
    #[error("the prompt has no tokens; give at least one")]
    EmptyPrompt,

    /// The sequence already holds tokens.
    #[error("the decoder already holds {held} tokens; reset it before giving a new prompt")]
    NotEmpty {
        /// Tokens held.
        held: usize,
    },

    /// The prompt is longer than the model takes.
    #[error("the prompt has {tokens} tokens, but the model takes {max}; shorten it")]
    PromptTooLong {
        /// Tokens in the prompt.
        tokens: usize,
        /// Longest sequence.
        max: usize,
    },

    /// No logit of a row is a number, so no token can be chosen.
    #[error("all logits for position {position} are NaN: the weights or the caches are damaged")]
    NoNumber {
        /// Position of the token that was to be chosen.
        position: usize,
    },

    /// All tokens of a row are banned, so none can be chosen.
    #[error(
        "no token may come at position {position}: biases and processors ban all that have a logit above -inf; \
         allow at least one"
    )]
    Banned {
        /// Position of the token that was to be chosen.
        position: usize,
    },

    /// A parameter is not what it may be.
    #[error("`{name}` is {found}; expected {expected}")]
    Parameter {
        /// The parameter.
        name: &'static str,
        /// What it is.
        found: String,
        /// What it may be.
        expected: String,
    },

    /// A processor of the caller's failed.
    #[error("a logits processor failed: {0}")]
    Processor(String),

    /// A round was to give no tokens.
    #[error(
        "a round gives at least one token, and there is room for none; ask for more tokens, or for no round"
    )]
    NoRoom,

    /// A call was to serve sequences of several models.
    #[error("the sequences of one step belong to different models; step those of each model together")]
    OtherModel,

    /// A queue is full.
    #[error("{waiting} sessions wait already, which is the most that may; try again later")]
    Busy {
        /// Sessions that wait.
        waiting: usize,
    },

    /// A drafter cannot serve this target.
    #[error("this drafter cannot serve this target: {0}")]
    Drafter(String),

    /// A folder of stored prompts, or a file in it, cannot be written or read, or is not what it should be.
    #[error("stored prompts {}: {reason}", path.display())]
    Store {
        /// The folder or the file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },

    /// Something was asked that nothing there can do.
    #[error("{asked} needs {needs}; add it, or leave out what was asked")]
    Lacks {
        /// What was asked.
        asked: String,
        /// What it needs.
        needs: &'static str,
    },
}

impl Error {
    pub(crate) fn parameter(name: &'static str, found: impl ToString, expected: &str) -> Self {
        Self::Parameter {
            name,
            found: found.to_string(),
            expected: expected.to_owned(),
        }
    }
}

impl From<recant_core::candle::Error> for Error {
    fn from(error: recant_core::candle::Error) -> Self {
        Self::Core(error.into())
    }
}
