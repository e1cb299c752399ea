use std::collections::HashSet;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{mpsc, Mutex};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use super::{each_run, for_each};

/// Enough work for every thread.
const PLENTY: usize = usize::MAX / 2;

/// Longer than anything here takes, unless it hangs.
const LONG: Duration = Duration::from_secs(20);

/// Rounds of a stress test: few where an interpreter runs it.
const ROUNDS: usize = if cfg!(miri) { 20 } else { 3000 };

fn pool(threads: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build()
        .expect("a pool")
}

/// Waits until `done`, or until it is clear that it never will be.
fn wait_for(done: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    while !done() {
        if start.elapsed() > LONG {
            return false;
        }
        thread::yield_now();
    }
    true
}

/// Two tasks that each wait until the other has begun: run by two threads, in the order leader, worker.
fn with_a_worker(leader: impl Fn() + Sync, worker: impl Fn() + Sync) {
    let here = AtomicUsize::new(0);
    let me = thread::current().id();
    for_each(2, PLENTY, &|_| {
        here.fetch_add(1, Ordering::SeqCst);
        assert!(wait_for(|| here.load(Ordering::SeqCst) == 2), "no worker came");
        if thread::current().id() == me {
            leader();
        } else {
            worker();
        }
    });
}

/// A small random number generator: numbers below `n`.
fn random(seed: u64) -> impl FnMut(usize) -> usize {
    let mut state = seed;
    move |n| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) as usize % n
    }
}

/// A series of jobs of random sizes: each task writes to what the leader owns, once.
fn jobs(seed: u64) {
    let mut random = random(seed);
    for round in 0..ROUNDS {
        let tasks = random(20);
        let ran: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
        let weight = random(50);
        for_each(tasks, PLENTY, &|task| {
            (0..weight * 10).for_each(|i| {
                std::hint::black_box(i);
            });
            ran[task].fetch_add(1, Ordering::Relaxed);
        });
        let ran: Vec<usize> = ran.into_iter().map(AtomicUsize::into_inner).collect();
        assert_eq!(ran, vec![1; tasks], "round {round}");
        if random(64) == 0 {
            // Long enough for workers to go.
            thread::sleep(Duration::from_micros(random(200) as u64));
        }
    }
}

#[test]
fn every_task_runs_once_in_pools_of_any_size() {
    for threads in [1, 2, 3, 8] {
        pool(threads).install(|| jobs(threads as u64));
    }
    jobs(0);
}

#[test]
fn runs_are_every_task_once_and_not_longer_than_asked() {
    for threads in [1, 2, 3] {
        pool(threads).install(|| {
            let mut random = random(threads as u64);
            for _ in 0..ROUNDS {
                let (tasks, most) = (random(200), 1 + random(20));
                let ran: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                each_run(tasks, most, PLENTY, &|runs| {
                    for run in runs {
                        assert!(!run.is_empty() && run.len() <= most, "{run:?} of {most}");
                        for task in run {
                            ran[task].fetch_add(1, Ordering::Relaxed);
                        }
                    }
                });
                let ran: Vec<usize> = ran.into_iter().map(AtomicUsize::into_inner).collect();
                assert_eq!(ran, vec![1; tasks]);
            }
        });
    }
}

/// One of three threads is held up in its first task: the others do all that is not in its hands.
#[test]
fn who_is_held_up_leaves_the_rest_to_others() {
    const TASKS: usize = 30;
    pool(3).install(|| {
        for _ in 0..10 {
            let (begun, over) = (AtomicUsize::new(0), AtomicUsize::new(0));
            for_each(TASKS, PLENTY, &|_| {
                if begun.fetch_add(1, Ordering::SeqCst) == 0 {
                    assert!(
                        wait_for(|| over.load(Ordering::SeqCst) == TASKS - 1),
                        "nobody helped"
                    );
                }
                over.fetch_add(1, Ordering::SeqCst);
            });
        }
    });
}

#[test]
fn leaders_on_one_pool_do_not_meet() {
    let pool = pool(2);
    thread::scope(|scope| {
        for seed in 0..4 {
            let pool = &pool;
            scope.spawn(move || pool.install(|| jobs(seed)));
            scope.spawn(move || jobs(seed));
        }
    });
}

#[test]
fn a_leader_in_a_job_of_another_pool_has_its_own_workers() {
    let (outer, inner) = (pool(2), pool(3));
    outer.install(|| rayon::join(|| inner.install(|| jobs(1)), || jobs(2)));
}

#[test]
fn the_threads_are_the_pools_and_the_leader() {
    let seen = Mutex::new(HashSet::<(ThreadId, bool)>::new());
    pool(3).install(|| {
        for _ in 0..ROUNDS {
            for_each(8, PLENTY, &|_| {
                let thread = (thread::current().id(), rayon::current_thread_index().is_some());
                seen.lock().expect("no panic").insert(thread);
            });
        }
    });
    let seen = seen.into_inner().expect("no panic");
    assert!((1..=3).contains(&seen.len()), "{} threads", seen.len());
    assert!(seen.iter().all(|(_, pooled)| *pooled));
}

#[test]
fn work_too_small_to_share_stays_on_the_calling_thread() {
    let me = thread::current().id();
    pool(2).install(|| {
        let leader = thread::current().id();
        assert_ne!(leader, me);
        for_each(20, 100, &|_| {
            // Time for another thread to come.
            thread::sleep(Duration::from_millis(1));
            assert_eq!(thread::current().id(), leader);
        });
    });
}

