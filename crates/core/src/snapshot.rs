//! Owned copies of a cache's state.

use std::borrow::Cow;
use std::collections::BTreeMap;

use candle_core::Tensor;

use crate::{ArraySpec, Error, Result};

/// A cache's state: settled, owned, and sharing no storage with the cache it came from.
///
/// Nothing writes to a snapshot's arrays, so clones are cheap and safe.
#[derive(Debug, Clone)]
pub struct Snapshot {
    kind: String,
    len: usize,
    settings: BTreeMap<String, usize>,
    arrays: BTreeMap<String, Tensor>,
    parts: Vec<Snapshot>,
}

impl Snapshot {
    /// A snapshot of `len` tokens without arrays.
    ///
    /// `kind` is the cache's own [`kind`](crate::Cache::kind).
    pub fn new(kind: impl Into<String>, len: usize) -> Self {
        Self {
            kind: kind.into(),
            len,
            settings: BTreeMap::new(),
            arrays: BTreeMap::new(),
            parts: Vec::new(),
        }
    }

    /// Adds a number that a cache must agree on before it loads this, such as a window.
    #[must_use]
    pub fn with_setting(mut self, name: impl Into<String>, value: usize) -> Self {
        self.settings.insert(name.into(), value);
        self
    }

    /// Adds an array. The caller must own its storage: see [`Tensor::copy`].
    #[must_use]
    pub fn with_array(mut self, name: impl Into<String>, array: Tensor) -> Self {
        self.arrays.insert(name.into(), array);
        self
    }

    /// Adds the snapshots of the parts of a cache made of caches.
    #[must_use]
    pub fn with_parts(mut self, parts: Vec<Snapshot>) -> Self {
        self.parts = parts;
        self
    }

    /// The kind of the cache it came from.
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// Tokens in it.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True when it holds no tokens.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Numbers that the loading cache must agree on.
    pub fn settings(&self) -> &BTreeMap<String, usize> {
        &self.settings
    }

    /// The arrays by name.
    pub fn arrays(&self) -> &BTreeMap<String, Tensor> {
        &self.arrays
    }

    /// Snapshots of the parts.
    pub fn parts(&self) -> &[Snapshot] {
        &self.parts
    }

    /// Bytes of all arrays, parts included.
    pub fn bytes(&self) -> usize {
        let own: usize = self
            .arrays
            .values()
            .map(|a| a.elem_count() * a.dtype().size_in_bytes())
            .sum();
        own + self.parts.iter().map(Self::bytes).sum::<usize>()
    }

    /// Refuses a snapshot of another kind of cache.
    pub fn expect_kind(&self, kind: &str) -> Result<()> {
        if self.kind != kind {
            return Err(Error::mismatch("kind of snapshot", kind, &self.kind));
        }
        Ok(())
    }

    /// Refuses a snapshot whose setting `name` is not `value`.
    pub fn expect_setting(&self, name: &str, value: usize) -> Result<()> {
        match self.settings.get(name) {
            Some(found) if *found == value => Ok(()),
            found => Err(Error::mismatch(
                format!("setting `{name}` of a {} snapshot", self.kind),
                value,
                found.map_or("none".to_owned(), ToString::to_string),
            )),
        }
    }

    /// The array that `spec` describes, with `rows` in front of its shape.
    ///
    /// # Errors
    /// It is absent, or of another shape or type.
    pub fn array(&self, spec: &ArraySpec, rows: Option<usize>) -> Result<&Tensor> {
        let array = self.arrays.get(spec.name).ok_or_else(|| {
            Error::mismatch(
                format!("arrays of a {} snapshot", self.kind),
                format!("one named `{}`", spec.name),
                format!("{:?}", self.arrays.keys()),
            )
        })?;
        spec.check(array, rows)?;
        Ok(array)
    }

    /// Where this snapshot first differs from `other` in any bit, in words; `None` if it does not.
    pub fn difference(&self, other: &Self) -> Option<String> {
        if self.kind != other.kind || self.len != other.len || self.settings != other.settings {
            return Some(format!(
                "{} of {} tokens {:?} against {} of {} tokens {:?}",
                self.kind, self.len, self.settings, other.kind, other.len, other.settings
            ));
        }
        if !self.arrays.keys().eq(other.arrays.keys()) {
            return Some(format!(
                "arrays {:?} against {:?}",
                self.arrays.keys(),
                other.arrays.keys()
            ));
        }
        for (name, a) in &self.arrays {
            let b = &other.arrays[name];
            if a.dims() != b.dims() || a.dtype() != b.dtype() {
                return Some(format!(
                    "array `{name}`: {:?} of {:?} against {:?} of {:?}",
                    a.dtype(),
                    a.dims(),
                    b.dtype(),
                    b.dims()
                ));
            }
            let (x, y) = (bytes_of(a), bytes_of(b));
            if let Some(at) = x.iter().zip(y.iter()).position(|(x, y)| x != y) {
                let element = at / a.dtype().size_in_bytes();
                return Some(format!("array `{name}` from element {element} of {:?}", a.dims()));
            }
        }
        if self.parts.len() != other.parts.len() {
            return Some(format!(
                "{} parts against {}",
                self.parts.len(),
                other.parts.len()
            ));
        }
        self.parts
            .iter()
            .zip(&other.parts)
            .enumerate()
            .find_map(|(i, (a, b))| a.difference(b).map(|d| format!("part {i}: {d}")))
    }
}

/// The little-endian bytes of a tensor, in logical order.
pub(crate) fn bytes_of(tensor: &Tensor) -> Cow<'_, [u8]> {
    safetensors::View::data(tensor)
}
