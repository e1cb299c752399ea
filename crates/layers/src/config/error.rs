//! What can be wrong with a configuration.

/// An error of a model configuration. Fields are named by their path in `config.json`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The configuration is of another kind of model.
    #[error("{field} is {found}, which is not supported here; expected one of {supported}")]
    ModelType {
        /// The field.
        field: String,
        /// What it says.
        found: String,
        /// What it may say.
        supported: String,
    },

    /// A field that has no default is absent or null.
    #[error("{field} is missing; expected {expected}")]
    Missing {
        /// The field.
        field: String,
        /// What it should hold.
        expected: String,
    },

    /// A field holds a value of the wrong type or out of range.
    #[error("{field} is {found}; expected {expected}")]
    Value {
        /// The field.
        field: String,
        /// What it holds.
        found: String,
        /// What it should hold.
        expected: String,
    },

    /// Fields that are fine by themselves do not fit each other.
    #[error("{what}; {expected}")]
    Incoherent {
        /// The fields and what they hold.
        what: String,
        /// What should hold between them.
        expected: String,
    },

    /// A field asks for arithmetic that is not implemented. It is never ignored.
    #[error(
        "{field} is {found}, which changes what the model computes and is not supported; expected {expected}"
    )]
    Unsupported {
        /// The field.
        field: String,
        /// What it holds.
        found: String,
        /// What is supported.
        expected: String,
    },
}
