//! What can go wrong while a model is loaded.

use crate::ConfigError;

/// The result of loading a model.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A checkpoint that is not a model of the family, or not a whole one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The configuration is refused.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A tensor is refused.
    #[error(transparent)]
    Weights(#[from] recant_weights::Error),
    /// A layer cannot be made of its tensors.
    #[error("{part}: {source}")]
    Part {
        /// The part of the model, by the name its tensors begin with.
        part: String,
        /// What is wrong.
        source: recant_core::Error,
    },
    /// The combination of backend and device does not run.
    #[error("Backend::Cpu runs on the CPU, but the device is {device}; choose Backend::Composed for it")]
    Device {
        /// Where the model was to be put.
        device: String,
    },
}

impl Error {
    /// An error of the part of a model that `part` names.
    pub fn part(part: &str, source: impl Into<recant_core::Error>) -> Self {
        Self::Part {
            part: part.to_owned(),
            source: source.into(),
        }
    }
}
