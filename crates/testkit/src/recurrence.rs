//! A recurrent layer small enough to read, to drive any recurrent cache without a model.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use recant_core::{ArraySpec, Fold, RecordSlice, RecurrentCache, RecurrentLayout, Result};

use crate::rng::mix;

const HEADS: usize = 2;
const KEYS: usize = 3;
const VALUES: usize = 4;
const CHANNELS: usize = HEADS * VALUES;
const KERNEL: usize = 4;
const TAPS: [f32; KERNEL] = [0.125, -0.375, 0.25, 0.75];

/// How a layer gives a cache its new state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Writes {
    /// Into the arrays that the cache handed out, as fused kernels do.
    InPlace,
    /// As new arrays.
    Fresh,
}

/// A gated delta rule behind a short convolution, in plain loops of one fixed order.
///
/// State `S` is `[2, 3, 4]` (heads, key width, value width) and the window `[3, 8]` (raw rows, channels), both f32. For
/// each token: `v` is the convolution over the window and the token's raw row; then `S <- g S`, `u = beta (v - S'k)`,
/// `S <- S + k u'`, and the output is `S'k`. Inputs are hashes of the token id.
#[derive(Debug, Clone, Copy)]
pub struct Recurrence {
    writes: Writes,
}

/// The state and the window, as vectors.
#[derive(Debug, Clone, PartialEq)]
struct State {
    matrix: Vec<f32>,
    window: Vec<f32>,
}

/// What a token feeds to the step.
struct Inputs {
    keys: Vec<f32>,
    gates: Vec<f32>,
    betas: Vec<f32>,
    row: Vec<f32>,
}

/// What is kept of each token of a call, laid end to end.
#[derive(Default)]
struct Records {
    keys: Vec<f32>,
    gates: Vec<f32>,
    updates: Vec<f32>,
    rows: Vec<f32>,
}

impl Recurrence {
    /// A layer that writes its state in the given way.
    pub fn new(writes: Writes) -> Self {
        Self { writes }
    }

    /// Arrays `state` and `window`; records `k`, `g`, `u` and `row`.
    pub fn layout() -> RecurrentLayout {
        let spec = |name, shape: &[usize]| ArraySpec {
            name,
            shape: shape.to_vec(),
            dtype: DType::F32,
        };
        RecurrentLayout {
            arrays: vec![
                spec("state", &[HEADS, KEYS, VALUES]),
                spec("window", &[KERNEL - 1, CHANNELS]),
            ],
            records: vec![
                spec("k", &[HEADS, KEYS]),
                spec("g", &[HEADS]),
                spec("u", &[HEADS, VALUES]),
                spec("row", &[CHANNELS]),
            ],
            fold: Arc::new(RecurrenceFold),
        }
    }

    /// Feeds tokens to a cache of this [`layout`](Self::layout), as a layer does.
    ///
    /// # Shapes
    /// Returns `[tokens, 8]` in f32.
    ///
    /// # Errors
    /// What the cache says.
    pub fn feed(&self, cache: &mut dyn RecurrentCache, tokens: &[u32]) -> Result<Tensor> {
        let step = cache.begin(tokens.len())?;
        let mut base = State::read(&step.arrays)?;
        for record in &step.fold {
            base.fold(record)?;
        }
        let mut work = base.clone();
        for record in &step.replay {
            work.fold(record)?;
        }
        let (outputs, records) = work.run(tokens);
        let kept = if step.recording { &base } else { &work };
        let arrays = match (step.writes(), self.writes) {
            (false, _) => step.arrays,
            (true, Writes::Fresh) => kept.tensors()?,
            (true, Writes::InPlace) => {
                for (array, new) in step.arrays.iter().zip(kept.tensors()?) {
                    array.slice_set(&new, 0, 0)?;
                }
                step.arrays
            }
        };
        let records = if step.recording {
            records.tensors(tokens.len())?
        } else {
            Vec::new()
        };
        cache.finish(arrays, records)?;
        Ok(Tensor::from_vec(outputs, (tokens.len(), CHANNELS), &Device::Cpu)?)
    }

    /// The outputs for `tokens` from the start, without any cache: `[tokens][8]`.
    pub fn plain(tokens: &[u32]) -> Vec<Vec<f32>> {
        let (outputs, _) = State::zero().run(tokens);
        outputs.chunks(CHANNELS).map(<[f32]>::to_vec).collect()
    }
}

struct RecurrenceFold;

impl Fold for RecurrenceFold {
    fn fold(&self, arrays: &[Tensor], records: &[RecordSlice]) -> Result<Vec<Tensor>> {
        let mut state = State::read(arrays)?;
        for record in records {
            state.fold(record)?;
        }
        state.tensors()
    }
}

impl State {
    fn zero() -> Self {
        Self {
            matrix: vec![0.; HEADS * KEYS * VALUES],
            window: vec![0.; (KERNEL - 1) * CHANNELS],
        }
    }

    fn read(arrays: &[Tensor]) -> Result<Self> {
        let [matrix, window] = arrays else {
            return Err(recant_core::Error::mismatch(
                "arrays of a recurrence",
                2,
                arrays.len(),
            ));
        };
        Ok(Self {
            matrix: matrix.flatten_all()?.to_vec1()?,
            window: window.flatten_all()?.to_vec1()?,
        })
    }

