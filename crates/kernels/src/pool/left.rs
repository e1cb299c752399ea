//! The tasks of a range that nobody has begun: README.md beside this file.

use std::ops::Range;

use super::atomic::{AtomicU64, Ordering};

/// Most tasks of a job.
pub(super) const MOST: usize = u32::MAX as usize;

/// A run is this part of what is left, so that there is something to give away until shortly before the end.
const PART: usize = 4;

/// One word, so that what happens to it has an order: the number of the first task (32 bits), and of the one after the last
/// (32).
#[derive(Debug)]
pub(super) struct Left(AtomicU64);

impl Left {
    pub(super) fn none() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Owner: puts tasks there when there are none.
    pub(super) fn put(&self, tasks: Range<usize>) {
        self.0.store(word(tasks), Ordering::Relaxed);
    }

    /// Owner: takes a run of up to `most` tasks from the front. If there are none, the latter half of what is left of another
    /// range becomes this one's.
    pub(super) fn next<'a>(
        &self,
        most: usize,
        mut others: impl Iterator<Item = &'a Self>,
    ) -> Option<Range<usize>> {
        self.take(most).or_else(|| {
            let half = others.find_map(Self::take_half)?;
            let end = half.start + run(&half, most);
            self.put(end..half.end);
            Some(half.start..end)
        })
    }

    fn take(&self, most: usize) -> Option<Range<usize>> {
        let left = self.leave(|left| left.start + run(left, most)..left.end)?;
        Some(left.start..left.start + run(&left, most))
    }

    /// The latter half, of one task that one.
    fn take_half(&self) -> Option<Range<usize>> {
        let left = self.leave(|left| left.start..middle(left))?;
        Some(middle(&left)..left.end)
    }

    /// Leaves what `rest` says of tasks, if there are any, and says what there was.
    fn leave(&self, rest: impl Fn(&Range<usize>) -> Range<usize>) -> Option<Range<usize>> {
        let before = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |now| {
            let left = range(now);
            (!left.is_empty()).then(|| word(rest(&left)))
        });
        before.ok().map(range)
    }
}

/// Tasks of the next run.
fn run(left: &Range<usize>, most: usize) -> usize {
    left.len().div_ceil(PART).min(most)
}

fn middle(left: &Range<usize>) -> usize {
    left.start + left.len() / 2
}

fn word(tasks: Range<usize>) -> u64 {
    (tasks.start as u64) << 32 | tasks.end as u64
}

fn range(word: u64) -> Range<usize> {
    (word >> 32) as usize..(word & 0xffff_ffff) as usize
}
