//! What a session says.

use recant_generate::{Finish, Logprobs, Round};

/// What a session says while it generates.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// A token, in order. Text that may become a stop string, or the rest of a character, comes with a later one.
    Token {
        /// Its id.
        id: u32,
        /// The text it completes; empty while a character is incomplete, and for special tokens.
        text: String,
        /// Whether the drafter guessed it.
        drafted: bool,
        /// Its log-probability and the alternatives, if they were asked for.
        logprobs: Option<Logprobs>,
    },
    /// A round is over; its tokens came before this.
    Round(Round),
    /// Generation is over.
    End {
        /// Why.
        finish: Finish,
        /// Text that was held back: an incomplete character, or the beginning of a stop string that did not come.
        text: String,
    },
}

impl Event {
    /// The text that came with it, if any.
    pub fn text(&self) -> &str {
        match self {
            Self::Token { text, .. } | Self::End { text, .. } => text,
            Self::Round(_) => "",
        }
    }
}
