//! What a suite says when a law is broken.

/// Why an implementation did not pass.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// Something held or gave what it must not.
    #[error("law broken: {law}\n  {scene}\n  {detail}")]
    Broken {
        /// The law, as a sentence.
        law: &'static str,
        /// What had been done.
        scene: String,
        /// What was found, and what was expected.
        detail: String,
    },

    /// A call failed that must succeed.
    #[error("law broken: {law}\n  {scene}\n  {step} was refused: {source}")]
    Refused {
        /// The law, as a sentence.
        law: &'static str,
        /// What had been done.
        scene: String,
        /// The call.
        step: String,
        /// What the implementation said.
        source: Box<recant_core::Error>,
    },
}
