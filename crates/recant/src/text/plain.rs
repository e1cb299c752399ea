//! Added tokens apart from plain text.

use std::ops::Range;

use tokenizers::{
    Model, NormalizedString, Normalizer, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer,
};

use crate::{Result, Text};

/// A part of a text.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Part<'a> {
    /// An added token, written out.
    Added {
        id: u32,
        /// Whether it is a special one, which decoded text leaves out.
        special: bool,
        written: &'a str,
    },
    /// What is before, between or after added tokens.
    Plain(&'a str),
}

impl Text {
    /// A text cut where added tokens are written out in it, by the rules that [`encode`](Text::encode) follows.
    pub(crate) fn parts<'a>(&self, text: &'a str) -> Vec<Part<'a>> {
        let mut parts = Vec::new();
        let mut done = 0;
        let plain = |parts: &mut Vec<Part<'a>>, range: Range<usize>| {
            if let Some(plain) = text.get(range).filter(|plain| !plain.is_empty()) {
                parts.push(Part::Plain(plain));
            }
        };
        let added = self.tokenizer.get_added_vocabulary();
        let cut = added.extract_and_normalize(self.tokenizer.get_normalizer(), text);
        for (_, (start, end), tokens) in cut.get_splits(OffsetReferential::Original, OffsetType::Byte) {
            let token = tokens.as_ref().and_then(|tokens| tokens.first());
            if let (Some(token), Some(written)) = (token, text.get(start..end)) {
                plain(&mut parts, done..start);
                let known = added.get_added_tokens_decoder().get(&token.id);
                parts.push(Part::Added {
                    id: token.id,
                    special: known.is_some_and(|token| token.special),
                    written,
                });
                done = end;
            }
        }
        plain(&mut parts, done..text.len());
        parts
    }

    /// The ids of a text in which no added token is recognized.
    pub(crate) fn encode_plain(&self, text: &str) -> Result<Vec<u32>> {
        self.plain_ids(text)
            .map_err(|e| self.error(format!("cannot encode the text: {e}")))
    }

    fn plain_ids(&self, text: &str) -> tokenizers::Result<Vec<u32>> {
        let mut text = NormalizedString::from(text);
        if let Some(normalizer) = self.tokenizer.get_normalizer() {
            normalizer.normalize(&mut text)?;
        }
        let mut words = PreTokenizedString::from(text);
        if let Some(pre_tokenizer) = self.tokenizer.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut words)?;
        }
        words.tokenize(|word| self.tokenizer.get_model().tokenize(word.get()))?;
        Ok(words.into_encoding(None, 0, OffsetType::Byte)?.get_ids().to_vec())
    }
}
