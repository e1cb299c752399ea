//! The tasks of a shared job that are left (src/pool/left.rs), in every order in which threads can take them, by loom.

use std::ops::Range;

use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::sync::Arc;
use loom::thread;

mod atomic {
    pub(super) use loom::sync::atomic::{AtomicU64, Ordering};
}

#[path = "../src/pool/left.rs"]
#[allow(dead_code)] // How many a job may have is the pool's business.
mod left;

use left::Left;

struct Shared {
    ranges: Vec<Left>,
    /// How often each task was taken.
    taken: Vec<AtomicUsize>,
}

impl Shared {
    /// All that falls to a thread.
    fn drain(&self, thread: usize, most: usize) {
        let (before, rest) = self.ranges.split_at(thread);
        while let Some(run) = rest[0].next(most, rest[1..].iter().chain(before)) {
            assert!(!run.is_empty() && run.len() <= most, "{run:?}");
            for task in run {
                self.taken[task].fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

/// A thread for each range, of which those that `come` take part.
fn model(ranges: &[Range<usize>], most: usize, come: usize) {
    let ranges = ranges.to_vec();
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(move || {
        let tasks = ranges.iter().map(|range| range.end).max().unwrap_or(0);
        let shared = Arc::new(Shared {
            ranges: ranges.iter().map(|_| Left::none()).collect(),
            taken: (0..tasks).map(|_| AtomicUsize::new(0)).collect(),
        });
        for (left, range) in shared.ranges.iter().zip(&ranges) {
            left.put(range.clone());
        }
        let others: Vec<_> = (1..come)
            .map(|i| {
                let shared = Arc::clone(&shared);
                thread::spawn(move || shared.drain(i, most))
            })
            .collect();
        shared.drain(0, most);
        for other in others {
            other.join().unwrap();
        }
        for (task, taken) in shared.taken.iter().enumerate() {
            assert_eq!(taken.load(Ordering::Relaxed), 1, "task {task}");
        }
    });
}

#[test]
fn two_threads_take_every_task_once() {
    model(&[0..3, 3..6], 1, 2);
    model(&[0..1, 1..6], 1, 2);
    model(&[0..2, 2..11], 2, 2);
}

#[test]
fn three_threads_take_every_task_once() {
    model(&[0..1, 1..2, 2..4], 1, 3);
}

#[test]
fn what_is_there_for_threads_that_do_not_come_is_taken_too() {
    model(&[0..2, 2..5, 5..9], 4, 1);
    model(&[0..0, 0..3, 3..5], 2, 2);
}
