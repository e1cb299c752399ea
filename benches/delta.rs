//! The recurrent layers of Qwen3.5-0.8B with random weights, and rounds of them.

use std::time::{Duration, Instant};

use recant::candle::{DType, Device, Tensor};
use recant::core::{ArraysCache, Cache, RecurrentCache, Transaction};
use recant_kernels::{Backend, DeltaSegment, GatedDelta, GatedDeltaShape};

use crate::seeded::Seeded;

/// One layer.
pub struct Layer {
    delta: GatedDelta,
    /// Its cache.
    pub cache: ArraysCache,
    inputs: Tensor,
}

/// What a round did in all layers.
#[derive(Clone, Copy, Default)]
pub struct Cost {
    /// Opening checkpoints, dropping rows and committing.
    pub bookkeeping: Duration,
    /// The layers' passes, which fold what the round before kept.
    pub passes: Duration,
    /// Bytes of records held before rows are dropped.
    pub records: usize,
}

/// `count` layers, for rounds of `rows` rows.
pub fn layers(count: usize, rows: usize) -> Vec<Layer> {
    let shape = GatedDeltaShape {
        key_heads: 16,
        value_heads: 16,
        key_dim: 128,
        value_dim: 128,
        conv_kernel: 4,
        eps: 1e-6,
    };
    let (values, channels) = (16 * 128, 3 * 16 * 128);
    let seeded = Seeded {
        seed: 1,
        dtype: DType::F32,
    };
    (0..count)
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
                cache: ArraysCache::new(layout, 64, &Device::Cpu).expect("a cache"),
                inputs: tensor("embed_tokens.weight", &[rows, channels + values + 2 * 16]),
                delta,
            }
        })
        .collect()
}

/// A round in which all layers run their rows and keep the first `kept`, in the current pool.
pub fn round(layers: &mut [Layer], kept: usize) -> Cost {
    let mut cost = Cost::default();
    for layer in layers {
        let start = Instant::now();
        let mut round = Transaction::begin(&mut layer.cache).expect("a checkpoint");
        cost.bookkeeping += start.elapsed();
        let (delta, inputs) = (&layer.delta, &layer.inputs);
        let rows = inputs.dims()[0];
        let step = round.cache().begin(rows).expect("a step");
        let start = Instant::now();
        let output = delta
            .forward(inputs, &mut [DeltaSegment { rows, step }])
            .expect("a pass");
        cost.passes += start.elapsed();
        for advance in output.segments {
            round
                .cache()
                .finish(advance.arrays, advance.records)
                .expect("results taken");
        }
        cost.records += round.cache().footprint().records;
        let start = Instant::now();
        round.keep(kept).expect("rows kept");
        cost.bookkeeping += start.elapsed();
    }
    cost
}
