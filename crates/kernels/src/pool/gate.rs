//! Who may take part in a job, and when all who did are out again: README.md beside this file says why it is right.

use super::atomic::{AtomicU64, Ordering};

/// A count of 16 bits at some place of the word.
const COUNT: u64 = 0xffff;

/// A worker that is inside.
const INSIDE: u64 = 1;

/// A seat that is free.
const SEAT: u64 = 1 << 16;

/// The job's number.
const JOB: u64 = 1 << 32;

/// One word: the number of the newest job (32 bits), its free seats (16), workers inside (16). Closed: no free seats.
#[derive(Debug)]
pub(super) struct Gate(AtomicU64);

impl Gate {
    pub(super) fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Leader: begins a job for up to `seats` workers. The gate must be closed.
    pub(super) fn open(&self, seats: usize) {
        // Closed: nobody but the leader changes the word, so there is nothing to miss between the two.
        let number = number(self.0.load(Ordering::Relaxed)).wrapping_add(1);
        let word = u64::from(number) * JOB + (seats as u64).min(COUNT) * SEAT;
        self.0.store(word, Ordering::SeqCst);
    }

    /// Leader: lets nobody in any more and waits, by calling `wait`, until all are out.
    pub(super) fn close(&self, mut wait: impl FnMut()) {
        let before = self.0.fetch_and(!(COUNT * SEAT), Ordering::Acquire);
        if before & COUNT != 0 {
            while self.0.load(Ordering::Acquire) & COUNT != 0 {
                wait();
            }
        }
    }

    /// Worker: whether a job after number `seen` lets it in.
    pub(super) fn is_open(&self, seen: u32) -> bool {
        free(self.0.load(Ordering::SeqCst), seen)
    }

    /// Worker: goes in, if a job after number `seen` lets it, and gives that job's number.
    pub(super) fn enter(&self, seen: u32) -> Option<u32> {
        let mut word = self.0.load(Ordering::Relaxed);
        while free(word, seen) {
            let inside = word - SEAT + INSIDE;
            match self
                .0
                .compare_exchange_weak(word, inside, Ordering::Acquire, Ordering::Relaxed)
            {
                Ok(_) => return Some(number(word)),
                Err(now) => word = now,
            }
        }
        None
    }

    /// Worker: goes out. What it did inside is seen by the leader after `close`.
    pub(super) fn leave(&self) {
        self.0.fetch_sub(INSIDE, Ordering::Release);
    }
}

fn number(word: u64) -> u32 {
    (word / JOB) as u32
}

fn free(word: u64, seen: u32) -> bool {
    number(word) != seen && (word / SEAT) & COUNT != 0
}
