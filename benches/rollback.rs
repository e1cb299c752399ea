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
#[allow(dead_code, unreachable_pub)]
#[path = "../tests/common/seeded.rs"]
mod seeded;

use std::time::{Duration, Instant};

use criterion::{criterion_group, criterion_main, Criterion};
use recant::candle::{DType, Tensor};
use recant::core::{ArraysCache, Cache, RecurrentCache, Transaction};
use recant::Threads;
use recant_kernels::{Backend, DeltaSegment, GatedDelta, GatedDeltaShape};

const LAYERS: usize = 18;
const DRAFTS: usize = 5;
/// Accepted drafts, by name.
const CASES: [(&str, usize); 3] = [("none", 0), ("half", 2), ("all", 5)];

struct Layer {
    delta: GatedDelta,
    cache: ArraysCache,
    inputs: Tensor,
}

/// What a round did in all layers.
#[derive(Clone, Copy, Default)]
struct Cost {
    /// Opening checkpoints, dropping rows and committing.
    bookkeeping: Duration,
    /// The layers' passes, which fold what the round before kept.
    passes: Duration,
    /// Bytes of records held before rows are dropped.
    records: usize,
}

fn layers() -> Vec<Layer> {
    let shape = GatedDeltaShape {
        key_heads: 16,
        value_heads: 16,
        key_dim: 128,
        value_dim: 128,
        conv_kernel: 4,
        eps: 1e-6,
    };
    let (values, channels) = (16 * 128, 3 * 16 * 128);
    let seeded = seeded::Seeded {
        seed: 1,
        dtype: DType::F32,
    };
    (0..LAYERS)
        .map(|layer| {
            let tensor = |name: &str, shape: &[usize]| {
                seeded
                    .tensor(&format!("{layer}.{name}"), shape)
                    .expect("a tensor")
            };
            let conv = tensor("conv1d.weight", &[channels, 4]);
            let (a_log, dt_bias) = (tensor("A_log", &[16]), tensor("dt_bias", &[16]));
            let norm = tensor("linear_attn.norm.weight", &[128]);
            let delta =
                GatedDelta::new(Backend::Cpu, shape, &conv, &a_log, &dt_bias, &norm).expect("a layer");
            let layout = delta.layout();
            Layer {
                cache: ArraysCache::new(layout, 64, &recant::candle::Device::Cpu).expect("a cache"),
                inputs: tensor("embed_tokens.weight", &[DRAFTS + 1, channels + values + 2 * 16]),
                delta,
            }
        })
        .collect()
}

fn round(layers: &mut [Layer], threads: &Threads, accepted: usize) -> Cost {
    let mut cost = Cost::default();
    for layer in layers {
        let start = Instant::now();
        let mut round = Transaction::begin(&mut layer.cache).expect("a checkpoint");
        cost.bookkeeping += start.elapsed();
        let rows = DRAFTS + 1;
        let step = round.cache().begin(rows).expect("a step");
        let (delta, inputs) = (&layer.delta, &layer.inputs);
        let (output, time) = threads.run(|| {
            let start = Instant::now();
            let output = delta
                .forward(inputs, &mut [DeltaSegment { rows, step }])
                .expect("a pass");
            (output, start.elapsed())
        });
        cost.passes += time;
        for advance in output.segments {
            round
                .cache()
                .finish(advance.arrays, advance.records)
                .expect("results taken");
        }
        cost.records += round.cache().footprint().records;
        let start = Instant::now();
        round.keep(1 + accepted).expect("rows kept");
        cost.bookkeeping += start.elapsed();
    }
    cost
}

fn rollback(criterion: &mut Criterion) {
    let threads = Threads::new(2).expect("threads");
    let mut layers = layers();
    let mut bookkeeping = [const { Vec::new() }; CASES.len()];
    let mut records = 0;
    let passes = alternate::medians(CASES.len(), 99, |v| {
        // The first round leaves this case's records; the second folds them.
        round(&mut layers, &threads, CASES[v].1);
        let cost = round(&mut layers, &threads, CASES[v].1);
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
                        let cost = round(&mut layers, &threads, accepted);
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
