//! What can go wrong while generating.

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

    /// A drafter cannot serve this target.
    #[error("this drafter cannot serve this target: {0}")]
    Drafter(String),

    /// Something was asked that nothing there can do.
    #[error("{asked} needs {needs}; add it, or leave out what was asked")]
    Lacks {
        /// What was asked.
        asked: String,
        /// What it needs.
        needs: &'static str,
    },
}

impl From<recant_core::candle::Error> for Error {
    fn from(error: recant_core::candle::Error) -> Self {
        Self::Core(error.into())
    }
}
