//! Text to tokens and back.

use std::path::{Path, PathBuf};

use tokenizers::tokenizer::step_decode_stream;
use tokenizers::Tokenizer;

use crate::{Error, Result};

/// A checkpoint's tokenizer.
#[derive(Debug, Clone)]
pub struct Text {
    tokenizer: Tokenizer,
    path: PathBuf,
    assigned: usize,
}

impl Text {
    /// Reads a `tokenizer.json`.
    ///
    /// # Errors
    /// The file is absent or no tokenizer.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref().to_owned();
        let tokenizer = Tokenizer::from_file(&path).map_err(|e| Error::Tokenizer {
            path: path.clone(),
            reason: format!("cannot be read: {e}"),
        })?;
        let assigned = tokenizer
            .get_vocab(true)
            .values()
            .max()
            .map_or(0, |&id| id as usize + 1);
        Ok(Self {
            tokenizer,
            path,
            assigned,
        })
    }

    /// The tokenizer itself.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// One more than the largest id that stands for a text. A model's head may have more rows; they are padding.
    pub fn assigned(&self) -> usize {
        self.assigned
    }

    /// The ids of `text`. Special tokens written out in it are recognized; none are added.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.tokenizer
            .encode(text, false)
            .map(|encoding| encoding.get_ids().to_vec())
            .map_err(|e| self.error(format!("cannot encode the text: {e}")))
    }

    /// The text of `ids`, special tokens left out.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.tokenizer
            .decode(ids, true)
            .map_err(|e| self.error(format!("cannot decode {} ids: {e}", ids.len())))
    }

    /// Refuses a draft tokenizer whose ids stand for other texts. Ids that only one of them has are not compared.
    pub fn check_draft(&self, draft: &Self) -> Result<()> {
        let differs = (0..self.assigned.min(draft.assigned) as u32).find_map(|id| {
            let (target, draft) = (self.tokenizer.id_to_token(id), draft.tokenizer.id_to_token(id));
            (target != draft).then_some((id, target, draft))
        });
        let shown = |text: Option<String>| text.map_or("not assigned".to_owned(), |t| format!("{t:?}"));
        match differs {
            None => Ok(()),
            Some((id, target, draft)) => Err(Error::Vocabulary {
                id,
                draft: shown(draft),
                target: shown(target),
            }),
        }
    }

    fn error(&self, reason: String) -> Error {
        Error::Tokenizer {
            path: self.path.clone(),
            reason,
        }
    }
}

/// Turns ids into text as they come, never in the middle of a character.
#[derive(Debug, Default)]
pub(crate) struct TextStream {
    /// Ids whose text, or part of it, is still to be given, after those needed to read them rightly.
    ids: Vec<u32>,
    prefix: String,
    prefix_index: usize,
}

impl TextStream {
    /// The text that `id` completes, which may be none.
    pub(crate) fn push(&mut self, text: &Text, id: u32) -> Result<String> {
        let piece = step_decode_stream(
            &text.tokenizer,
            vec![id],
            true,
            &mut self.ids,
            &mut self.prefix,
            &mut self.prefix_index,
        );
        piece
            .map(Option::unwrap_or_default)
            .map_err(|e| text.error(format!("cannot decode id {id}: {e}")))
    }

    /// What was held back, an incomplete character at the end included.
    pub(crate) fn finish(&mut self, text: &Text) -> Result<String> {
        let rest = text.decode(&self.ids)?;
        let held = rest
            .strip_prefix(self.prefix.as_str())
            .unwrap_or_default()
            .to_owned();
        *self = Self::default();
        Ok(held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKENIZER: &str = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../examples/models/demo-target/tokenizer.json"
    );

    #[test]
    fn c075_characters_cut_across_tokens_come_whole_and_an_incomplete_one_comes_once_at_the_end() -> Result<()>
    {
        let text = Text::load(TOKENIZER)?;
        let ids = text.encode("  naïve 漢字 🦀🦀! e\u{301}<|im_end|>\n\tx y")?;
        let mut incomplete = 0;
        for end in 0..=ids.len() {
            let mut stream = TextStream::default();
            let mut pieces = String::new();
            for &id in &ids[..end] {
                let piece = stream.push(&text, id)?;
                assert!(
                    !piece.contains('\u{fffd}'),
                    "a broken character was given: {piece:?}"
                );
                pieces.push_str(&piece);
            }
            let tail = stream.finish(&text)?;
            incomplete += usize::from(tail.contains('\u{fffd}'));
            assert_eq!(
                pieces + &tail,
                text.decode(&ids[..end])?,
                "the first {end} of {ids:?}"
            );
        }
        assert!(incomplete > 4, "no character was cut");
        Ok(())
    }

    #[test]
    fn ids_are_assigned_up_to_the_last_text() -> Result<()> {
        assert_eq!(Text::load(TOKENIZER)?.assigned(), 8192);
        Ok(())
    }

    #[test]
    fn a_file_that_is_no_tokenizer_is_named() {
        let error = Text::load(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"))
            .err()
            .map(|e| e.to_string());
        assert!(error.is_some_and(|e| e.contains("Cargo.toml") && e.contains("cannot be read")));
    }
}
