//! Kernels alone, with nothing of theirs in a cache.

use std::time::{Duration, Instant};

use anyhow::Result;
use recant::candle::{DType, Tensor};
use recant::core::{Cache, KvBlock, KvView};
use recant_kernels::{attention, AttentionSegment, AttentionShape, Backend, Reader};

use crate::alternate::try_medians;
use crate::delta;
use crate::model::{Model, ACCEPTED, DRAFTS};
use crate::seeded::Seeded;

/// Rows in a block of the standard cache.
const BLOCK: usize = 256;

/// Recurrent layers of the model.
const LAYERS: usize = 18;

/// Tokens that one row looks back on.
const CONTEXTS: [usize; 2] = [1 << 10, 32 << 10];

/// An attention layer of the model.
const SHAPE: AttentionShape = AttentionShape {
    heads: 8,
    kv_heads: 2,
    head_dim: 256,
    rotary_dims: 64,
    gated: true,
    eps: 1e-6,
};

/// A kernel's time for one row, and the bytes that it must move.
#[derive(Clone, Copy)]
pub(crate) struct Kernel {
    time: Duration,
    bytes: usize,
    /// What reading 10^9 bytes took in turn with it.
    reading: Duration,
}

impl Kernel {
    /// The time that moving its bytes takes as fast as memory is read, as a share of its own.
    pub(crate) fn share_of_limit(&self) -> f64 {
        self.bytes as f64 / 1e9 * self.reading.as_secs_f64() / self.time.as_secs_f64()
    }
}

/// The head, whose weights are so many bytes.
pub(crate) fn linear(model: &Model, rounds: usize, bytes: usize) -> Result<Kernel> {
    let reader = Reader::new();
    let times = try_medians(2, rounds, |v| {
        if v == 0 {
            model.head()
        } else {
            Ok(reading(&reader))
        }
    })?;
    Ok(Kernel {
        time: times[0],
        bytes,
        reading: times[1],
    })
}

/// The time in which 10^9 bytes are read.
fn reading(reader: &Reader) -> Duration {
    Duration::from_secs_f64(1.0 / reader.gb_s())
}

/// Kernels other than linear ones.
#[derive(Default)]
pub(crate) struct Kernels {
    /// One attention layer, by the tokens before.
    pub(crate) attention: Vec<(usize, Kernel)>,
    /// All recurrent layers, a step each, under a checkpoint.
    pub(crate) gated_delta: Option<Kernel>,
    /// Seconds that all recurrent layers take longer to fold what was kept than to fold one token, for each of [`ACCEPTED`].
    pub(crate) folding: [f64; ACCEPTED.len()],
}

/// Each of them after `model`'s head, which leaves nothing else in the caches.
pub(crate) fn measure(model: &Model, rounds: usize) -> Result<Kernels> {
    let views = CONTEXTS.map(view);
    let views = views.into_iter().collect::<Result<Vec<_>>>()?;
    let q = random("q", &[1, SHAPE.heads, SHAPE.head_dim])?;
    let gate = random("gate", &[1, SHAPE.heads * SHAPE.head_dim])?;
    let mut layers = delta::layers(LAYERS, 1);
    let reader = Reader::new();
    let times = try_medians(CONTEXTS.len() + 2, rounds, |v| {
        if v > CONTEXTS.len() {
            return Ok(reading(&reader));
        }
        model.head()?;
        let Some(view) = views.get(v) else {
            return Ok(delta::round(&mut layers, 1).passes);
        };
        let segment = AttentionSegment {
            rows: 1,
            position: CONTEXTS[v] - 1,
            view,
        };
        let start = Instant::now();
        attention(Backend::Cpu, &SHAPE, &q, Some(&gate), &[segment])?;
        anyhow::Ok(start.elapsed())
    })?;
    let passes = folding_passes(model, rounds)?;
    let state: usize = layers.iter().map(|layer| layer.cache.footprint().live).sum();
    let kernel = |time, bytes| Kernel {
        time,
        bytes,
        reading: times[CONTEXTS.len() + 1],
    };
    let keys_values = |context: usize| 2 * context * SHAPE.kv_heads * SHAPE.head_dim * size_of::<f32>();
    Ok(Kernels {
        attention: CONTEXTS
            .into_iter()
            .zip(&times)
            .map(|(context, time)| (context, kernel(*time, keys_values(context))))
            .collect(),
        gated_delta: Some(kernel(times[CONTEXTS.len()], 2 * state)),
        folding: std::array::from_fn(|case| passes[case].as_secs_f64() - passes[0].as_secs_f64()),
    })
}

/// The passes of all recurrent layers that fold what rounds of each of [`ACCEPTED`] kept. Of each layer the least time counts:
/// folding is a small part of a pass, and one layer is done before others who use the machine get their turn.
fn folding_passes(model: &Model, rounds: usize) -> Result<[Duration; ACCEPTED.len()]> {
    let mut layers = delta::layers(LAYERS, 1 + DRAFTS);
    let mut least = [[Duration::MAX; LAYERS]; ACCEPTED.len()];
    for _ in 0..rounds {
        for ((_, accepted), least) in ACCEPTED.iter().zip(&mut least) {
            // The first round leaves the records that the second one folds.
            delta::round(&mut layers, 1 + accepted);
            model.head()?;
            for (layer, least) in layers.chunks_mut(1).zip(least) {
                *least = delta::round(layer, 1 + accepted).passes.min(*least);
            }
        }
    }
    Ok(least.map(|times| times.iter().sum()))
}

fn random(name: &str, shape: &[usize]) -> Result<Tensor> {
    let source = Seeded {
        seed: 2,
        dtype: DType::F32,
    };
    Ok(source.tensor(name, shape)?)
}

fn view(context: usize) -> Result<KvView> {
    let rows = |name: &str, start: usize| {
        random(
            &format!("{name}.{start}"),
            &[BLOCK, SHAPE.kv_heads, SHAPE.head_dim],
        )
    };
    let blocks = (0..context).step_by(BLOCK).map(|start| {
        Ok(KvBlock {
            start,
            rows: BLOCK,
            keys: rows("keys", start)?,
            values: rows("values", start)?,
        })
    });
    Ok(KvView {
        blocks: blocks.collect::<Result<_>>()?,
        window: None,
        sink: 0,
    })
}
