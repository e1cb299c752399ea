//! A whole stack as one safetensors file.
//!
//! # Format, version 1
//! Tensors: `token_ids` (U32, one for each token held), and `layers.{i}.{array}` for the arrays of each layer's snapshot.
//! Metadata: `format` = `recant-cache`, `version`, `model` (the fingerprint), `layers`, and for each layer
//! `layers.{i}.kind`, `layers.{i}.len` and `layers.{i}.setting.{name}`; `digest` covers all of it and every tensor's
//! name, type, shape and bytes. The digest guards against damage and careless editing, not against forgery.
//!
//! Not in every file: `layers.{i}.rows.{array}` = `tokens` for an array that has one row for each token; `start` and
//! `layers.{i}.start`, the first token that rows are held of, if it is not 0; `note.{name}`; and in `beside` the number of
//! snapshots that another one, [`CacheFile::beside`], and its parts are, in the order in which a part follows what it is a part
//! of, with the fields and tensors of a layer each, named `beside.{j}.`, and its number of parts in `beside.{j}.parts`.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::{DType, Device, Tensor};
use safetensors::SafeTensors;

use crate::snapshot::bytes_of;
use crate::{Cache, CacheStack, Error, Result, Snapshot};

const FORMAT: &str = "recant-cache";
const VERSION: &str = "1";
const TOKENS: &str = "token_ids";
const DIGEST: &str = "digest";
const BESIDE: &str = "beside";
const START: &str = "start";
const NOTE: &str = "note.";
const STACK: &str = "stack";
/// What `rows.{array}` says.
const BY_TOKEN: &str = "tokens";
/// Deepest nesting of snapshots that a file may hold.
const MAX_DEPTH: usize = 8;

type Parsed<T> = std::result::Result<T, String>;
type Fields = BTreeMap<String, String>;
type Tensors = BTreeMap<String, Tensor>;

/// Writes `stack` and the tokens it holds to `path`. A file that was there is replaced only once the new one is whole.
///
/// # Errors
/// `tokens` is not as long as the stack; the stack cannot give a snapshot, or a layer's has parts of its own; the file
/// cannot be written.
pub fn save(path: impl AsRef<Path>, stack: &CacheStack, tokens: &[u32]) -> Result<()> {
    if tokens.len() != stack.len() {
        return Err(Error::mismatch("token ids to save", stack.len(), tokens.len()));
    }
    let file = CacheFile {
        model: stack.layout().fingerprint.clone(),
        tokens: tokens.to_vec(),
        caches: stack.snapshot()?,
        beside: None,
        notes: Fields::new(),
    };
    file.write(path)
}

/// Reads what [`save`] wrote into `stack`, and gives the token ids it holds.
///
/// # Errors
/// The file is absent, truncated, edited, of another format or version, or of a model or layout other than the stack's.
/// The stack is then unchanged.
pub fn load(path: impl AsRef<Path>, stack: &mut CacheStack) -> Result<Vec<u32>> {
    let path = path.as_ref();
    let file = CacheFile::read(path)?;
    expect("model", &file.model, &stack.layout().fingerprint).map_err(|reason| file_error(path, reason))?;
    stack.fits(&file.caches).map_err(|e| {
        file_error(
            path,
            format!("does not fit the caches it is to be loaded into: {e}"),
        )
    })?;
    stack.load(&file.caches)?;
    Ok(file.tokens)
}

/// What a cache file holds.
#[derive(Debug, Clone)]
pub struct CacheFile {
    /// The fingerprint of the model.
    pub model: String,
    /// The tokens, from the first of the text on, also where `caches` holds no rows of some.
    pub tokens: Vec<u32>,
    /// The snapshot of a stack, or a piece of one.
    pub caches: Snapshot,
    /// A snapshot of something else that belongs to the same text.
    pub beside: Option<Snapshot>,
    /// Whatever else is to be found again.
    pub notes: BTreeMap<String, String>,
}