    fn tensors(&self) -> Result<Vec<Tensor>> {
        Ok(vec![
            Tensor::from_slice(&self.matrix, (HEADS, KEYS, VALUES), &Device::Cpu)?,
            Tensor::from_slice(&self.window, (KERNEL - 1, CHANNELS), &Device::Cpu)?,
        ])
    }

    fn run(&mut self, tokens: &[u32]) -> (Vec<f32>, Records) {
        let mut outputs = Vec::with_capacity(tokens.len() * CHANNELS);
        let mut records = Records::default();
        for &token in tokens {
            self.step(&Inputs::of(token), &mut outputs, &mut records);
        }
        (outputs, records)
    }

    fn step(&mut self, inputs: &Inputs, outputs: &mut Vec<f32>, records: &mut Records) {
        let mut updates = Vec::with_capacity(CHANNELS);
        for head in 0..HEADS {
            let keys = &inputs.keys[head * KEYS..][..KEYS];
            self.decay(head, inputs.gates[head]);
            for column in 0..VALUES {
                let value = self.convolved(head * VALUES + column, &inputs.row);
                let recalled = self.recall(head, column, keys);
                updates.push(inputs.betas[head] * (value - recalled));
            }
            self.add(head, keys, &updates[head * VALUES..][..VALUES]);
            outputs.extend((0..VALUES).map(|column| self.recall(head, column, keys)));
        }
        self.shift(&inputs.row);
        records.keys.extend(&inputs.keys);
        records.gates.extend(&inputs.gates);
        records.updates.extend(updates);
        records.rows.extend(&inputs.row);
    }

    /// Repeats the elementwise part of recorded steps.
    fn fold(&mut self, record: &RecordSlice) -> Result<()> {
        let rows = |index: usize| -> Result<Vec<Vec<f32>>> {
            let array = record.arrays[index].narrow(0, record.rows.start, record.rows.len())?;
            Ok(array.flatten_from(1)?.to_vec2()?)
        };
        let (keys, gates, updates, raw) = (rows(0)?, rows(1)?, rows(2)?, rows(3)?);
        for token in 0..record.rows.len() {
            for head in 0..HEADS {
                self.decay(head, gates[token][head]);
                let keys = &keys[token][head * KEYS..][..KEYS];
                self.add(head, keys, &updates[token][head * VALUES..][..VALUES]);
            }
            self.shift(&raw[token]);
        }
        Ok(())
    }

    fn decay(&mut self, head: usize, gate: f32) {
        for cell in &mut self.matrix[head * KEYS * VALUES..][..KEYS * VALUES] {
            *cell *= gate;
        }
    }

    fn add(&mut self, head: usize, keys: &[f32], updates: &[f32]) {
        let rows = self.matrix[head * KEYS * VALUES..].chunks_mut(VALUES);
        for (row, key) in rows.zip(keys) {
            for (cell, update) in row.iter_mut().zip(updates) {
                *cell += key * update;
            }
        }
    }

    fn recall(&self, head: usize, column: usize, keys: &[f32]) -> f32 {
        let rows = self.matrix[head * KEYS * VALUES..].chunks(VALUES);
        rows.zip(keys).fold(0., |sum, (row, key)| sum + row[column] * key)
    }

    fn convolved(&self, channel: usize, row: &[f32]) -> f32 {
        let past = self.window.chunks(CHANNELS).map(|old| old[channel]);
        past.chain([row[channel]])
            .zip(TAPS)
            .fold(0., |sum, (x, tap)| sum + x * tap)
    }

    fn shift(&mut self, row: &[f32]) {
        self.window.drain(..CHANNELS);
        self.window.extend_from_slice(row);
    }
}

impl Inputs {
    fn of(token: u32) -> Self {
        let draw = |salt: u64, index: usize| {
            let bits = mix(u64::from(token) << 32 | salt << 16 | index as u64) >> 40;
            bits as f32 / (1u32 << 24) as f32
        };
        let vector = |salt: u64, count: usize, low: f32, high: f32| -> Vec<f32> {
            (0..count).map(|i| low + (high - low) * draw(salt, i)).collect()
        };
        Self {
            keys: vector(1, HEADS * KEYS, -0.7, 0.7),
            gates: vector(2, HEADS, 0.6, 1.0),
            betas: vector(3, HEADS, 0.1, 0.9),
            row: vector(4, CHANNELS, -1.0, 1.0),
        }
    }
}

impl Records {
    fn tensors(&self, tokens: usize) -> Result<Vec<Tensor>> {
        let device = &Device::Cpu;
        Ok(vec![
            Tensor::from_slice(&self.keys, (tokens, HEADS, KEYS), device)?,
            Tensor::from_slice(&self.gates, (tokens, HEADS), device)?,
            Tensor::from_slice(&self.updates, (tokens, HEADS, VALUES), device)?,
            Tensor::from_slice(&self.rows, (tokens, CHANNELS), device)?,
        ])
    }
}
