//! A store in a folder.
//!
//! A file of rows holds those of one node, and an entry's file what belongs to its last token alone, so that neither is
//! written again when the other one changes. Names are made of what a file holds.

use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};

use recant_core::persist::CacheFile;
use recant_core::Snapshot;

use super::tree::{Exported, Held, Key};
use super::{DrafterState, PromptStore, StoredState};
use crate::{Error, Result};

const SUFFIX: &str = ".prompt.safetensors";
/// What the names of files that were not finished end with.
const PARTIAL: &str = ".partial";
const TREE: &str = "tree";
const AHEAD: &str = "ahead";

impl PromptStore {
    /// Writes all entries to a folder, which is made if it is absent, and gives the number of files written. Files that are
    /// there already are not written again, and those of entries that the store no longer has are removed: a folder belongs
    /// to one store. Files of other names are left alone.
    ///
    /// A file is whole before it gets its name, and rows are written before the entries that need them, so what an
    /// interrupted call leaves can be loaded.
    ///
    /// # Errors
    /// The folder or a file cannot be written, or caches of another crate give snapshots that the
    /// [format](recant_core::persist) does not hold. The store is not changed by it.
    pub fn save(&self, folder: impl AsRef<Path>) -> Result<usize> {
        let folder = folder.as_ref();
        let _alone = self.shared.saving.lock().unwrap_or_else(PoisonError::into_inner);
        let nodes = self.lock().forest.export();
        std::fs::create_dir_all(folder).map_err(|e| folder_error(folder, "cannot be made", &e))?;
        let mut names = HashSet::new();
        let mut written = 0;
        for node in nodes {
            let rows = rows_file(&node);
            let entry = node.held.as_ref().map(|held| entry_file(&node, held));
            for file in std::iter::once(rows).chain(entry) {
                let name = file.name()? + SUFFIX;
                let path = folder.join(&name);
                if !path.exists() {
                    file.write(&path)?;
                    written += 1;
                }
                names.insert(OsString::from(name));
            }
        }
        for path in listed(folder)? {
            let name = path.file_name().unwrap_or_default();
            if !names.contains(name) {
                std::fs::remove_file(&path).map_err(|e| folder_error(&path, "cannot be removed", &e))?;
            }
        }
        Ok(written)
    }

    /// Adds the entries that [`save`](Self::save) wrote, as far as there is room, shorter ones first, and gives the number of
    /// them that are stored. Nothing is evicted for them. Entries of any model are taken, and found only for that model.
    ///
    /// The whole folder is read before anything is stored, so there must be memory for it.
    ///
    /// # Errors
    /// The folder cannot be read, or a file is damaged or of another version, or rows that an entry needs are in none; the error
    /// names the file, and nothing is stored. Removing the file, or saving to the folder, mends it.
    pub fn load(&self, folder: impl AsRef<Path>) -> Result<usize> {
        let folder = folder.as_ref();
        let mut rows = Vec::new();
        let mut entries = Vec::new();
        for path in listed(folder)? {
            if !path.as_os_str().to_string_lossy().ends_with(SUFFIX) {
                continue;
            }
            let file = CacheFile::read(&path)?;
            match file.caches.start() < file.tokens.len() {
                true => rows.push(file),
                false => entries.push((path, file)),
            }
        }
        rows.sort_by_key(|file| file.tokens.len());
        entries.sort_by_key(|(_, file)| file.tokens.len());
        let chains = chains(rows);
        let mut ready = Vec::with_capacity(entries.len());
        for (path, file) in entries {
            let entry = Ready::new(&path, file, &chains)?;
            // That its pieces go together is found out before anything is stored.
            entry.state(&path)?;
            ready.push((path, entry));
        }
        let mut stored = 0;
        for (path, entry) in ready {
            let state = entry.state(&path)?;
            stored += usize::from(self.insert(&entry.model, &entry.tokens, state, false)?);
        }
        Ok(stored)
    }
}

/// An entry that was read, and the rows it needs.
struct Ready {
    model: String,
    tokens: Vec<u32>,
    pieces: Vec<Arc<Snapshot>>,
    drafter: Option<DrafterState>,
}

