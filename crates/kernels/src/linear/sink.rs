//! Where outputs go.

use std::mem::MaybeUninit;

use crate::pool::Shared;

/// An output of a row and its index.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// Index of the output.
    pub index: u32,
    /// Its value.
    pub value: f32,
}

impl Candidate {
    /// What any number beats.
    pub(super) const NONE: Self = Self {
        index: u32::MAX,
        value: f32::NEG_INFINITY,
    };

    fn is_none(self) -> bool {
        self.index == u32::MAX
    }
}

/// What becomes of outputs.
pub(super) enum Sink<'a> {
    /// All are written: `[rows, width]`.
    All {
        y: Shared<'a, MaybeUninit<f32>>,
        width: usize,
    },
    /// Each task keeps the largest of its own: `[tasks, rows, count]`, largest first.
    Largest {
        best: Shared<'a, Candidate>,
        rows: usize,
        count: usize,
        /// Outputs that count are those below.
        among: usize,
    },
}

impl Sink<'_> {
    /// Takes a row's outputs from `column` on. A task brings those of a row in ascending order, and no other task brings
    /// them.
    pub(super) fn take(&self, task: usize, row: usize, column: usize, values: &[f32]) {
        match self {
            Self::All { y, width } => {
                let at = row * width + column;
                // SAFETY: one task has these columns, and rows do not overlap.
                let y = unsafe { y.part(at..at + values.len()) };
                for (y, value) in y.iter_mut().zip(values) {
                    y.write(*value);
                }
            }
            Self::Largest {
                best,
                rows,
                count,
                among,
            } => {
                let at = (task * rows + row) * count;
                // SAFETY: one thread has the task.
                let best = unsafe { best.part(at..at + count) };
                let values = &values[..values.len().min(among.saturating_sub(column))];
                enter(best, column, values);
            }
        }
    }
}

/// Enters values, whose indices begin at `first` and are above all that came before, into a list of the largest: ties stay
/// with the lowest index, and NaN is never taken.
fn enter(best: &mut [Candidate], first: usize, values: &[f32]) {
    let Some(last) = best.last() else { return };
    // Without a branch an element, since nearly all are too small.
    let least = last.value;
    if !last.is_none() && !values.iter().fold(false, |any, x| any | (*x > least)) {
        return;
    }
    for (i, value) in values.iter().enumerate() {
        let candidate = Candidate {
            index: (first + i) as u32,
            value: *value,
        };
        insert(best, candidate);
    }
}

/// Puts a candidate in its place if it has one.
fn insert(best: &mut [Candidate], candidate: Candidate) {
    let beats = |other: &Candidate| candidate.value > other.value || other.is_none();
    if candidate.value.is_nan() || candidate.is_none() || !best.last().is_some_and(beats) {
        return;
    }
    let place = best.iter().position(beats).unwrap_or(0);
    best[place..].rotate_right(1);
    best[place] = candidate;
}

/// The largest of a row.
pub(super) fn largest(row: &[f32], count: usize, among: usize) -> Vec<Candidate> {
    let mut best = vec![Candidate::NONE; count];
    enter(&mut best, 0, &row[..row.len().min(among)]);
    best.retain(|candidate| !candidate.is_none());
    best
}

/// The largest of what all tasks found for a row.
pub(super) fn merge(found: &[Candidate], row: usize, rows: usize, count: usize) -> Vec<Candidate> {
    let mut best = vec![Candidate::NONE; count];
    for task in found.chunks_exact(rows * count.max(1)) {
        for candidate in &task[row * count..(row + 1) * count] {
            insert(&mut best, *candidate);
        }
    }
    best.retain(|candidate| !candidate.is_none());
    best
}
