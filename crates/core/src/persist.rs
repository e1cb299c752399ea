//! A whole stack as one safetensors file.
//!
//! # Format, version 1
//! Tensors: `token_ids` (U32, one for each token held), and `layers.{i}.{array}` for the arrays of each layer's snapshot.
//! Metadata: `format` = `recant-cache`, `version`, `model` (the fingerprint), `layers`, and for each layer
//! `layers.{i}.kind`, `layers.{i}.len` and `layers.{i}.setting.{name}`; `digest` covers all of it and every tensor's
//! name, type, shape and bytes. The digest guards against damage and careless editing, not against forgery.

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

/// Writes `stack` and the tokens it holds to `path`. A file that was there is replaced only once the new one is whole.
///
/// # Errors
/// `tokens` is not as long as the stack; the stack cannot give a snapshot, or a layer's has parts of its own; the file
/// cannot be written.
pub fn save(path: impl AsRef<Path>, stack: &CacheStack, tokens: &[u32]) -> Result<()> {
    let path = path.as_ref();
    if tokens.len() != stack.len() {
        return Err(Error::mismatch("token ids to save", stack.len(), tokens.len()));
    }
    let snapshot = stack.snapshot()?;
    let mut meta: BTreeMap<String, String> = BTreeMap::new();
    meta.insert("format".into(), FORMAT.into());
    meta.insert("version".into(), VERSION.into());
    meta.insert("model".into(), stack.layout().fingerprint.clone());
    meta.insert("layers".into(), snapshot.parts().len().to_string());
    let mut tensors: BTreeMap<String, Tensor> = BTreeMap::new();
    tensors.insert(TOKENS.into(), Tensor::new(tokens, &Device::Cpu)?);
    for (index, part) in snapshot.parts().iter().enumerate() {
        if !part.parts().is_empty() {
            return Err(Error::mismatch(
                "snapshot to save",
                "arrays alone, which is what the format holds",
                format!("{} snapshots inside that of layer {index}", part.parts().len()),
            )
            .in_layer(index, part.kind()));
        }
        meta.insert(format!("layers.{index}.kind"), part.kind().to_owned());
        meta.insert(format!("layers.{index}.len"), part.len().to_string());
        for (name, value) in part.settings() {
            meta.insert(format!("layers.{index}.setting.{name}"), value.to_string());
        }
        for (name, array) in part.arrays() {
            tensors.insert(format!("layers.{index}.{name}"), array.to_device(&Device::Cpu)?);
        }
    }
    let mut digest = Digest::of_metadata(&meta);
    for (name, tensor) in &tensors {
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

/// Reads what [`save`] wrote into `stack`, and gives the token ids it holds.
///
/// # Errors
/// The file is absent, truncated, edited, of another format or version, or of a model or layout other than the stack's.
/// The stack is then unchanged.
pub fn load(path: impl AsRef<Path>, stack: &mut CacheStack) -> Result<Vec<u32>> {
    let path = path.as_ref();
    let bytes = std::fs::read(path).map_err(|e| file_error(path, format!("cannot be read: {e}")))?;
    let (tokens, snapshot) =
        parse(&bytes, &stack.layout().fingerprint).map_err(|reason| file_error(path, reason))?;
    stack.fits(&snapshot).map_err(|e| {
        file_error(
            path,
            format!("does not fit the caches it is to be loaded into: {e}"),
        )
    })?;
    stack.load(&snapshot)?;
    Ok(tokens)
}

fn parse(bytes: &[u8], fingerprint: &str) -> std::result::Result<(Vec<u32>, Snapshot), String> {
    let broken = |e: safetensors::SafeTensorError| format!("is truncated or no safetensors file: {e}");
    let (_, header) = SafeTensors::read_metadata(bytes).map_err(broken)?;
    let file = SafeTensors::deserialize(bytes).map_err(broken)?;
    let meta: BTreeMap<String, String> = header
        .metadata()
        .clone()
        .unwrap_or_default()
        .into_iter()
        .collect();
    let field = |name: &str| {
        meta.get(name)
            .map(String::as_str)
            .ok_or_else(|| format!("lacks the metadata field `{name}`: it is no cache file of this library"))
    };
    let number = |name: &str| -> std::result::Result<usize, String> {
        let text = field(name)?;
        text.parse()
            .map_err(|_| format!("has `{text}` in the metadata field `{name}`, where a number is expected"))
    };
    expect("format", field("format")?, FORMAT)?;
    expect("version", field("version")?, VERSION)?;

    let mut covered = meta.clone();
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
    if digest.hex() != field(DIGEST)? {
        return Err("was changed after it was written: its digest does not match".to_owned());
    }
    expect("model", field("model")?, fingerprint)?;

    let mut tensors: BTreeMap<String, Tensor> = BTreeMap::new();
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
    // Each layer has a metadata field of its own, so a count beyond the metadata is refused at the first one missing.
    let mut parts = Vec::new();
    for index in 0..number("layers")? {
        let len = number(&format!("layers.{index}.len"))?;
        if len != tokens.len() {
            return Err(format!(
                "has {} token ids, but layer {index} holds {len} tokens",
                tokens.len()
            ));
        }
        let mut part = Snapshot::new(field(&format!("layers.{index}.kind"))?, len);
        let settings = format!("layers.{index}.setting.");
        for name in meta.keys().filter_map(|k| k.strip_prefix(&settings)) {
            part = part.with_setting(name, number(&format!("{settings}{name}"))?);
        }
        let arrays = format!("layers.{index}.");
        for (name, tensor) in &tensors {
            if let Some(name) = name.strip_prefix(&arrays) {
                part = part.with_array(name, tensor.clone());
            }
        }
        parts.push(part);
    }
    let snapshot = Snapshot::new("stack", tokens.len()).with_parts(parts);
    Ok((tokens, snapshot))
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