impl CacheFile {
    /// A name for the file: 32 hexadecimal digits made of everything but the bytes of the snapshots' arrays. Two files of one
    /// name hold the same, as far as the model keeps its law.
    ///
    /// # Errors
    /// As [`write`](Self::write) says of what is to be written.
    pub fn name(&self) -> Result<String> {
        let (meta, tensors) = self.encode()?;
        let mut digest = Digest::of_metadata(&meta);
        for (name, tensor) in &tensors {
            digest.tensor(name, tensor.dtype(), tensor.dims(), &[]);
        }
        for token in &self.tokens {
            digest.word(u64::from(*token));
        }
        Ok(digest.hex())
    }

    /// Writes the file. One that was there is replaced only once the new one is whole.
    ///
    /// # Errors
    /// The number of tokens is not that of `caches`; these are not a stack's, or have layers with parts of their own; rows are not
    /// as many as a snapshot says; parts in `beside` are more than 8 deep; or the file cannot be written.
    pub fn write(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let (mut meta, mut tensors) = self.encode()?;
        let mut digest = Digest::of_metadata(&meta);
        for (name, tensor) in &mut tensors {
            *tensor = tensor.to_device(&Device::Cpu)?;
            digest.tensor(name, tensor.dtype(), tensor.dims(), &bytes_of(tensor));
        }
        meta.insert(DIGEST.into(), digest.hex());

        let partial = partial_path(path);
        let header: HashMap<String, String> = meta.into_iter().collect();
        safetensors::serialize_to_file(tensors.iter(), Some(header), &partial)
            .map_err(|e| e.to_string())
            .and_then(|()| std::fs::rename(&partial, path).map_err(|e| e.to_string()))
            .map_err(|reason| {
                let _ = std::fs::remove_file(&partial);
                file_error(path, format!("cannot be written: {reason}"))
            })
    }

    /// Reads a file. Arrays come to lie in the memory of the CPU.
    ///
    /// # Errors
    /// The file is absent, truncated, edited, or of another format or version.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let bytes = std::fs::read(path).map_err(|e| file_error(path, format!("cannot be read: {e}")))?;
        parse(&bytes).map_err(|reason| file_error(path, reason))
    }

    fn encode(&self) -> Result<(Fields, Tensors)> {
        self.caches.expect_kind(STACK)?;
        if self.tokens.len() != self.caches.len() {
            return Err(Error::mismatch(
                "token ids to save",
                self.caches.len(),
                self.tokens.len(),
            ));
        }
        let layers = self.caches.parts();
        let mut meta = Fields::new();
        meta.insert("format".into(), FORMAT.into());
        meta.insert("version".into(), VERSION.into());
        meta.insert("model".into(), self.model.clone());
        meta.insert("layers".into(), layers.len().to_string());
        if self.caches.start() > 0 {
            meta.insert(START.into(), self.caches.start().to_string());
        }
        let mut tensors = Tensors::new();
        tensors.insert(TOKENS.into(), Tensor::new(self.tokens.as_slice(), &Device::Cpu)?);
        for (index, part) in layers.iter().enumerate() {
            if !part.parts().is_empty() {
                return Err(Error::mismatch(
                    "snapshot to save",
                    "arrays alone, which is what the format holds",
                    format!("{} snapshots inside that of layer {index}", part.parts().len()),
                )
                .in_layer(index, part.kind()));
            }
            describe(&format!("layers.{index}."), part, &mut meta, &mut tensors)?;
        }
        if let Some(beside) = &self.beside {
            let mut all = Vec::new();
            flatten(beside, 1, &mut all)?;
            meta.insert(BESIDE.into(), all.len().to_string());
            for (index, snapshot) in all.into_iter().enumerate() {
                let prefix = format!("{BESIDE}.{index}.");
                meta.insert(format!("{prefix}parts"), snapshot.parts().len().to_string());
                describe(&prefix, snapshot, &mut meta, &mut tensors)?;
            }
        }
        for (name, value) in &self.notes {
            meta.insert(format!("{NOTE}{name}"), value.clone());
        }
        Ok((meta, tensors))
    }
}

