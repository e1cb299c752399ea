//! What it costs to share a job among threads, beside `rayon::scope`: jobs one upon the other, and with a leader that works
//! alone in between. Prints a table; run it with `cargo bench -p recant-kernels --bench barrier`.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use criterion::{criterion_group, criterion_main, BenchmarkId, Criterion};

#[path = "../src/pool/mod.rs"]
#[allow(dead_code, unused_imports)] // A bench of one of its parts; its tests are left out.
mod pool;

type Job<'a> = &'a (dyn Fn(usize) + Sync);

/// Threads, tasks, and the task.
type Share = fn(usize, usize, Job<'_>);

/// As kernels share a job.
fn gate(_: usize, tasks: usize, task: Job<'_>) {
    pool::for_each(tasks, usize::MAX / 2, task);
}

/// The same by rayon's means.
fn scope(threads: usize, tasks: usize, task: Job<'_>) {
    let next = AtomicUsize::new(0);
    let drain = || loop {
        let index = next.fetch_add(1, Ordering::Relaxed);
        if index >= tasks {
            break;
        }
        task(index);
    };
    rayon::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(|_| drain());
        }
        drain();
    });
}

fn work(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        std::hint::spin_loop();
    }
}

fn barrier(c: &mut Criterion) {
    for threads in [2, 4] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        let pool = pool.expect("a pool");
        let mut group = c.benchmark_group(format!("{threads} threads"));
        group
            .sample_size(20)
            .warm_up_time(Duration::from_millis(100))
            .measurement_time(Duration::from_millis(500));
        for (gap, task) in [(0, 0), (0, 5), (10, 5), (200, 5)] {
            let (gap, task) = (Duration::from_micros(gap), Duration::from_micros(task));
            let mut medians = Vec::new();
            let ways: [(&str, Share); 2] = [("gate", gate), ("rayon::scope", scope)];
            for (name, share) in ways {
                let mut times = Vec::new();
                let id = BenchmarkId::new(name, format!("{gap:?} alone, a task of {task:?} a thread"));
                group.bench_function(id, |b| {
                    pool.install(|| {
                        b.iter_custom(|count| {
                            let mut total = Duration::ZERO;
                            for _ in 0..count {
                                work(gap);
                                let start = Instant::now();
                                share(threads, threads, &|_| work(task));
                                let took = start.elapsed();
                                total += took;
                                times.push(took);
                            }
                            total
                        });
                    });
                });
                times.sort_unstable();
                medians.push(times[times.len() / 2].as_secs_f64() * 1e6);
            }
            println!(
                "{threads} threads, {gap:?} alone, a task of {task:?} a thread: median {:.2} us, rayon::scope {:.2} us, \
                 {:.2} times",
                medians[0],
                medians[1],
                medians[1] / medians[0]
            );
        }
    }
}

criterion_group!(benches, barrier);
criterion_main!(benches);
