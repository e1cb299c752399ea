//! The cache of recurrent layers: arrays, and a journal of records that lets tokens be taken back.

use std::collections::VecDeque;

use candle_core::{Device, Tensor};

use crate::memory;
use crate::{
    Cache, Checkpoint, Error, Footprint, Ledger, RecordSlice, RecurrentCache, RecurrentLayout, RecurrentStep,
    Result, Snapshot,
};

/// Where a call stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Call {
    None,
    /// Between `begin` and `finish` of so many tokens; the arrays stay as they are.
    Reading(usize),
    /// Between `begin` and `finish` of so many tokens; the arrays may be half written.
    Writing(usize),
}

/// Named arrays with a base state and a journal of records since.
///
/// The base is the state some tokens ago; the journal holds a record for each token after it. Under an open checkpoint a
/// call adds records and leaves the base alone, so `trim` and `restore` only shorten the journal: they move no state and
/// cost the same whatever is dropped. Records that were committed are folded into the base by the next call's own
/// kernel, which reads and writes the base once, as a plain step does. Without a checkpoint nothing is recorded and a call
/// updates the base in place.
///
/// The journal is bounded by `record_limit` tokens between a checkpoint and its commit, not by the context.
///
/// It does *not* promise that a token can be trimmed without a checkpoint opened before it: a recurrence folds tokens
/// in, and there is no way back without records.
pub struct ArraysCache {
    layout: RecurrentLayout,
    device: Device,
    record_limit: usize,
    arrays: Vec<Tensor>,
    /// One entry a recorded call; `rows` shrinks from the end when tokens are trimmed.
    journal: VecDeque<RecordSlice>,
    /// How many entries of the journal are committed. The others came after the open checkpoint.
    committed: usize,
    len: usize,
    call: Call,
    ledger: Ledger,
}

impl ArraysCache {
    /// A cache at the state before the first token: all arrays zero.
    ///
    /// `record_limit`: most tokens that may be fed between a checkpoint and its commit.
    pub fn new(layout: RecurrentLayout, record_limit: usize, device: &Device) -> Result<Self> {
        let arrays = zeros(&layout, device)?;
        Ok(Self {
            layout,
            device: device.clone(),
            record_limit,
            arrays,
            journal: VecDeque::new(),
            committed: 0,
            len: 0,
            call: Call::None,
            ledger: Ledger::new(),
        })
    }

    fn intact(&self) -> Result<()> {
        match self.call {
            Call::Writing(_) => Err(Error::Torn {
                kind: self.kind().to_owned(),
            }),
            Call::None | Call::Reading(_) => Ok(()),
        }
    }

    /// Tokens recorded since the checkpoint.
    fn recorded(&self) -> usize {
        self.journal
            .iter()
            .skip(self.committed)
            .map(|r| r.rows.len())
            .sum()
    }

    /// Puts `arrays` in place as the state of `len` tokens, with nothing recorded.
    fn set(&mut self, arrays: Vec<Tensor>, len: usize) {
        self.arrays = arrays;
        self.journal.clear();
        self.committed = 0;
        self.len = len;
        self.call = Call::None;
        self.ledger.clear();
    }
}

impl std::fmt::Debug for ArraysCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ArraysCache")
            .field("layout", &self.layout)
            .field("len", &self.len)
            .field("recorded", &self.recorded())
            .finish_non_exhaustive()
    }
}

impl Cache for ArraysCache {
    fn kind(&self) -> &str {
        "arrays"
    }

    fn len(&self) -> usize {
        self.len
    }

    fn trimmable(&self) -> usize {
        match self.intact() {
            Ok(()) => self.recorded(),
            Err(_) => 0,
        }
    }

    fn trim(&mut self, n: usize) -> Result<()> {
        self.intact()?;
        Error::check_trim(self, n)?;
        let mut left = n;
        while left > 0 {
            let Some(last) = self.journal.back_mut() else {
                break;
            };
            let cut = left.min(last.rows.len());
            last.rows.end -= cut;
            left -= cut;
            if last.rows.is_empty() {
                self.journal.pop_back();
            }
        }
        self.len -= n;
        // A kernel that is still reading works on records that are gone now: its results are not taken.
        self.call = Call::None;
        Ok(())
    }

    fn checkpoint(&mut self) -> Result<Checkpoint> {
        self.intact()?;
        let checkpoint = self.ledger.open(self.len)?;
        self.committed = self.journal.len();
        Ok(checkpoint)
    }

    fn restore(&mut self, to: &Checkpoint) -> Result<()> {
        self.ledger.verify(to)?;
        self.trim(self.recorded())
    }

    fn commit(&mut self, checkpoint: Checkpoint) {
        if self.ledger.close(&checkpoint) {
            self.committed = self.journal.len();
        }
    }

