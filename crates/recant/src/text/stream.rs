//! Text that comes a token at a time.

use crate::{Result, Text};

/// What broken or incomplete bytes are decoded to.
const BROKEN: char = '\u{fffd}';

/// Most broken characters at the end that may still become a whole one: it has four bytes at most.
const MOST_HELD: usize = 3;

/// Ids read again at most, the context left out. More come together only where no character is whole.
const MOST_IDS: usize = 24;

/// Ids kept of so many. A broken character has three bytes at most, so they stand for at least four, of which three may
/// be held: what comes before those is the context.
const KEPT_IDS: usize = 12;

/// Turns ids into text as they come, never in the middle of a character. Altogether it gives what decoding the ids at
/// once gives.
///
/// Each id costs the same, however long the text: a few ids are read again with it, since decoders treat the start of a
/// text in their own way, and characters go over the bounds of tokens.
#[derive(Debug, Clone, Default)]
pub(crate) struct TextStream {
    /// First the context, whose text was given; then ids whose text was not, or not all.
    ids: Vec<u32>,
    context: usize,
    /// The part of the text of `ids` that was given.
    given: String,
}

impl TextStream {
    /// The text that `id` completes, which may be none.
    pub(crate) fn push(&mut self, text: &Text, id: u32) -> Result<String> {
        if !text.shows(id) {
            return Ok(String::new());
        }
        self.ids.push(id);
        let mut whole = text.decode(&self.ids)?;
        if !whole.starts_with(&self.given) {
            // Only decoders that judge several tokens together take back what they gave, and only for broken bytes.
            *self = Self::default();
            self.ids.push(id);
            whole = text.decode(&self.ids)?;
        }
        let rest = &whole[self.given.len()..];
        let new = rest[..rest.len() - held(rest)].to_owned();
        if new.len() == rest.len() && !new.is_empty() {
            self.ids.drain(..self.context);
            self.context = self.ids.len();
            self.given = text.decode(&self.ids)?;
        } else {
            self.given.push_str(&new);
            if self.ids.len() - self.context > MOST_IDS {
                self.forget(text, &whole)?;
            }
        }
        Ok(new)
    }

    /// Keeps the newest ids alone, if they tell as well how the next is to be read.
    fn forget(&mut self, text: &Text, whole: &str) -> Result<()> {
        let kept = &self.ids[self.ids.len() - KEPT_IDS..];
        let decoded = text.decode(kept)?;
        let given = decoded.strip_suffix(&whole[self.given.len()..]);
        if let Some(given) = given.filter(|given| !given.is_empty()) {
            *self = Self {
                ids: kept.to_vec(),
                context: 0,
                given: given.to_owned(),
            };
        }
        Ok(())
    }

    /// What was held back: an incomplete character at the end. The stream is then as new.
    pub(crate) fn finish(&mut self, text: &Text) -> Result<String> {
        let stream = std::mem::take(self);
        let whole = text.decode(&stream.ids)?;
        Ok(whole.strip_prefix(&stream.given).unwrap_or_default().to_owned())
    }
}

/// Bytes at the end of a text that the next tokens may make other characters of.
fn held(text: &str) -> usize {
    let broken = text.chars().rev().take_while(|&c| c == BROKEN);
    broken.take(MOST_HELD).map(char::len_utf8).sum()
}

#[cfg(test)]
mod tests;
