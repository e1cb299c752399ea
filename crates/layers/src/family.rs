//! What sets one family of hybrid models apart from another.

use crate::config::{ConfigError, Fields};
use crate::{Assembly, DeltaInputs, FeedForward, Result};

/// A family of models that differ from others of its kind in names and in what follows the mixer.
pub trait Family: Sync {
    /// Its name, as [`ModelSpec::family`](recant_core::ModelSpec::family) has it.
    fn name(&self) -> &'static str;

    /// Model types of its configurations, at the root and in the text part.
    fn model_types(&self) -> &'static [&'static str];

    /// What follows the mixer of each layer, read from the text part of the configuration.
    ///
    /// # Errors
    /// A field that is missing, out of range or asks for something else than the family has.
    fn feed_forward(&self, text: &Fields<'_>, layers: usize) -> Result<Vec<FeedForward>, ConfigError>;

    /// The input projections of the Gated DeltaNet layer whose names begin with `prefix`: four tensors, unless the family
    /// stores them otherwise.
    ///
    /// # Errors
    /// A tensor that is missing or of another shape.
    fn delta_inputs(&self, assembly: &mut Assembly<'_>, prefix: &str) -> Result<DeltaInputs> {
        assembly.delta_inputs(prefix)
    }
}
