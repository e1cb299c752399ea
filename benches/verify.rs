//! What checking T tokens in one call costs, against one: the ratio that speculation lives on.
//!
//! The model has the shape of Qwen3.5-0.8B and random bf16 weights, two threads, 64 tokens held.
//!
//! Limit: a call reads all weights once whatever T is, so the best ratio is 1 while T rows of arithmetic take less time than
//! the weights take to arrive.

#[allow(unreachable_pub)]
#[path = "alternate.rs"]
mod alternate;
#[allow(dead_code, unreachable_pub)]
#[path = "../tests/common/seeded.rs"]
mod seeded;

use std::time::{Duration, Instant};

use criterion::{criterion_group, criterion_main, Criterion};
use recant::candle::DType;
use recant::core::{CacheOptions, CacheStack, LanguageModel, Rows, Segment, Transaction};
use recant::Threads;
use recant_layers::HybridModel;

const ROWS: [usize; 5] = [1, 2, 4, 6, 8];
const HELD: usize = 64;

/// The time of a call of `rows` tokens, taken back afterwards.
fn call(model: &HybridModel, threads: &Threads, caches: &mut CacheStack, rows: usize) -> Duration {
    let tokens: Vec<u32> = (0..rows as u32).collect();
    let mut round = Transaction::begin(caches).expect("a checkpoint");
    threads.run(|| {
        let start = Instant::now();
        let segment = Segment::new(&tokens, round.cache(), Rows::All);
        model.forward(&mut [segment]).expect("a forward");
        start.elapsed()
    })
}

fn verify(criterion: &mut Criterion) {
    let model = seeded::model(&seeded::qwen3_5_0_8b(), 1, DType::BF16).expect("a model");
    let threads = Threads::new(2).expect("threads");
    let mut caches = model.new_caches(&CacheOptions::default()).expect("caches");
    let prompt: Vec<u32> = (0..HELD as u32).collect();
    threads
        .run(|| {
            model
                .forward(&mut [Segment::new(&prompt, &mut caches, Rows::None)])
                .map(|_| ())
        })
        .expect("a prompt");

    let times = alternate::medians(ROWS.len(), 9, |v| call(&model, &threads, &mut caches, ROWS[v]));
    println!("rows  ms per call  over one row");
    for (rows, time) in ROWS.iter().zip(&times) {
        let ratio = time.as_secs_f64() / times[0].as_secs_f64();
        println!("{rows:>4}  {:>11.1}  {ratio:>12.2}", alternate::ms(*time));
    }

    let mut group = criterion.benchmark_group("verify");
    group.sample_size(10).measurement_time(Duration::from_secs(3));
    for rows in ROWS {
        group.bench_function(format!("{rows} rows"), |bench| {
            bench.iter_custom(|n| (0..n).map(|_| call(&model, &threads, &mut caches, rows)).sum());
        });
    }
    group.finish();
}

criterion_group!(benches, verify);
criterion_main!(benches);
