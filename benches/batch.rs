//! Tokens a second of many sessions through one call a round, over one session alone, in turn.
//!
//! On the larger trained target beside the repository where it is, else on the demo target.

#[allow(dead_code, unreachable_pub)]
#[path = "alternate.rs"]
mod alternate;

use std::path::Path;
use std::time::{Duration, Instant};

use criterion::{criterion_group, criterion_main, Criterion};
use recant::{Batcher, BatcherOptions, Loaded, Session, Threads};

const TOKENS: usize = 64;
const ROUNDS: usize = 7;
const SESSIONS: [usize; 5] = [1, 2, 4, 8, 16];

fn target() -> Loaded {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let shared = root.join("../shared/models/target");
    let own = root.join("examples/models/demo-target");
    recant::load(if shared.is_dir() { shared } else { own }).expect("a target")
}

/// The time in which `sessions` generate [`TOKENS`] tokens each.
fn run(threads: &Threads, sessions: Vec<Session>) -> Duration {
    let options = BatcherOptions {
        running: sessions.len(),
        ..BatcherOptions::default()
    };
    let mut batcher = Batcher::new(threads, options);
    for (session, first) in sessions.into_iter().zip(5..) {
        batcher.submit(session, &[first], TOKENS).expect("room");
    }
    let start = Instant::now();
    while !batcher.is_idle() {
        for (_, event) in batcher.step() {
            event.expect("an event");
        }
    }
    start.elapsed()
}

fn batch(criterion: &mut Criterion) {
    let target = target();
    let threads = Threads::new(2).expect("threads");
    println!("{}, {TOKENS} tokens a session", target.path().display());
    for (way, draft) in [("plain", false), ("head, 2", true)] {
        let session = || {
            let builder = target.session().threads(&threads).ignore_eos(true);
            let builder = match draft {
                true => builder.mtp().draft_tokens(2),
                false => builder,
            };
            builder.build().expect("a session")
        };
        let times = alternate::medians(SESSIONS.len(), ROUNDS, |v| {
            run(&threads, (0..SESSIONS[v]).map(|_| session()).collect())
        });
        let rate = |v: usize| (SESSIONS[v] * TOKENS) as f64 / times[v].as_secs_f64();
        for (v, sessions) in SESSIONS.into_iter().enumerate() {
            println!(
                "{way:<8} {sessions:>2} sessions  {:>6.0} tokens/s  {:.2} times one",
                rate(v),
                rate(v) / rate(0)
            );
        }
    }
    let mut group = criterion.benchmark_group("batch");
    group.sample_size(10).measurement_time(Duration::from_secs(3));
    group.bench_function("8 sessions", |bench| {
        bench.iter_custom(|n| {
            (0..n)
                .map(|_| {
                    let new = || target.session().threads(&threads).ignore_eos(true).build();
                    run(&threads, (0..8).map(|_| new().expect("a session")).collect())
                })
                .sum()
        });
    });
    group.finish();
}

criterion_group!(benches, batch);
criterion_main!(benches);