    fn snapshot(&self) -> Result<Snapshot> {
        self.intact()?;
        let journal: Vec<RecordSlice> = self.journal.iter().cloned().collect();
        let arrays = if journal.is_empty() {
            self.arrays
                .iter()
                .map(Tensor::force_contiguous)
                .collect::<candle_core::Result<Vec<_>>>()?
        } else {
            self.layout.fold.fold(&self.arrays, &journal)?
        };
        let snapshot = Snapshot::new(self.kind(), self.len);
        let specs = &self.layout.arrays;
        Ok(specs
            .iter()
            .zip(arrays)
            .fold(snapshot, |s, (spec, array)| s.with_array(spec.name, array)))
    }

    fn fits(&self, from: &Snapshot) -> Result<()> {
        from.expect_kind(self.kind())?;
        self.layout
            .arrays
            .iter()
            .try_for_each(|spec| from.array(spec, None).map(|_| ()))
    }

    fn load(&mut self, from: &Snapshot) -> Result<()> {
        self.fits(from)?;
        let mut arrays = Vec::with_capacity(self.layout.arrays.len());
        for spec in &self.layout.arrays {
            arrays.push(memory::copy(from.array(spec, None)?, &self.device)?);
        }
        self.set(arrays, from.len());
        Ok(())
    }

    fn reset(&mut self) {
        // The old arrays are not reused: a cut-off kernel or a caller may still hold them.
        match zeros(&self.layout, &self.device) {
            Ok(arrays) => self.set(arrays, 0),
            // The device gave no memory: nothing may be read until a later reset or load succeeds.
            Err(_) => self.call = Call::Writing(0),
        }
    }

    fn footprint(&self) -> Footprint {
        let bytes = |tensors: &[Tensor]| -> usize {
            tensors
                .iter()
                .map(|t| t.elem_count() * t.dtype().size_in_bytes())
                .sum()
        };
        Footprint {
            live: bytes(&self.arrays),
            records: self.journal.iter().map(|r| bytes(&r.arrays)).sum(),
            reserve: 0,
        }
    }

    fn admit(&self, tokens: usize) -> Result<()> {
        self.intact()?;
        if self.ledger.open_at().is_some() && self.recorded() + tokens > self.record_limit {
            return Err(Error::RecordLimit {
                asked: tokens,
                held: self.recorded(),
                limit: self.record_limit,
            });
        }
        Ok(())
    }
}

impl RecurrentCache for ArraysCache {
    fn layout(&self) -> &RecurrentLayout {
        &self.layout
    }

    fn begin(&mut self, tokens: usize) -> Result<RecurrentStep> {
        self.admit(tokens)?;
        let recording = self.ledger.open_at().is_some();
        let step = RecurrentStep {
            arrays: self.arrays.clone(),
            fold: self.journal.iter().take(self.committed).cloned().collect(),
            replay: self.journal.iter().skip(self.committed).cloned().collect(),
            recording,
        };
        self.call = if step.writes() {
            Call::Writing(tokens)
        } else {
            Call::Reading(tokens)
        };
        Ok(step)
    }

    fn finish(&mut self, arrays: Vec<Tensor>, records: Vec<Tensor>) -> Result<()> {
        let (Call::Reading(tokens) | Call::Writing(tokens)) = self.call else {
            return Err(Error::mismatch(
                "a call's results",
                "a call that was begun",
                "none",
            ));
        };
        let recording = self.ledger.open_at().is_some();
        let expected = if recording { self.layout.records.len() } else { 0 };
        if arrays.len() != self.layout.arrays.len() || records.len() != expected {
            return Err(Error::mismatch(
                "a call's results",
                format!("{} arrays and {expected} records", self.layout.arrays.len()),
                format!("{} arrays and {} records", arrays.len(), records.len()),
            ));
        }
        for (spec, array) in self.layout.arrays.iter().zip(&arrays) {
            spec.check(array, None)?;
        }
        for (spec, record) in self.layout.records.iter().zip(&records) {
            spec.check(record, Some(tokens))?;
        }
        self.arrays = arrays
            .into_iter()
            .map(memory::owned)
            .collect::<Result<Vec<_>>>()?;
        self.journal.drain(..self.committed);
        self.committed = 0;
        if recording {
            self.journal.push_back(RecordSlice {
                arrays: records,
                rows: 0..tokens,
            });
        }
        self.len += tokens;
        self.call = Call::None;
        Ok(())
    }

    fn abandon(&mut self) {
        self.call = Call::None;
    }
}

fn zeros(layout: &RecurrentLayout, device: &Device) -> Result<Vec<Tensor>> {
    let mut arrays = Vec::with_capacity(layout.arrays.len());
    for spec in &layout.arrays {
        arrays.push(memory::zeros(spec.shape.as_slice(), spec.dtype, device)?);
    }
    Ok(arrays)
}
