//! What attention costs in the shape of Qwen3.5-0.8B: rows that decode or verify over a long context, beside the speed of
//! memory, and a prefill of 512 rows. Prints a table; run it with `cargo bench -p recant-kernels --bench attention`.

mod memory;

use std::hint::black_box;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use criterion::{criterion_group, criterion_main, BenchmarkId, Criterion, Throughput};
use memory::Memory;
use recant_core::{KvBlock, KvView};
use recant_kernels::{attention, AttentionSegment, AttentionShape, Backend};

/// Rows in a block of the standard cache.
const BLOCK: usize = 256;

const SHAPE: AttentionShape = AttentionShape {
    heads: 8,
    kv_heads: 2,
    head_dim: 256,
    rotary_dims: 64,
    gated: true,
    eps: 1e-6,
};

fn view(dtype: DType, context: usize) -> KvView {
    let rows = || {
        let shape = (BLOCK, SHAPE.kv_heads, SHAPE.head_dim);
        let rows = Tensor::randn(0_f32, 1.0, shape, &Device::Cpu).expect("rows");
        rows.to_dtype(dtype).expect("a type")
    };
    let block = |start| KvBlock {
        start,
        rows: BLOCK,
        keys: rows(),
        values: rows(),
    };
    KvView {
        blocks: (0..context).step_by(BLOCK).map(block).collect(),
        window: None,
        sink: 0,
    }
}

fn bench(c: &mut Criterion) {
    let pool = memory::pool();
    let memory = Memory::new();
    let speed = memory.measure(&pool);
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let mut group = c.benchmark_group(format!("attention {dtype:?}"));
        group
            .sample_size(10)
            .warm_up_time(Duration::from_millis(200))
            .measurement_time(Duration::from_millis(500));
        for context in [1 << 10, 8 << 10, 32 << 10] {
            let view = view(dtype, context);
            for rows in [1, 4, 8, 16, 512] {
                if rows == 512 && context > 8 << 10 {
                    continue;
                }
                let width = SHAPE.heads * SHAPE.head_dim;
                let q = Tensor::randn(0_f32, 1.0, (rows, SHAPE.heads, SHAPE.head_dim), &Device::Cpu);
                let gate = Tensor::randn(0_f32, 1.0, (rows, width), &Device::Cpu);
                let (q, gate) = (q.expect("queries"), gate.expect("gates"));
                let position = context - rows;
                let segment = [AttentionSegment {
                    rows,
                    position,
                    view: &view,
                }];
                let elements = 2 * context * SHAPE.kv_heads * SHAPE.head_dim;
                let bytes = elements * dtype.size_in_bytes();
                let mut best = Duration::MAX;
                group.throughput(Throughput::Bytes(bytes as u64));
                group.bench_function(BenchmarkId::new(format!("{context} tokens"), rows), |b| {
                    pool.install(|| {
                        b.iter_custom(|count| {
                            let mut total = Duration::ZERO;
                            for _ in 0..count {
                                memory.sweep();
                                let start = Instant::now();
                                let out = attention(Backend::Cpu, &SHAPE, &q, Some(&gate), &segment);
                                black_box(out.expect("a result"));
                                let took = start.elapsed();
                                best = best.min(took);
                                total += took;
                            }
                            total
                        });
                    });
                });
                // Of the seen half of the newest rows' triangle and all that is before it.
                let seen = rows * position + rows * (rows + 1) / 2;
                let operations = 4 * SHAPE.heads * SHAPE.head_dim * seen;
                let best = best.as_secs_f64();
                println!(
                    "{dtype:?}, {context} tokens, {rows} rows: best {:.3} ms, {:.1} GB/s ({:.0} % of memory), {:.0} Gflop/s",
                    best * 1e3,
                    bytes as f64 / best / 1e9,
                    bytes as f64 / best / speed * 100.0,
                    operations as f64 / best / 1e9,
                );
            }
        }
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
