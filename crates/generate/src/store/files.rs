//! A store in a folder.
//!
//! A file of rows holds those of one node, and an entry's file what belongs to its last token alone, so that neither is
//! written again when the other one changes. Names are made of what a file holds.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};

use recant_core::persist::CacheFile;
use recant_core::Snapshot;

use super::key::Key;
use super::tree::{Exported, Held};
use super::{Apart, PromptStore};
use crate::{Error, Result};

const SUFFIX: &str = ".prompt.safetensors";
/// What the names of files that were not finished end with.
const PARTIAL: &str = ".partial";
/// Names of notes: the tree; whether a file holds rows or an entry; of drafters, how many tokens they were told beyond those
/// they hold, and which.
const TREE: &str = "tree";
const HOLDS: &str = "holds";
const AHEAD: &str = "ahead";
const TOLD: &str = "told";
const ENTRY: &str = "entry";
const ROWS: &str = "rows";

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
        let mut pieces = Vec::new();
        for path in listed(folder.as_ref())? {
            if path.as_os_str().to_string_lossy().ends_with(SUFFIX) {
                pieces.push(Piece::read(path)?);
            }
        }
        pieces.sort_by_key(|piece| piece.text.len());
        let (entries, rows) = pieces.into_iter().partition(|piece| piece.entry);
        let chains = chains(rows);
        let mut ready = Vec::new();
        for piece in entries {
            let entry = Ready::new(piece, &chains)?;
            // That its pieces go together is found out before anything is stored.
            entry.join()?;
            ready.push(entry);
        }
        let mut stored = 0;
        for entry in ready {
            stored += usize::from(entry.store(self)?);
        }
        Ok(stored)
    }
}

/// What a file holds.
struct Piece {
    path: PathBuf,
    model: String,
    tree: String,
    /// As in [`Key`].
    ahead: Option<usize>,
    text: Vec<u32>,
    caches: Snapshot,
    beside: Option<Snapshot>,
    entry: bool,
}

/// Names a text in a tree.
type Place = (String, String, Vec<u32>);

impl Piece {
    fn read(path: PathBuf) -> Result<Self> {
        let file = CacheFile::read(&path)?;
        let note = |name| {
            let value: Option<&String> = file.notes.get(name);
            value.ok_or_else(|| {
                error(
                    &path,
                    format!("lacks the note `{name}`: it is no file of a store"),
                )
            })
        };
        let tree = note(TREE)?.clone();
        let entry = match note(HOLDS)?.as_str() {
            ENTRY => true,
            ROWS => false,
            other => {
                return Err(error(
                    &path,
                    format!("holds `{other}`, where `{ENTRY}` or `{ROWS}` is expected"),
                ))
            }
        };
        let number = |text: &str| {
            let reason = || {
                error(
                    &path,
                    format!("has `{text}` in a note, where a number is expected"),
                )
            };
            text.parse::<u32>().map_err(|_| reason())
        };
        let ahead = match file.notes.get(AHEAD) {
            Some(ahead) => Some(number(ahead)? as usize),
            None => None,
        };
        let told = file.notes.get(TOLD).map(String::as_str).unwrap_or_default();
        let told: Vec<u32> = told.split_whitespace().map(number).collect::<Result<_>>()?;
        let text = [file.tokens, told].concat();
        let whole = text.len() - file.caches.len() == ahead.unwrap_or(0);
        if text.is_empty() || entry && (!whole || file.caches.start() != file.caches.len()) {
            let reason = format!(
                "has {} tokens for {:?}",
                text.len(),
                file.caches.start()..file.caches.len()
            );
            return Err(error(&path, reason));
        }
        Ok(Self {
            path,
            model: file.model,
            tree,
            ahead,
            text,
            caches: file.caches,
            beside: file.beside,
            entry,
        })
    }

    fn place(&self, tokens: usize) -> Place {
        (
            self.model.clone(),
            self.tree.clone(),
            self.text[..tokens].to_vec(),
        )
    }
}

/// The rows of all tokens of a text.
type Chains = HashMap<Place, Vec<Arc<Snapshot>>>;

/// Puts pieces of rows behind each other. They come in order of their number of tokens.
fn chains(pieces: Vec<Piece>) -> Chains {
    let mut chains = Chains::new();
    for piece in pieces {
        let before = match piece.caches.start() {
            0 => Some(Vec::new()),
            start => {
                let text = start.saturating_add(piece.ahead.unwrap_or(0));
                let held = (text < piece.text.len()).then(|| chains.get(&piece.place(text)));
                held.flatten().cloned()
            }
        };
        // Rows after rows that are nowhere are of no use, and if an entry needs them, that is said of the entry.
        let Some(mut chain) = before else { continue };
        let place = piece.place(piece.text.len());
        chain.push(Arc::new(piece.caches));
        chains.entry(place).or_insert(chain);
    }
    chains
}

/// An entry that was read, and the rows it needs.
struct Ready {
    piece: Piece,
    rows: Vec<Arc<Snapshot>>,
}

impl Ready {
    fn new(piece: Piece, chains: &Chains) -> Result<Self> {
        match chains.get(&piece.place(piece.text.len())) {
            Some(rows) => Ok(Self {
                rows: rows.clone(),
                piece,
            }),
            None => Err(error(
                &piece.path,
                "needs rows of its tokens that no other file holds; remove it",
            )),
        }
    }

    fn join(&self) -> Result<Snapshot> {
        let rows = self.rows.iter().map(Arc::as_ref);
        let pieces: Vec<&Snapshot> = rows.chain([&self.piece.caches]).collect();
        Snapshot::join(&pieces).map_err(|e| {
            let reason = format!("does not go together with the rows of its tokens: {e}");
            error(&self.piece.path, reason)
        })
    }

    /// True if it is an entry of a model's caches, and stored.
    fn store(&self, store: &PromptStore) -> Result<bool> {
        let Piece { model, text, .. } = &self.piece;
        let caches = self.join()?;
        match (self.piece.ahead, &self.piece.beside) {
            (Some(ahead), Some(beside)) => {
                // Of no use without the caches that it goes with.
                if store.contains(model, &text[..caches.len()]) {
                    let apart = Apart {
                        caches,
                        beside: beside.clone(),
                    };
                    store.place(&apart.key(model, ahead), text, &apart.caches, Some(beside), false)?;
                }
                Ok(false)
            }
            _ => store.place(&Key::of_model(model, &caches), text, &caches, None, false),
        }
    }
}

fn rows_file(node: &Exported) -> CacheFile {
    file(node, &node.rows, ROWS)
}

fn entry_file(node: &Exported, held: &Held) -> CacheFile {
    CacheFile {
        beside: held.beside.as_deref().cloned(),
        ..file(node, &held.caches, ENTRY)
    }
}

fn file(node: &Exported, caches: &Snapshot, holds: &str) -> CacheFile {
    let (tokens, told) = node.text.split_at(caches.len().min(node.text.len()));
    let mut notes = BTreeMap::from([
        (TREE.to_owned(), node.key.shape.clone()),
        (HOLDS.to_owned(), holds.to_owned()),
    ]);
    if let Some(ahead) = node.key.ahead {
        let told: Vec<String> = told.iter().map(ToString::to_string).collect();
        notes.insert(AHEAD.to_owned(), ahead.to_string());
        notes.insert(TOLD.to_owned(), told.join(" "));
    }
    CacheFile {
        model: node.key.model.clone(),
        tokens: tokens.to_vec(),
        caches: caches.clone(),
        beside: None,
        notes,
    }
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
