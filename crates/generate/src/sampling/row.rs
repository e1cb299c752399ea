//! Logits as models give them.

use recant_core::candle::{DType, Storage, Tensor};
use recant_core::{Candidate, SegmentOutput};

use crate::Result;

/// One row of logits, in either form of a readout.
#[derive(Debug, Clone, Copy)]
pub enum Row<'a> {
    /// The largest, largest first, as [`LanguageModel::project_largest`](recant_core::LanguageModel::project_largest) gives
    /// them for a row.
    Largest(&'a [Candidate]),
    /// All: `[1, width]`, any float type.
    All(&'a Tensor),
}

impl<'a> Row<'a> {
    /// The only row of a segment's output.
    ///
    /// # Errors
    /// The output has no logits, or the largest of another number of rows. Rows of a tensor are counted when it is read.
    pub fn only(output: &'a SegmentOutput) -> Result<Self> {
        match output.largest.as_deref() {
            None => Ok(Self::All(output.logits()?)),
            Some([row]) => Ok(Self::Largest(row)),
            Some(rows) => Err(rows_differ(1, rows.len())),
        }
    }
}

pub(super) fn rows_differ(expected: usize, found: usize) -> crate::Error {
    recant_core::Error::mismatch("rows of logits", expected, found).into()
}

/// Rows of logits where they can be read.
pub(super) enum Rows<'a> {
    Largest(&'a [Vec<Candidate>]),
    All { logits: &'a [f32], width: usize },
}

/// One of them.
#[derive(Debug, Clone, Copy)]
pub(super) enum View<'a> {
    Largest(&'a [Candidate]),
    All(&'a [f32]),
}

impl<'a> Rows<'a> {
    pub(super) fn count(&self) -> usize {
        match self {
            Self::Largest(rows) => rows.len(),
            Self::All { logits, width } => logits.len() / width.max(&1),
        }
    }

    /// A row, of which the first `among` logits count.
    pub(super) fn row(&self, place: usize, among: usize) -> View<'a> {
        match *self {
            Self::Largest(rows) => View::Largest(&rows[place]),
            Self::All { logits, width } => View::All(&logits[place * width..][..width.min(among)]),
        }
    }
}

impl View<'_> {
    /// Whether there is nothing but NaN.
    pub(super) fn is_nan(self) -> bool {
        match self {
            // NaN is never among the largest.
            Self::Largest(largest) => largest.is_empty(),
            Self::All(logits) => logits.iter().all(|logit| logit.is_nan()),
        }
    }
}

/// Calls `f` with the rows of a tensor: where they lie, if that is possible.
pub(super) fn on_host<R>(logits: &Tensor, f: impl FnOnce(&Rows<'_>) -> Result<R>) -> Result<R> {
    let (_, width) = logits.dims2()?;
    if logits.dtype() == DType::F32 {
        let (storage, layout) = logits.storage_and_layout();
        if let (Storage::Cpu(storage), Some((start, end))) = (&*storage, layout.contiguous_offsets()) {
            let logits = &storage.as_slice::<f32>()?[start..end];
            return f(&Rows::All { logits, width });
        }
    }
    let logits = logits.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    f(&Rows::All {
        logits: &logits,
        width,
    })
}
