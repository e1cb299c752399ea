//! Text up to a stop string.

use std::sync::Arc;

use crate::text::TextStream;
use crate::{Error, Result, Text};

/// What may be shown of a text that grows token by token, and whether a stop string ended it.
///
/// It depends on the ids alone, not on how they are grouped, so a clone goes on as the original would have.
#[derive(Debug, Clone)]
pub(crate) struct TextOutput {
    stream: TextStream,
    stops: StopMatcher,
}

/// What one token adds.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Text that may be shown now.
    pub(crate) text: String,
    /// Whether a stop string is complete. Nothing from its first character on is ever given.
    pub(crate) stopped: bool,
}

impl TextOutput {
    /// The stop strings may be none, or share beginnings and ends.
    ///
    /// Where several match, the one whose last character comes first ends the text; of those that end there, the
    /// longest. So `"ab"` always goes before `"abc"`, and `"abc"` before `"c"`.
    ///
    /// # Errors
    /// A stop string is empty.
    pub(crate) fn new(stops: Vec<String>) -> Result<Self> {
        Ok(Self {
            stream: TextStream::default(),
            stops: StopMatcher::new(stops)?,
        })
    }

    /// Takes one more token. What may still become a stop string, or is part of a character, is held back.
    pub(crate) fn push(&mut self, text: &Text, id: u32) -> Result<Piece> {
        let piece = self.stream.push(text, id)?;
        Ok(Piece {
            text: self.stops.push(&piece),
            stopped: self.stops.stopped,
        })
    }

    /// What was held back, where no stop string ended the text: the start of one, or an incomplete character.
    pub(crate) fn finish(&mut self, text: &Text) -> Result<String> {
        let rest = self.stream.finish(text)?;
        let mut last = self.stops.push(&rest);
        if !self.stops.stopped {
            last.push_str(&std::mem::take(&mut self.stops.held));
        }
        Ok(last)
    }
}

/// One stop string and, for each of its beginnings, the length of the longest shorter beginning that is also its end
/// (Knuth, Morris, Pratt).
#[derive(Debug)]
struct Stop {
    bytes: Vec<u8>,
    shorter: Vec<usize>,
}

impl Stop {
    fn new(text: String) -> Self {
        let mut stop = Self {
            bytes: text.into_bytes(),
            shorter: vec![0],
        };
        for at in 1..stop.bytes.len() {
            let next = stop.advance(stop.shorter[at - 1], stop.bytes[at]);
            stop.shorter.push(next);
        }
        stop
    }

    /// How many bytes of the string the text ends with after one more, if it ended with `matched` of them.
    fn advance(&self, mut matched: usize, byte: u8) -> usize {
        while matched > 0 && self.bytes[matched] != byte {
            matched = self.shorter[matched - 1];
        }
        matched + usize::from(self.bytes[matched] == byte)
    }
}

#[derive(Debug, Clone)]
struct StopMatcher {
    stops: Arc<[Stop]>,
    /// For each stop string, with how many bytes of it the text ends.
    matched: Vec<usize>,
    /// The end of the text: the longest that a stop string begins with.
    held: String,
    stopped: bool,
}

impl StopMatcher {
    fn new(stops: Vec<String>) -> Result<Self> {
        if let Some(index) = stops.iter().position(String::is_empty) {
            return Err(Error::EmptyStop { index });
        }
        Ok(Self {
            matched: vec![0; stops.len()],
            stops: stops.into_iter().map(Stop::new).collect(),
            held: String::new(),
            stopped: false,
        })
    }

    /// The part of the text so far that may be shown and was not.
    fn push(&mut self, piece: &str) -> String {
        if self.stopped {
            return String::new();
        }
        let before = self.held.len();
        self.held.push_str(piece);
        for (at, byte) in piece.bytes().enumerate() {
            let mut longest = 0;
            for (stop, matched) in self.stops.iter().zip(&mut self.matched) {
                *matched = stop.advance(*matched, byte);
                if *matched == stop.bytes.len() {
                    longest = longest.max(*matched);
                }
            }
            if longest > 0 {
                self.stopped = true;
                self.held.truncate(before + at + 1 - longest);
                return std::mem::take(&mut self.held);
            }
        }
        // A stop string starts with the first byte of a character, so the cut is between characters.
        let shown = self.held.len() - self.matched.iter().max().copied().unwrap_or(0);
        let held = self.held.split_off(shown);
        std::mem::replace(&mut self.held, held)
    }
}

#[cfg(test)]
mod tests;
