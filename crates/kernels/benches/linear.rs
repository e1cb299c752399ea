//! What a block of rows costs beside one row, with the weights in memory and not in a cache, and how near one row comes to
//! the speed of memory. Prints a table; run it with `cargo bench -p recant-kernels`.

mod memory;

use std::hint::black_box;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use criterion::{criterion_group, criterion_main, BenchmarkId, Criterion, Throughput};
use memory::Memory;
use recant_kernels::{
    ActivationPrecision, Backend, Coding, GroupFormat, GroupScales, GroupWeights, Linear, Weight,
};

const OUT: usize = 4096;
const IN: usize = 8192;

const E2M1: Coding = Coding::Table([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]);

/// Any weights of a coding: how long products take does not depend on them.
fn any(coding: Coding, group: usize, scales: GroupScales, affine: bool) -> GroupWeights {
    let quants = Tensor::rand(0_f32, 112.0, (OUT, IN * coding.bits() / 8), &Device::Cpu);
    let quants = quants.and_then(|x| x.to_dtype(DType::U8)).expect("bytes");
    let biases = affine.then(|| scales.clone());
    GroupWeights::new(coding, group, quants, scales, biases).expect("groups")
}

fn ones(group: usize, dtype: DType) -> GroupScales {
    Tensor::ones((OUT, IN / group), dtype, &Device::Cpu)
        .expect("scales")
        .into()
}

/// Scales as k-quants have them.
fn two_levels(group: usize) -> GroupScales {
    let ones = |width, dtype| Tensor::ones((OUT, width), dtype, &Device::Cpu).expect("scales");
    GroupScales::TwoLevel {
        numbers: ones(IN / group, DType::U8),
        factors: ones(IN / 256, DType::F16),
    }
}

/// A matrix in each type, rounded to groups, and in codes, multiplied in bytes and in full.
fn kinds(weight: &Tensor) -> Vec<(String, Weight)> {
    let mut kinds = Vec::new();
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        kinds.push((
            dtype.as_str().to_owned(),
            weight.to_dtype(dtype).expect("a type").into(),
        ));
    }
    for (name, bits, group, affine, scales) in [
        ("int8 of 32", 8, 32, false, DType::F16),
        ("int8 of 64 affine", 8, 64, true, DType::BF16),
        ("int4 of 32", 4, 32, false, DType::F16),
        ("int4 of 64 affine", 4, 64, true, DType::BF16),
        ("int4 of 32 affine", 4, 32, true, DType::F32),
    ] {
        let format = GroupFormat {
            bits,
            group,
            affine,
            scales,
        };
        let weights = GroupWeights::quantize(weight, format).expect("groups");
        kinds.extend(by_bytes_and_floats(name, &weights));
    }
    for (name, bits, zero, group, affine) in [
        ("Q4_K", 4, 0, 32, true),
        ("Q2_K", 4, 0, 16, true),
        ("Q6_K", 8, 32, 16, false),
    ] {
        let weights = any(Coding::Whole { bits, zero }, group, two_levels(group), affine);
        kinds.extend(by_bytes_and_floats(name, &weights));
    }
    for (name, coding, group, scales) in [("mxfp4", E2M1, 32, DType::BF16), ("nvfp4", E2M1, 16, DType::BF16)]
    {
        kinds.extend(by_bytes_and_floats(
            name,
            &any(coding, group, ones(group, scales), false),
        ));
    }
    for (name, group, scales) in [("mxfp8", 32, DType::BF16), ("E4M3 of 128", 128, DType::F32)] {
        kinds.push((
            format!("{name} by f32"),
            any(Coding::E4m3, group, ones(group, scales), false).into(),
        ));
    }
    kinds
}

fn by_bytes_and_floats(name: &str, weights: &GroupWeights) -> [(String, Weight); 2] {
    [
        ("bytes", ActivationPrecision::Int8),
        ("f32", ActivationPrecision::Full),
    ]
    .map(|(by, activations)| {
        let weights = weights.clone().with_activations(activations);
        (format!("{name} by {by}"), weights.into())
    })
}

fn linear(c: &mut Criterion) {
    let pool = memory::pool();
    let memory = Memory::new();
    let speed = memory.measure(&pool);
    let weight = Tensor::randn(0_f32, 0.02, (OUT, IN), &Device::Cpu).expect("a weight");
    for (name, weight) in kinds(&weight) {
        let linear = Linear::new(Backend::Cpu, [weight], None).expect("a layer");
        let mut group = c.benchmark_group(format!("linear {OUT} x {IN} {name}"));
        group
            .sample_size(10)
            .warm_up_time(Duration::from_millis(300))
            .measurement_time(Duration::from_secs(1));
        let mut one = None;
        for rows in [1, 2, 4, 5, 6, 8, 12, 16, 128] {
            let x = Tensor::randn(0_f32, 1.0, (rows, IN), &Device::Cpu).expect("rows");
            let mut best = Duration::MAX;
            group.throughput(Throughput::Bytes(linear.bytes() as u64));
            group.bench_function(BenchmarkId::from_parameter(rows), |b| {
                pool.install(|| {
                    b.iter_custom(|count| {
                        let mut total = Duration::ZERO;
                        for _ in 0..count {
                            memory.sweep();
                            let start = Instant::now();
                            black_box(linear.forward(&x).expect("a result"));
                            let took = start.elapsed();
                            best = best.min(took);
                            total += took;
                        }
                        total
                    });
                });
            });
            let best = best.as_secs_f64();
            let one = *one.get_or_insert(best);
            println!(
                "{name}, {rows} rows: best {:.2} ms, {:.2} times one row, {:.1} GB/s ({:.0} % of memory), {:.0} Gflop/s",
                best * 1e3,
                best / one,
                linear.bytes() as f64 / best / 1e9,
                linear.bytes() as f64 / best / speed * 100.0,
                2.0 * (rows * OUT * IN) as f64 / best / 1e9,
            );
        }
    }
}

criterion_group!(benches, linear);
criterion_main!(benches);
