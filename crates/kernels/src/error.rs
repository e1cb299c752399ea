//! What can be wrong with an operand.

use candle_core::DType;

/// The result of every operation in this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// An operand that an operation cannot work on.
///
/// An operation that returns an error has written nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Another shape than expected.
    #[error("{op}: `{operand}` has shape {found:?}, expected {expected}")]
    Shape {
        /// The operation.
        op: &'static str,
        /// The operand.
        operand: &'static str,
        /// What it should have been.
        expected: String,
        /// What it was.
        found: Vec<usize>,
    },

    /// Another element type than expected.
    #[error("{op}: `{operand}` is {found:?}, expected {expected}")]
    DType {
        /// The operation.
        op: &'static str,
        /// The operand.
        operand: &'static str,
        /// What it should have been.
        expected: &'static str,
        /// What it was.
        found: DType,
    },

    /// An operand on a device that the backend does not run on.
    #[error("{op}: `{operand}` is on {found}, but Backend::Cpu works on CPU tensors; move it, or use Backend::Composed")]
    Device {
        /// The operation.
        op: &'static str,
        /// The operand.
        operand: &'static str,
        /// Where it was.
        found: String,
    },

    /// An operand whose elements do not lie one after the other.
    #[error("{op}: `{operand}` is a strided view; call `contiguous()` on it first")]
    Strided {
        /// The operation.
        op: &'static str,
        /// The operand.
        operand: &'static str,
    },

    /// Operands that must be separate share memory.
    #[error(
        "{op}: {first} and {second} share storage, and one of them is to be written; give each its own copy"
    )]
    Aliased {
        /// The operation.
        op: &'static str,
        /// One operand.
        first: String,
        /// The other.
        second: String,
    },

    /// A number that makes no sense, or does not go with another.
    #[error("{op}: {what}")]
    Value {
        /// The operation.
        op: &'static str,
        /// What is wrong, and what would be right.
        what: String,
    },

    /// A row of a weight that it does not have.
    #[error("gather: id {id} is outside the weight's {rows} rows")]
    Id {
        /// The id.
        id: u32,
        /// Rows of the weight.
        rows: usize,
    },

    /// Keys that a query sees are not in the view.
    #[error("attention: the query at position {query} of segment {segment} sees position {missing}, which no block holds")]
    Hole {
        /// Index of the segment.
        segment: usize,
        /// Position of the query.
        query: usize,
        /// The first position that is missing.
        missing: usize,
    },

    /// candle refused an operation.
    #[error("candle: {0}")]
    Candle(#[from] candle_core::Error),
}

impl From<Error> for recant_core::Error {
    fn from(error: Error) -> Self {
        Self::other(error)
    }
}
