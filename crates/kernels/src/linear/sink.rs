//! Where outputs go.

use std::mem::MaybeUninit;

use recant_core::Candidate;

use crate::pool::Shared;

/// What becomes of outputs.
pub(super) enum Sink<'a> {
    /// All are written: `[rows, width]`.
    All {
        y: Shared<'a, MaybeUninit<f32>>,
        width: usize,
    },
    /// Each run of tasks keeps the largest of its own, in its first task's place: `[tasks, rows, count]`, largest first.
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
                // SAFETY: one task has these columns, and rows do not overlap.
                unsafe { y.write(row * width + column, values) };
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
                Candidate::enter_all(best, column as u32, values);
            }
        }
    }
}

/// The largest of what all tasks found for a row.
pub(super) fn merge(found: &[Candidate], row: usize, rows: usize, count: usize) -> Vec<Candidate> {
    let mut best = vec![Candidate::NONE; count];
    for task in found.chunks_exact((rows * count).max(1)) {
        for candidate in &task[row * count..(row + 1) * count] {
            candidate.enter(&mut best);
        }
    }
    best.retain(|candidate| !candidate.is_none());
    best
}
