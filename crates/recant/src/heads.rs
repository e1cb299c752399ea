//! Multi-token-prediction heads of a loaded model, each read and checked once.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use recant_core::Hidden;
use recant_mtp::{HeadCheck, MtpHead};

use crate::Result;

/// What a head is checked on: ordinary code and prose, so that a head that works agrees with most of it.
pub(crate) const CHECK_TEXT: &str = "def load_config(path):\n    \"\"\"Read a JSON file and return its contents as a dictionary.\"\"\"\n    \
     with open(path, encoding=\"utf-8\") as file:\n        return json.load(file)\n\n\nThe function opens the file, reads it and \
     returns the result. If the file does not exist, an error is raised, so the caller has to make sure that the path is valid.\n";

/// A head, and how it did when it was attached.
#[derive(Debug, Clone)]
pub(crate) struct CheckedHead {
    pub(crate) head: MtpHead,
    pub(crate) check: HeadCheck,
}

/// Heads by the folder they come from and the hidden rows they are fed.
#[derive(Debug, Default)]
pub(crate) struct Heads(Mutex<HashMap<(PathBuf, Hidden), CheckedHead>>);

impl Heads {
    /// The head that was made before for this folder, or the one that `make` gives.
    pub(crate) fn get(
        &self,
        path: &Path,
        hidden: Hidden,
        make: impl FnOnce() -> Result<CheckedHead>,
    ) -> Result<CheckedHead> {
        // Nothing is left half done by a panic: an entry is whole or absent.
        let mut heads = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (path.to_owned(), hidden);
        if let Some(head) = heads.get(&key) {
            return Ok(head.clone());
        }
        let made = make()?;
        heads.insert(key, made.clone());
        Ok(made)
    }
}
