//! Round after round until a limit is met.

use super::{Decoder, Finish, Round};
use crate::{Depth, Result};

/// When to stop, and how far to look ahead.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Most tokens to generate.
    pub max_tokens: usize,
    /// How many tokens to draft in a round.
    pub depth: Depth,
    /// Ids that end the text. The one found is part of the output.
    pub eos: Vec<u32>,
}

/// Rounds of one generation: see [`Decoder::generate`].
pub struct Generation<'a> {
    decoder: &'a mut Decoder,
    limits: Limits,
    left: usize,
    finish: Option<Finish>,
}

impl<'a> Generation<'a> {
    pub(super) fn new(decoder: &'a mut Decoder, limits: Limits) -> Self {
        Self {
            decoder,
            left: limits.max_tokens,
            limits,
            finish: None,
        }
    }

    /// Why it ended; `None` while it goes on or after an error.
    pub fn finish(&self) -> Option<Finish> {
        self.finish
    }

    /// The decoder.
    pub fn decoder(&self) -> &Decoder {
        self.decoder
    }
}

impl Iterator for Generation<'_> {
    type Item = Result<Round>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.finish.is_some() {
            return None;
        }
        if self.left == 0 {
            self.finish = Some(Finish::Length);
            return None;
        }
        if self.decoder.is_full() {
            self.finish = Some(Finish::Context);
            return None;
        }
        let round = self
            .decoder
            .next_round(self.limits.depth, self.left, &self.limits.eos);
        if let Ok(round) = &round {
            self.left -= round.tokens.len();
            if round.ended {
                self.finish = Some(Finish::Eos);
            }
        }
        Some(round)
    }
}
