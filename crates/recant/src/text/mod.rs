//! Text to tokens and back.

mod plain;
mod stream;
mod vocabulary;

use std::path::{Path, PathBuf};

use recant_weights::Folder;
use tokenizers::Tokenizer;

use crate::{limited, Error, Result};

/// Bytes of the longest `tokenizer.json` that is read: that of Qwen3 has 11 million.
const MOST: u64 = 256 << 20;

pub(crate) use plain::Part;
pub(crate) use stream::TextStream;

/// A checkpoint's tokenizer.
#[derive(Debug, Clone)]
pub struct Text {
    tokenizer: Tokenizer,
    path: PathBuf,
    assigned: usize,
}

impl Text {
    /// Reads a `tokenizer.json`. Truncation and padding that it asks for are for training, and left out.
    ///
    /// # Errors
    /// The file is absent or no tokenizer.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref().to_owned();
        let tokenizer = read(&path).map_err(|e| unreadable(&path, &e))?;
        Ok(Self::new(tokenizer, path))
    }

    /// The tokenizer of a checkpoint: its `tokenizer.json`, or the vocabulary in a GGUF file.
    ///
    /// # Errors
    /// There is none, or none that can be read.
    pub fn of(folder: &Folder) -> Result<Self> {
        let Some(vocabulary) = folder.vocabulary()? else {
            return Self::load(folder.tokenizer_path());
        };
        let tokenizer = vocabulary::tokenizer(&vocabulary).map_err(|e| unreadable(folder.path(), &e))?;
        Ok(Self::new(tokenizer, folder.path().to_owned()))
    }

    fn new(tokenizer: Tokenizer, path: PathBuf) -> Self {
        let ids = tokenizer.get_vocab(true);
        Self {
            assigned: ids.values().max().map_or(0, |&id| id as usize + 1),
            tokenizer,
            path,
        }
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

    /// Whether an id adds to a decoded text: it stands for a token, and not for a special one.
    pub(crate) fn shows(&self, id: u32) -> bool {
        let token = self.tokenizer.id_to_token(id);
        token.is_some_and(|token| !self.tokenizer.get_added_vocabulary().is_special_token(&token))
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

fn unreadable(path: &Path, reason: &tokenizers::Error) -> Error {
    Error::Tokenizer {
        path: path.to_owned(),
        reason: format!("cannot be read: {reason}"),
    }
}

fn read(path: &Path) -> tokenizers::Result<Tokenizer> {
    let mut tokenizer = Tokenizer::from_bytes(limited::read(path, MOST)?)?;
    tokenizer.with_truncation(None)?;
    tokenizer.with_padding(None);
    Ok(tokenizer)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKENIZER: &str = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../examples/models/demo-target/tokenizer.json"
    );

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

    #[test]
    fn of_a_file_of_any_length_no_more_is_read_than_a_tokenizer_has() -> std::io::Result<()> {
        let file = tempfile::NamedTempFile::new()?;
        file.as_file().set_len(1 << 40)?;
        let error = Text::load(file.path()).err().map(|e| e.to_string());
        assert!(error.is_some_and(|e| e.contains("longer than 268435456 bytes")));
        Ok(())
    }
}