#[test]
fn a_panic_of_the_leader_or_of_a_worker_reaches_the_caller_and_the_next_job_runs() {
    pool(2).install(|| {
        for round in 0..ROUNDS / 10 {
            let caught = catch_unwind(AssertUnwindSafe(|| {
                if round % 2 == 0 {
                    with_a_worker(|| panic!("leader {round}"), || ());
                } else {
                    with_a_worker(|| (), || panic!("worker {round}"));
                }
            }));
            let panic = caught.expect_err("a panic");
            let text = panic.downcast_ref::<String>().expect("a text");
            let who = if round % 2 == 0 { "leader" } else { "worker" };
            assert_eq!(*text, format!("{who} {round}"));
            with_a_worker(|| (), || ());
        }
    });
}

#[test]
fn when_all_panic_one_panic_comes_out_and_none_is_left_for_later() {
    pool(2).install(|| {
        for _ in 0..ROUNDS / 10 {
            let caught = catch_unwind(|| with_a_worker(|| panic!("leader"), || panic!("worker")));
            assert_eq!(caught.expect_err("a panic").downcast_ref(), Some(&"leader"));
            with_a_worker(|| (), || ());
        }
    });
}

#[test]
fn the_leader_waits_for_workers_when_it_panics() {
    let over = AtomicBool::new(false);
    let caught = pool(2).install(|| {
        catch_unwind(AssertUnwindSafe(|| {
            with_a_worker(
                || panic!("early"),
                || {
                    thread::sleep(Duration::from_millis(20));
                    over.store(true, Ordering::SeqCst);
                },
            );
        }))
        .map_err(|_| over.load(Ordering::SeqCst))
    });
    assert_eq!(caught, Err(true));
}

#[test]
fn a_task_that_has_work_to_share_does_it_itself() {
    pool(3).install(|| {
        for _ in 0..ROUNDS / 10 {
            let ran = AtomicUsize::new(0);
            for_each(5, PLENTY, &|_| {
                let me = thread::current().id();
                for_each(7, PLENTY, &|_| {
                    assert_eq!(thread::current().id(), me);
                    ran.fetch_add(1, Ordering::Relaxed);
                });
            });
            assert_eq!(ran.into_inner(), 35);
        }
    });
}

#[test]
fn a_pool_that_is_busy_elsewhere_is_not_waited_for() {
    let pool = pool(3);
    let (release, held) = mpsc::channel::<()>();
    let held = Mutex::new(held);
    let here = AtomicUsize::new(0);
    thread::scope(|threads| {
        pool.in_place_scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|_| {
                    here.fetch_add(1, Ordering::SeqCst);
                    let _ = held.lock().map(|held| held.recv_timeout(LONG));
                });
            }
            assert!(wait_for(|| here.load(Ordering::SeqCst) == 2));
            let leader = threads.spawn(|| pool.install(|| jobs(1)));
            assert!(wait_for(|| leader.is_finished()));
            assert!(leader.join().is_ok());
            drop(release);
        });
    });
}

#[test]
fn workers_that_have_nothing_to_do_go_back_to_the_pool() {
    pool(2).install(|| {
        for _ in 0..20 {
            with_a_worker(|| (), || ());
            // Only the other thread can run this, since this one waits.
            let (sender, receiver) = mpsc::channel();
            rayon::spawn(move || {
                let _ = sender.send(thread::current().id());
            });
            let ran_by = receiver.recv_timeout(LONG).expect("the other thread is free");
            assert_ne!(ran_by, thread::current().id());
        }
    });
}

#[test]
fn a_long_series_of_jobs_leaves_others_a_turn() {
    /// A second of jobs. A worker that is never given back would be free only when the system holds the leader up.
    const JOBS: usize = if cfg!(miri) { 10_000 } else { 1000 };
    let pool = pool(2);
    let (asked, served) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        let mut other = None;
        pool.install(|| {
            for job in 0..JOBS {
                with_a_worker(|| (), || thread::sleep(Duration::from_millis(1)));
                other.get_or_insert_with(|| {
                    scope.spawn(|| {
                        asked.store(true, Ordering::SeqCst);
                        pool.install(|| served.store(true, Ordering::SeqCst));
                    })
                });
                assert!(job > 0 || wait_for(|| asked.load(Ordering::SeqCst)));
                if served.load(Ordering::SeqCst) {
                    break;
                }
            }
            assert!(served.load(Ordering::SeqCst), "nobody else got a turn");
        });
    });
}

/// Seconds that a thread of this process has run.
#[cfg(target_os = "linux")]
fn seconds_of(thread: &str) -> f64 {
    let path = format!("/proc/{thread}/schedstat");
    let text = std::fs::read_to_string(path).expect("a thread's times");
    let nanoseconds: u64 = text
        .split_whitespace()
        .next()
        .and_then(|n| n.parse().ok())
        .expect("a number");
    nanoseconds as f64 * 1e-9
}

#[test]
#[cfg(all(target_os = "linux", not(miri)))]
fn a_worker_burns_nothing_while_the_leader_works_alone() {
    pool(2).install(|| {
        let worker = Mutex::new(String::new());
        with_a_worker(
            || (),
            || {
                let own = std::fs::read_link("/proc/thread-self").expect("a thread");
                *worker.lock().expect("no panic") = own.display().to_string();
            },
        );
        let worker = worker.into_inner().expect("no panic");
        let before = seconds_of(&worker);
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(1) {
            std::hint::spin_loop();
        }
        let burnt = seconds_of(&worker) - before;
        assert!(burnt < 0.002, "{burnt} s of 1 s");
    });
}