/// A snapshot and its parts, each before its own parts.
fn flatten<'a>(snapshot: &'a Snapshot, depth: usize, all: &mut Vec<&'a Snapshot>) -> Result<()> {
    if depth > MAX_DEPTH {
        return Err(Error::mismatch(
            "snapshot to save",
            format!("parts at most {MAX_DEPTH} deep"),
            "deeper ones",
        ));
    }
    all.push(snapshot);
    let mut parts = snapshot.parts().iter();
    parts.try_for_each(|part| flatten(part, depth + 1, all))
}

/// Adds the fields and tensors of one snapshot without its parts.
fn describe(prefix: &str, snapshot: &Snapshot, meta: &mut Fields, tensors: &mut Tensors) -> Result<()> {
    snapshot.check_rows()?;
    meta.insert(format!("{prefix}kind"), snapshot.kind().to_owned());
    meta.insert(format!("{prefix}len"), snapshot.len().to_string());
    if snapshot.start() > 0 {
        meta.insert(format!("{prefix}{START}"), snapshot.start().to_string());
    }
    for (name, value) in snapshot.settings() {
        meta.insert(format!("{prefix}setting.{name}"), value.to_string());
    }
    for name in snapshot.row_names() {
        meta.insert(format!("{prefix}rows.{name}"), BY_TOKEN.to_owned());
    }
    for (name, array) in snapshot.arrays() {
        tensors.insert(format!("{prefix}{name}"), array.clone());
    }
    Ok(())
}

fn parse(bytes: &[u8]) -> Parsed<CacheFile> {
    let broken = |e: safetensors::SafeTensorError| format!("is truncated or no safetensors file: {e}");
    let (_, header) = SafeTensors::read_metadata(bytes).map_err(broken)?;
    let file = SafeTensors::deserialize(bytes).map_err(broken)?;
    let meta = Meta(
        header
            .metadata()
            .clone()
            .unwrap_or_default()
            .into_iter()
            .collect(),
    );
    expect("format", meta.field("format")?, FORMAT)?;
    expect("version", meta.field("version")?, VERSION)?;

    let mut covered = meta.0.clone();
    covered.remove(DIGEST);
    let mut digest = Digest::of_metadata(&covered);
    let mut views = Vec::new();
    let mut names = file.names();
    names.sort_unstable();
    for name in names {
        let view = file.tensor(name).map_err(broken)?;
        let dtype =
            DType::try_from(view.dtype()).map_err(|e| format!("has an unknown type in `{name}`: {e}"))?;
        digest.tensor(name, dtype, view.shape(), view.data());
        views.push((name, dtype, view));
    }
    if digest.hex() != meta.field(DIGEST)? {
        return Err("was changed after it was written: its digest does not match".to_owned());
    }

    let mut tensors = Tensors::new();
    for (name, dtype, view) in views {
        // An empty array may claim any other dimensions; strides are made of them all the same.
        let mut dims = view.shape().iter().map(|dim| (*dim).max(1));
        if dims.try_fold(1, usize::checked_mul).is_none() {
            return Err(format!("has an absurd shape {:?} in `{name}`", view.shape()));
        }
        let tensor = Tensor::from_raw_buffer(view.data(), dtype, view.shape(), &Device::Cpu)
            .map_err(|e| format!("has an unreadable tensor `{name}`: {e}"))?;
        tensors.insert(name.to_owned(), tensor);
    }

    let tokens = tensors
        .remove(TOKENS)
        .and_then(|t| t.to_vec1::<u32>().ok())
        .ok_or_else(|| format!("lacks the one-dimensional U32 tensor `{TOKENS}`"))?;
    Ok(CacheFile {
        model: meta.field("model")?.to_owned(),
        caches: meta.stack(tokens.len(), &tensors)?,
        beside: meta.beside(&tensors)?,
        notes: meta
            .under(NOTE)
            .map(|(name, value)| (name.to_owned(), value.clone()))
            .collect(),
        tokens,
    })
}

