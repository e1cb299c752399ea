//! What keeps a head from its target.

use std::path::PathBuf;

/// The result of attaching a head.
pub type Result<T> = std::result::Result<T, Error>;

/// A head that is not there, not whole, or of another model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The folder has no head.
    #[error(
        "{} has no multi-token-prediction head: there are no tensors behind `mtp.`{promised}; \
         use a checkpoint that kept them, a head published alone, or a draft model", folder.display()
    )]
    Absent {
        /// The checkpoint folder.
        folder: PathBuf,
        /// What its configuration says of it, if anything.
        promised: String,
    },

    /// A tensor of the head is missing, left over, misshaped or in another format.
    #[error("the multi-token-prediction head: {0}")]
    Weights(#[from] recant_weights::Error),

    /// A layer cannot be made of the head's tensors.
    #[error("the multi-token-prediction head: {0}")]
    Layers(#[from] recant_layers::Error),

    /// The head belongs to a model of another shape.
    #[error("{}: the head has {field} {head}, but the target has {target}; use the head of this target", folder.display())]
    Fit {
        /// The head's folder.
        folder: PathBuf,
        /// The field that differs.
        field: &'static str,
        /// The head's value.
        head: String,
        /// The target's value.
        target: String,
    },

    /// The target or a cache refused.
    #[error(transparent)]
    Core(#[from] recant_core::Error),

    /// A row could not be chosen from.
    #[error(transparent)]
    Generate(#[from] recant_generate::Error),
}

impl From<recant_core::candle::Error> for Error {
    fn from(error: recant_core::candle::Error) -> Self {
        Self::Core(error.into())
    }
}
