//! What one appended row costs a `KvCache` that holds more and more.

use std::hint::black_box;

use criterion::{criterion_group, criterion_main, BenchmarkId, Criterion};
use recant_core::candle::{DType, Device, Tensor};
use recant_core::{AttentionCache, AttentionLayout, Cache, KvCache};

const LAYOUT: AttentionLayout = AttentionLayout {
    kv_heads: 2,
    head_dim: 256,
    dtype: DType::F32,
};

fn append(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("append one row");
    let rows = |count: usize| {
        let shape = (count, LAYOUT.kv_heads, LAYOUT.head_dim);
        Tensor::ones(shape, LAYOUT.dtype, &Device::Cpu).expect("a tensor of ones")
    };
    let row = rows(1);
    for held in [100, 1_000, 10_000, 100_000] {
        let mut cache = KvCache::new(LAYOUT, &Device::Cpu);
        let block = rows(100);
        while cache.len() < held {
            cache.append(&block, &block).expect("rows of the layout");
        }
        group.bench_function(BenchmarkId::from_parameter(held), |bencher| {
            bencher.iter(|| {
                cache
                    .append(black_box(&row), black_box(&row))
                    .expect("a row of the layout");
                cache.trim(1).expect("a row that was just appended");
            });
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(std::time::Duration::from_millis(300))
        .measurement_time(std::time::Duration::from_secs(1));
    targets = append
}
criterion_main!(benches);