/// The metadata of a file.
struct Meta(Fields);

impl Meta {
    fn field(&self, name: &str) -> Parsed<&str> {
        let value = self.0.get(name).map(String::as_str);
        value.ok_or_else(|| format!("lacks the metadata field `{name}`: it is no cache file of this library"))
    }

    fn number(&self, name: &str) -> Parsed<usize> {
        let text = self.field(name)?;
        text.parse()
            .map_err(|_| format!("has `{text}` in the metadata field `{name}`, where a number is expected"))
    }

    fn under<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = (&'a str, &'a String)> {
        under(&self.0, prefix)
    }

    fn stack(&self, tokens: usize, tensors: &Tensors) -> Parsed<Snapshot> {
        let start = self.start("", tokens)?;
        let mut parts: Vec<Snapshot> = Vec::new();
        // Each layer has metadata fields of its own, so a count beyond the metadata is refused at the first one missing.
        for index in 0..self.number("layers")? {
            let prefix = format!("layers.{index}.");
            let len = self.number(&format!("{prefix}len"))?;
            if len != tokens {
                return Err(format!(
                    "has {tokens} token ids, but layer {index} holds {len} tokens"
                ));
            }
            let part = self.snapshot(&prefix, tensors)?;
            if part.start() != start {
                return Err(format!(
                    "has rows from token {} on in layer {index}, where they begin at token {start}",
                    part.start()
                ));
            }
            parts.push(part);
        }
        Ok(Snapshot::new(STACK, tokens).starting_at(start).with_parts(parts))
    }

    /// The first of `len` tokens that rows are held of.
    fn start(&self, prefix: &str, len: usize) -> Parsed<usize> {
        let name = format!("{prefix}{START}");
        let start = match self.0.contains_key(&name) {
            true => self.number(&name)?,
            false => 0,
        };
        match start <= len {
            true => Ok(start),
            false => Err(format!(
                "has rows from token {start} on in `{name}`, but {len} tokens"
            )),
        }
    }

    fn beside(&self, tensors: &Tensors) -> Parsed<Option<Snapshot>> {
        if !self.0.contains_key(BESIDE) {
            return Ok(None);
        }
        let count = self.number(BESIDE)?;
        let mut listed = Vec::new();
        for index in 0..count {
            let prefix = format!("{BESIDE}.{index}.");
            let parts = self.number(&format!("{prefix}parts"))?;
            listed.push((parts, self.snapshot(&prefix, tensors)?));
        }
        // From the last to the first, a snapshot's parts are the newest of those that have found no owner yet.
        let mut free: Vec<(usize, Snapshot)> = Vec::new();
        for (parts, snapshot) in listed.into_iter().rev() {
            let at = free.len().checked_sub(parts);
            let own = free.split_off(at.ok_or_else(|| format!("lacks parts of `{BESIDE}`"))?);
            let depth = 1 + own.iter().map(|(depth, _)| *depth).max().unwrap_or(0);
            if depth > MAX_DEPTH {
                return Err(format!(
                    "has parts in parts more than {MAX_DEPTH} deep in `{BESIDE}`"
                ));
            }
            let own = own.into_iter().rev().map(|(_, part)| part).collect();
            free.push((depth, snapshot.with_parts(own)));
        }
        match (free.pop(), free.is_empty()) {
            (Some((_, snapshot)), true) => Ok(Some(snapshot)),
            _ => Err(format!(
                "has not one snapshot in `{BESIDE}`, of which all others are parts"
            )),
        }
    }