/// The rows of all tokens of a text, by model, tree and text.
type Chains = HashMap<(String, String, Vec<u32>), Vec<Arc<Snapshot>>>;

/// Puts pieces of rows behind each other. The files are in order of their number of tokens.
fn chains(files: Vec<CacheFile>) -> Chains {
    let mut chains = Chains::new();
    for file in files {
        let place = |tokens: &[u32]| (file.model.clone(), tree_of(&file), tokens.to_vec());
        let start = file.caches.start();
        let before = match start {
            0 => Some(Vec::new()),
            _ => chains.get(&place(&file.tokens[..start])).cloned(),
        };
        // Rows after rows that are nowhere are of no use, and if an entry needs them, that is said of the entry.
        let Some(mut chain) = before else { continue };
        let whole = place(&file.tokens);
        chain.push(Arc::new(file.caches));
        chains.entry(whole).or_insert(chain);
    }
    chains
}

impl Ready {
    fn new(path: &Path, file: CacheFile, chains: &Chains) -> Result<Self> {
        let tree = tree_of(&file);
        let ahead = match file.notes.get(AHEAD).map(String::as_str).unwrap_or_default() {
            "" => Vec::new(),
            ahead => {
                let ids = ahead
                    .split(' ')
                    .map(str::parse)
                    .collect::<std::result::Result<_, _>>();
                ids.map_err(|_| error(path, format!("has `{ahead}` where ids of tokens are expected")))?
            }
        };
        let place = (file.model, tree, file.tokens);
        let Some(rows) = chains.get(&place) else {
            let reason = "needs rows of its tokens that no other file holds; remove it";
            return Err(error(path, reason));
        };
        let (model, _, tokens) = place;
        Ok(Self {
            model,
            tokens,
            pieces: rows.iter().cloned().chain([Arc::new(file.caches)]).collect(),
            drafter: file.beside.map(|snapshot| DrafterState { snapshot, ahead }),
        })
    }

    fn state(&self, path: &Path) -> Result<StoredState> {
        let pieces: Vec<&Snapshot> = self.pieces.iter().map(Arc::as_ref).collect();
        let caches = Snapshot::join(&pieces).map_err(|e| {
            error(
                path,
                format!("does not go together with the rows of its tokens: {e}"),
            )
        })?;
        Ok(StoredState {
            caches,
            drafter: self.drafter.clone(),
        })
    }
}

fn rows_file(node: &Exported) -> CacheFile {
    file(&node.key, &node.tokens, &node.rows)
}

fn entry_file(node: &Exported, held: &Held) -> CacheFile {
    let mut file = file(&node.key, &node.tokens, &held.caches);
    if let Some(drafter) = &held.drafter {
        let ahead: Vec<String> = drafter.ahead.iter().map(ToString::to_string).collect();
        file.notes.insert(AHEAD.to_owned(), ahead.join(" "));
        file.beside = Some(drafter.snapshot.clone());
    }
    file
}

fn file(key: &Key, tokens: &[u32], caches: &Snapshot) -> CacheFile {
    CacheFile {
        model: key.model.clone(),
        tokens: tokens.to_vec(),
        caches: caches.clone(),
        beside: None,
        notes: [(TREE.to_owned(), key.shape.clone())].into(),
    }
}

fn tree_of(file: &CacheFile) -> String {
    file.notes.get(TREE).cloned().unwrap_or_default()
}

/// The files of a store in a folder, unfinished ones included, by name.
fn listed(folder: &Path) -> Result<Vec<PathBuf>> {
    let unreadable = |e: std::io::Error| folder_error(folder, "cannot be read", &e);
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.ends_with(SUFFIX) || name.contains(SUFFIX) && name.ends_with(PARTIAL) {
            paths.push(path);
        }
    }
    paths.sort_unstable();
    Ok(paths)
}

fn folder_error(path: &Path, what: &str, cause: &std::io::Error) -> Error {
    error(path, format!("{what}: {cause}"))
}

fn error(path: &Path, reason: impl Into<String>) -> Error {
    Error::Store {
        path: path.to_owned(),
        reason: reason.into(),
    }
}
