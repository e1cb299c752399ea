//! Changes to logits that a caller makes.

use crate::Result;

/// Changes the logits of each next token: a grammar, a ban that depends on the text, a penalty of one's own.
///
/// It follows one text, and sees only tokens that stay: drafts that are rejected are never shown to it.
pub trait LogitsProcessor: Send {
    /// The text begins with these tokens. Called for a prompt, and again, with the text as it was before, after a round
    /// that failed: whatever was accepted since does not count.
    fn begin(&mut self, text: &[u32]);

    /// The text grew by a token.
    fn accept(&mut self, token: u32);

    /// Changes the logits of the token after `text`, one for each id. They come with bias and penalties applied. Minus
    /// infinity or NaN rules a token out.
    ///
    /// # Errors
    /// Whatever the processor says, as [`Error::Processor`](crate::Error::Processor). The round fails.
    fn process(&mut self, text: &[u32], logits: &mut [f32]) -> Result<()>;
}
