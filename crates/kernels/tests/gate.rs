//! The gate of a shared job (src/pool/gate.rs), in every order in which its steps can happen, by loom.

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::sync::Arc;
use loom::thread;

mod atomic {
    pub(super) use loom::sync::atomic::{AtomicU64, Ordering};
}

#[path = "../src/pool/gate.rs"]
#[allow(dead_code)] // Looking before entering adds nothing to the orders.
mod gate;

use gate::Gate;

/// What a job is, and what a worker leaves behind; loom refuses an access that races with another.
struct Shared {
    gate: Gate,
    job: UnsafeCell<u32>,
    results: [UnsafeCell<u32>; 2],
    inside: AtomicUsize,
}

/// A leader with `jobs` jobs of `seats` seats, and `workers` workers that look in `looks` times each.
fn model(jobs: u32, seats: usize, workers: usize, looks: usize) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let shared = Arc::new(Shared {
            gate: Gate::new(),
            job: UnsafeCell::new(0),
            results: [UnsafeCell::new(0), UnsafeCell::new(0)],
            inside: AtomicUsize::new(0),
        });
        let workers: Vec<_> = (0..workers)
            .map(|worker| {
                let shared = Arc::clone(&shared);
                thread::spawn(move || look_in(&shared, worker, seats, looks))
            })
            .collect();
        for job in 1..=jobs {
            // SAFETY: loom checks that nobody else is there.
            shared.job.with_mut(|place| unsafe { *place = job });
            shared.gate.open(seats);
            shared.gate.close(thread::yield_now);
            for result in &shared.results {
                // SAFETY: as above.
                let result = result.with(|result| unsafe { *result });
                assert!(result <= job, "a result of job {result} in job {job}");
            }
        }
        for worker in workers {
            worker.join().unwrap();
        }
    });
}

fn look_in(shared: &Shared, worker: usize, seats: usize, looks: usize) {
    let mut seen = 0;
    for _ in 0..looks {
        if let Some(number) = shared.gate.enter(seen) {
            assert!(number > seen, "job {number} after {seen}");
            seen = number;
            assert!(shared.inside.fetch_add(1, Ordering::Relaxed) < seats);
            // SAFETY: loom checks that nobody writes.
            let job = shared.job.with(|job| unsafe { *job });
            assert_eq!(job, number, "the job that is open is the one that is there");
            // SAFETY: loom checks that nobody else is there.
            shared.results[worker].with_mut(|result| unsafe { *result = job });
            shared.inside.fetch_sub(1, Ordering::Relaxed);
            shared.gate.leave();
        }
    }
}

#[test]
fn a_worker_sees_the_job_it_is_let_into_and_the_leader_sees_what_it_did() {
    model(3, 1, 1, 3);
}

#[test]
fn two_workers_share_a_job_of_two_seats() {
    model(2, 2, 2, 2);
}

#[test]
fn of_two_workers_one_gets_the_only_seat() {
    model(2, 1, 2, 2);
}
