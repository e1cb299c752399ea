//! What a round pays for being able to take tokens back, when all, half or none of five drafts are accepted.
//!
//! The recurrent layers have the shape of Qwen3.5-0.8B: 18 layers of 16 heads, a state of 1 MB each. A round opens a
//! checkpoint, runs six rows, keeps one to six of them and commits; what was kept is folded into the state by the next
//! round's own pass.
//!
//! Limit: each state is read once and written once a round, as in a plain step, whatever is kept.

#[allow(unreachable_pub)]
#[path = "alternate.rs"]
mod alternate;
#[allow(unreachable_pub)]
#[path = "delta.rs"]
mod delta;
#[allow(dead_code, unreachable_pub)]
#[path = "../tests/common/seeded.rs"]
mod seeded;

use std::time::Duration;

use criterion::{criterion_group, criterion_main, Criterion};
use recant::core::Cache;
use recant::Threads;

const LAYERS: usize = 18;
const DRAFTS: usize = 5;
/// Accepted drafts, by name.
const CASES: [(&str, usize); 3] = [("none", 0), ("half", 2), ("all", 5)];

fn rollback(criterion: &mut Criterion) {
    let threads = Threads::new(2).expect("threads");
    let mut layers = delta::layers(LAYERS, DRAFTS + 1);
    let mut bookkeeping = [const { Vec::new() }; CASES.len()];
    let mut records = 0;
    let passes = alternate::medians(CASES.len(), 99, |v| {
        // The first round leaves this case's records; the second folds them.
        threads.run(|| delta::round(&mut layers, 1 + CASES[v].1));
        let cost = threads.run(|| delta::round(&mut layers, 1 + CASES[v].1));
        bookkeeping[v].push(cost.bookkeeping);
        records = cost.records;
        cost.passes
    });
    let state: usize = layers.iter().map(|l| l.cache.footprint().live).sum();
    println!(
        "{LAYERS} layers: state {:.2} MB, read once and written once a round; records of a round {:.0} KB a layer, {:.1} KB a \
         layer and token",
        state as f64 / 1e6,
        records as f64 / 1e3 / LAYERS as f64,
        records as f64 / 1e3 / (LAYERS * (DRAFTS + 1)) as f64,
    );
    println!("accepted  passes, ms  over none  bookkeeping, us  state bytes, MB");
    for (v, (name, _)) in CASES.iter().enumerate() {
        bookkeeping[v].sort_unstable();
        println!(
            "{name:>8}  {:>10.3}  {:>9.3}  {:>15.1}  {:>15.2}",
            alternate::ms(passes[v]),
            passes[v].as_secs_f64() / passes[0].as_secs_f64(),
            alternate::ms(bookkeeping[v][bookkeeping[v].len() / 2]) * 1e3,
            2.0 * state as f64 / 1e6,
        );
    }

    let mut group = criterion.benchmark_group("rollback");
    group.sample_size(20).measurement_time(Duration::from_secs(2));
    for (name, accepted) in CASES {
        group.bench_function(format!("{name} of {DRAFTS} accepted"), |bench| {
            bench.iter_custom(|n| {
                (0..n)
                    .map(|_| {
                        let cost = threads.run(|| delta::round(&mut layers, 1 + accepted));
                        cost.passes + cost.bookkeeping
                    })
                    .sum()
            });
        });
    }
    group.finish();
}

criterion_group!(benches, rollback);
criterion_main!(benches);
