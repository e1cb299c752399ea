//! Owned copies of a cache's state.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use candle_core::Tensor;

use crate::memory::owned;
use crate::{ArraySpec, Error, Result};

/// A cache's state: settled, owned, and sharing no storage with the cache it came from.
///
/// Nothing writes to a snapshot's arrays, so clones are cheap and safe.
///
/// # Cutting and joining
/// Arrays that hold one row for each token ([`with_rows`](Self::with_rows)) can be cut between tokens and joined again, bit for
/// bit; all others belong to the last token and are kept or left out whole. [`rows`](Self::rows) and [`after`](Self::after)
/// cut, [`join`](Self::join) joins. What was cut off its beginning says so in [`start`](Self::start), and a cache that has
/// lost rows by it refuses it.
#[derive(Debug, Clone)]
pub struct Snapshot {
    kind: String,
    len: usize,
    start: usize,
    settings: BTreeMap<String, usize>,
    arrays: BTreeMap<String, Tensor>,
    rows: BTreeSet<String>,
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
            start: 0,
            settings: BTreeMap::new(),
            arrays: BTreeMap::new(),
            rows: BTreeSet::new(),
            parts: Vec::new(),
        }
    }

    /// The same, without the rows of its first `start` tokens: for what was cut, when it is read from a file.
    pub(crate) fn starting_at(mut self, start: usize) -> Self {
        self.start = start;
        self
    }

    /// Adds a number that a cache must agree on before it loads this, such as a window.
    #[must_use]
    pub fn with_setting(mut self, name: impl Into<String>, value: usize) -> Self {
        self.settings.insert(name.into(), value);
        self
    }

    /// Adds an array that belongs to all tokens together. The caller must own its storage: see [`Tensor::copy`].
    #[must_use]
    pub fn with_array(mut self, name: impl Into<String>, array: Tensor) -> Self {
        let name = name.into();
        self.rows.remove(&name);
        self.arrays.insert(name, array);
        self
    }

    /// Adds an array whose leading dimension counts tokens: row `i` depends on the tokens up to `i` alone, so that all
    /// texts which begin with these tokens have the same row. The caller must own its storage.
    ///
    /// # Shapes
    /// `array`: `[len, ..]`.
    #[must_use]
    pub fn with_rows(mut self, name: impl Into<String>, array: Tensor) -> Self {
        let name = name.into();
        self.rows.insert(name.clone());
        self.arrays.insert(name, array);
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

    /// The first token that it holds rows of: 0, unless it was cut.
    pub fn start(&self) -> usize {
        self.start
    }

    /// Numbers that the loading cache must agree on.
    pub fn settings(&self) -> &BTreeMap<String, usize> {
        &self.settings
    }

    /// The arrays by name.
    pub fn arrays(&self) -> &BTreeMap<String, Tensor> {
        &self.arrays
    }

    /// Names of the arrays that hold a row for each token from [`start`](Self::start) on.
    pub fn row_names(&self) -> &BTreeSet<String> {
        &self.rows
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

    /// The same with arrays that are all of their storage, but for less than a cache line. One that was a view of more is copied,
    /// so that it does not keep alive what it was cut from.
    ///
    /// # Errors
    /// An array of rows has not one for each token.
    pub fn compact(&self) -> Result<Self> {
        self.check_rows()?;
        let mut compact = self.clone();
        for array in compact.arrays.values_mut() {
            *array = owned(array.clone())?;
        }
        compact.parts = self.parts.iter().map(Self::compact).collect::<Result<_>>()?;
        Ok(compact)
    }

    /// The rows of some tokens, copied, and nothing else.
    ///
    /// # Errors
    /// Rows outside [`start`](Self::start)`..`[`len`](Self::len), a part of another length, or an array that has not one row
    /// for each token.
    pub fn rows(&self, tokens: Range<usize>) -> Result<Self> {
        self.cut(&tokens, false)
    }

    /// The rows of the tokens from `start` on, copied, and everything that is not rows. `after(len())` leaves out all rows.
    ///
    /// # Errors
    /// As [`rows`](Self::rows) says.
    pub fn after(&self, start: usize) -> Result<Self> {
        self.cut(&(start..self.len), true)
    }

    fn cut(&self, tokens: &Range<usize>, whole: bool) -> Result<Self> {
        if tokens.start < self.start || tokens.start > tokens.end || tokens.end > self.len {
            return Err(Error::mismatch(
                format!("tokens to cut out of a {} snapshot", self.kind),
                format!("some of {:?}", self.start..self.len),
                format!("{tokens:?}"),
            ));
        }
        self.check_rows()?;
        let mut cut = Self::new(&self.kind, tokens.end).starting_at(tokens.start);
        cut.settings = self.settings.clone();
        for (name, array) in &self.arrays {
            if !self.rows.contains(name) {
                if whole {
                    cut = cut.with_array(name, owned(array.clone())?);
                }
                continue;
            }
            if *tokens == (self.start..self.len) {
                cut = cut.with_rows(name, owned(array.clone())?);
            } else if !tokens.is_empty() {
                let rows = array.narrow(0, tokens.start - self.start, tokens.len())?;
                cut = cut.with_rows(name, rows.force_contiguous()?);
            }
        }
        for part in &self.parts {
            self.check_part(part)?;
            cut.parts.push(part.cut(tokens, whole)?);
        }
        Ok(cut)
    }

    /// Refuses arrays of rows that have not one for each token. Parts are not looked at.
    pub(crate) fn check_rows(&self) -> Result<()> {
        let tokens = self.len - self.start;
        for (name, array) in self.arrays.iter().filter(|(name, _)| self.rows.contains(*name)) {
            if array.dims().first() != Some(&tokens) {
                return Err(Error::mismatch(
                    format!("array `{name}` of a {} snapshot", self.kind),
                    format!("{tokens} rows"),
                    format!("{:?}", array.dims()),
                ));
            }
        }
        Ok(())
    }

    fn check_part(&self, part: &Self) -> Result<()> {
        if (part.start, part.len) != (self.start, self.len) {
            return Err(Error::mismatch(
                format!("tokens of a part of a {} snapshot", self.kind),
                format!("{:?}", self.start..self.len),
                format!("{:?}", part.start..part.len),
            ));
        }
        Ok(())
    }

    /// One snapshot of consecutive pieces of one text: all rows, and the rest of the last.
    ///
    /// # Errors
    /// No pieces, pieces that do not follow each other, or pieces of different kinds, settings or arrays.
    pub fn join(pieces: &[&Self]) -> Result<Self> {
        let [first, .., last] = pieces else {
            return match pieces {
                [only] => only.compact(),
                _ => Err(Error::mismatch("pieces of a snapshot to join", "at least one", 0)),
            };
        };
        pieces.iter().try_for_each(|piece| piece.check_rows())?;
        for pair in pieces.windows(2) {
            pair[0].check_next(pair[1])?;
        }
        let mut joined = Self::new(&last.kind, last.len).starting_at(first.start);
        joined.settings = last.settings.clone();
        for (name, array) in last.arrays.iter().filter(|(name, _)| !last.rows.contains(*name)) {
            joined = joined.with_array(name, array.clone());
        }
        let held: Vec<&Self> = pieces.iter().copied().filter(|p| p.start < p.len).collect();
        let names = held.first().map(|piece| &piece.rows);
        for name in names.into_iter().flatten() {
            let mut rows = Vec::with_capacity(held.len());
            for piece in &held {
                let array = piece.arrays.get(name).filter(|_| Some(&piece.rows) == names);
                let array = array.ok_or_else(|| {
                    Error::mismatch(
                        format!("rows in a piece of a {} snapshot", last.kind),
                        format!("{names:?}"),
                        format!("{:?}", piece.rows),
                    )
                })?;
                rows.push(array);
            }
            joined = joined.with_rows(name, Tensor::cat(&rows, 0)?);
        }
        for index in 0..last.parts.len() {
            let parts: Vec<&Self> = pieces.iter().map(|piece| &piece.parts[index]).collect();
            joined.parts.push(Self::join(&parts)?);
        }
        joined.parts.iter().try_for_each(|part| joined.check_part(part))?;
        Ok(joined)
    }

    /// Refuses a piece that does not go on where this one ends.
    fn check_next(&self, next: &Self) -> Result<()> {
        let told = |s: &Self, joint: usize| {
            let parts = s.parts.len();
            format!("{} {:?} of {parts} parts at token {joint}", s.kind, s.settings)
        };
        let (expected, found) = (told(self, self.len), told(next, next.start));
        match expected == found {
            true => Ok(()),
            false => Err(Error::mismatch("the next piece of a snapshot", expected, found)),
        }
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
        let head = |s: &Self| {
            let tokens = s.start..s.len;
            format!("{} of tokens {tokens:?} {:?}", s.kind, s.settings)
        };
        if head(self) != head(other) {
            return Some(format!("{} against {}", head(self), head(other)));
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
