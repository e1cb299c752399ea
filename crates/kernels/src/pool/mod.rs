//! Work is split over outputs and handed out to the threads of the current rayon pool.

mod gate;
mod left;
mod team;

#[cfg(test)]
mod tests;

/// Where the atomics of the gate and of what is left come from: their model checker has others.
mod atomic {
    pub(super) use std::sync::atomic::{AtomicU64, Ordering};
}

use std::cell::RefCell;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Multiply-adds, or elements moved, below which a second thread costs more than it saves.
const WORTH_A_THREAD: usize = 32 * 1024;

/// Runs `task` for every number below `tasks`. `work` is what all of them cost together, in multiply-adds.
///
/// Which thread runs a task is left open, so a task must not depend on another. The caller takes part. In a task it runs
/// all tasks on the calling thread.
///
/// # Panics
/// A task does; the others that were begun are over then.
pub(crate) fn for_each(tasks: usize, work: usize, task: &(dyn Fn(usize) + Sync)) {
    each_run(tasks, 1, work, &|runs| runs.for_each(|run| run.for_each(task)));
}

/// What a thread does of a job: it is given runs of tasks, one after the other, and has to do them all.
pub(crate) type Turn<'a> = dyn Fn(&mut dyn Iterator<Item = Range<usize>>) + Sync + 'a;

/// As [`for_each`], for tasks of which a run of up to `most` costs less than each by itself. Runs become shorter towards the
/// end, so that threads end together. `turn` is run once by each thread that takes part, and may find that nothing is left.
pub(crate) fn each_run(tasks: usize, most: usize, work: usize, turn: &Turn<'_>) {
    let threads = rayon::current_num_threads()
        .min(tasks)
        .min(1 + work / WORTH_A_THREAD);
    if threads <= 1 || tasks > left::MOST {
        alone(tasks, most, turn);
    } else {
        team::share(threads - 1, tasks, most, turn);
    }
}

/// Runs all tasks on this thread.
fn alone(tasks: usize, most: usize, turn: &Turn<'_>) {
    turn(
        &mut (0..tasks)
            .step_by(most)
            .map(|start| start..tasks.min(start + most)),
    );
}

/// Numbers in a cache line.
pub(crate) const LINE: usize = 64 / size_of::<f32>();

/// Lends a task `len` numbers to work on, whatever is in them. A thread keeps its largest loan, so that a decode step
/// does not ask the system for memory. They begin with a cache line. A task must not ask twice.
pub(crate) fn with_scratch(len: usize, task: impl FnOnce(&mut [f32])) {
    thread_local!(static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) });
    SCRATCH.with_borrow_mut(|scratch| {
        if scratch.len() < len + LINE {
            scratch.resize(len + LINE, 0.0);
        }
        task(aligned(&mut scratch[..len + LINE]));
    });
}

/// What begins with a cache line in numbers of which there are [`LINE`] too many: a wide vector that lies in two lines takes
/// two loads.
pub(crate) fn aligned(numbers: &mut [f32]) -> &mut [f32] {
    let len = numbers.len() - LINE;
    let skipped = numbers.as_ptr().align_offset(size_of::<f32>() * LINE).min(LINE);
    &mut numbers[skipped..][..len]
}

/// A slice that several tasks write, each its own part.
pub(crate) struct Shared<'a, T> {
    start: *mut T,
    len: usize,
    of: PhantomData<&'a mut [T]>,
}

// SAFETY: it is a `&mut [T]` whose parts go to different threads; `part` makes the caller promise that they are disjoint.
unsafe impl<T: Send> Send for Shared<'_, T> {}
// SAFETY: as above; a shared reference gives no access but through `part`.
unsafe impl<T: Send> Sync for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self {
            start: slice.as_mut_ptr(),
            len: slice.len(),
            of: PhantomData,
        }
    }

    /// # Safety
    /// No two live parts overlap.
    // A part borrows from the slice, not from this handle.
    #[allow(clippy::mut_from_ref)]
    #[inline(always)]
    pub(crate) unsafe fn part(&self, range: Range<usize>) -> &'a mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: the range lies in the slice, and by the caller's promise nothing else refers to it.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}

impl<T: Copy> Shared<'_, MaybeUninit<T>> {
    /// Writes a part, which begins at `at`.
    ///
    /// # Safety
    /// As that of [`part`](Self::part).
    #[inline(always)]
    pub(crate) unsafe fn write(&self, at: usize, from: &[T]) {
        // SAFETY: promised by the caller.
        let to = unsafe { self.part(at..at + from.len()) };
        for (to, from) in to.iter_mut().zip(from) {
            to.write(*from);
        }
    }
}

/// Numbers that tasks write, every one of them. Zeros first would cost as much, and put the lines into the cache of a thread that
/// does not write them.
pub(crate) struct Unwritten {
    numbers: Vec<f32>,
    len: usize,
}

impl Unwritten {
    pub(crate) fn new(len: usize) -> Self {
        Self {
            numbers: Vec::with_capacity(len),
            len,
        }
    }

    pub(crate) fn shared(&mut self) -> Shared<'_, MaybeUninit<f32>> {
        Shared::new(&mut self.numbers.spare_capacity_mut()[..self.len])
    }

    /// # Safety
    /// All of them are written.
    pub(crate) unsafe fn written(mut self) -> Vec<f32> {
        // SAFETY: the capacity is that large, and the caller promises the rest.
        unsafe { self.numbers.set_len(self.len) };
        self.numbers
    }
}