    /// What [`describe`] described.
    fn snapshot(&self, prefix: &str, tensors: &Tensors) -> Parsed<Snapshot> {
        let name = |field: &str| format!("{prefix}{field}");
        let len = self.number(&name("len"))?;
        let start = self.start(prefix, len)?;
        let mut snapshot = Snapshot::new(self.field(&name("kind"))?, len).starting_at(start);
        let settings = name("setting.");
        for (setting, _) in self.under(&settings) {
            snapshot = snapshot.with_setting(setting, self.number(&format!("{settings}{setting}"))?);
        }
        let rows = name("rows.");
        for (array, by) in self.under(&rows) {
            expect(&format!("rows of `{prefix}{array}` by"), by, BY_TOKEN)?;
            let tensor = tensors.get(&name(array));
            if tensor.and_then(|t| t.dims().first()) != Some(&(len - start)) {
                return Err(format!(
                    "has {:?} in `{prefix}{array}`, where a row for each of {} tokens is expected",
                    tensor.map(Tensor::dims),
                    len - start
                ));
            }
        }
        for (array, tensor) in under(tensors, prefix) {
            snapshot = match self.0.contains_key(&format!("{rows}{array}")) {
                true => snapshot.with_rows(array, tensor.clone()),
                false => snapshot.with_array(array, tensor.clone()),
            };
        }
        Ok(snapshot)
    }
}

/// The entries whose names begin with `prefix`, without it.
fn under<'a, T>(map: &'a BTreeMap<String, T>, prefix: &'a str) -> impl Iterator<Item = (&'a str, &'a T)> {
    map.range::<str, _>((std::ops::Bound::Included(prefix), std::ops::Bound::Unbounded))
        .map_while(move |(name, value)| Some((name.strip_prefix(prefix)?, value)))
}

fn expect(what: &str, found: &str, expected: &str) -> std::result::Result<(), String> {
    if found == expected {
        return Ok(());
    }
    Err(format!("has {what} `{found}`, where `{expected}` is expected"))
}

fn file_error(path: &Path, reason: impl Into<String>) -> Error {
    Error::File {
        path: path.to_owned(),
        reason: reason.into(),
    }
}

/// A name beside `path`, so that the rename stays on one file system, and of its own, so that two threads that save to one
/// path do not write into each other's file.
fn partial_path(path: &Path) -> std::path::PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let mut name = path.file_name().unwrap_or_default().to_owned();
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    name.push(format!(".{}-{number}.partial", std::process::id()));
    path.with_file_name(name)
}

/// A 128-bit rolling checksum, two multiplicative lanes over 8-byte words.
struct Digest([u64; 2]);

impl Digest {
    fn of_metadata(meta: &BTreeMap<String, String>) -> Self {
        let mut digest = Self([0x9e37_79b9_7f4a_7c15, 0xc2b2_ae3d_27d4_eb4f]);
        for (key, value) in meta {
            digest.field(key.as_bytes());
            digest.field(value.as_bytes());
        }
        digest
    }

    fn tensor(&mut self, name: &str, dtype: DType, shape: &[usize], data: &[u8]) {
        self.field(name.as_bytes());
        self.field(dtype.as_str().as_bytes());
        for dim in shape {
            self.word(*dim as u64);
        }
        self.field(data);
    }

    fn field(&mut self, bytes: &[u8]) {
        self.word(bytes.len() as u64);
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.word(u64::from_le_bytes(word));
        }
    }

    fn word(&mut self, word: u64) {
        self.0[0] = (self.0[0] ^ word)
            .wrapping_mul(0x0000_0100_0000_01b3)
            .rotate_left(29);
        self.0[1] = (self.0[1].rotate_left(31) ^ word).wrapping_mul(0xff51_afd7_ed55_8ccd);
    }

    fn hex(&self) -> String {
        format!("{:016x}{:016x}", self.0[0], self.0[1])
    }
}

#[cfg(test)]
mod tests;
