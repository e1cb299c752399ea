//! A hybrid model whose every output is told by a formula over the tokens before it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use recant_core::{
    ArraySpec, AttentionLayout, CacheStack, Error, Fold, KvView, LanguageModel, LayerLayout, ModelSpec,
    Output, RecordSlice, RecurrentLayout, Result, Segment, SegmentOutput, StackLayout,
};

use crate::rng::mix;

/// All hidden numbers are below it, so their products are exact in f32 and f64.
const MODULUS: u64 = 4093;
const RECURRENT: usize = 0;
const ATTENTION: usize = 1;
/// Multipliers of the four rolling hashes that the recurrent layer keeps.
const FACTORS: [u64; 4] = [31, 257, 1021, 2039];
const HIDDEN: usize = FACTORS.len() + 1;

/// Where a [`Fault`] strikes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Before any cache changes.
    Before,
    /// In the recurrent layer of the first segment, after it was handed its state and before it gave anything back.
    Kernel,
    /// After the recurrent layer of the first segment advanced, and before its attention layer.
    Middle,
    /// After all caches advanced, before the output is given.
    After,
}

/// What a [`Fault`] does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Harm {
    /// The call returns an error. A layer that stops this way abandons its call, as it has written nothing.
    Error,
    /// The call panics.
    Panic,
}

/// Something that goes wrong once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// Which call of `forward`, counted from 0.
    pub forward: usize,
    /// Where in it.
    pub place: Place,
    /// What happens.
    pub harm: Harm,
}

/// A model of one recurrent and one attention layer in whole-number arithmetic.
///
/// The recurrent layer keeps four rolling hashes of the tokens, the attention layer reads the position and the token of
/// every row it may see; the logits are a hash of both. A token that is missing, stale or in another place in either
/// layer's cache changes what follows. [`logits_after`](Self::logits_after) gives the same logits from the tokens alone,
/// without caches.
///
/// Logits are quarters from 0 to 4, so distributions are broad and ties are common: ties go to the lowest id.
#[derive(Debug)]
pub struct ScriptedModel {
    spec: ModelSpec,
    seed: u64,
    faults: Vec<Fault>,
    forwards: AtomicUsize,
    tokens: AtomicUsize,
    logit_rows: AtomicUsize,
}

impl ScriptedModel {
    /// A model of `vocab_size` ids that never ends a text. Two seeds are two models.
    pub fn new(seed: u64, vocab_size: usize) -> Self {
        let layers = vec![
            LayerLayout::Recurrent(RecurrentLayout {
                arrays: vec![ArraySpec {
                    name: "hashes",
                    shape: vec![FACTORS.len()],
                    dtype: DType::F32,
                }],
                records: vec![ArraySpec {
                    name: "token",
                    shape: vec![1],
                    dtype: DType::F32,
                }],
                fold: Arc::new(HashFold),
            }),
            LayerLayout::Attention(AttentionLayout {
                kv_heads: 1,
                head_dim: 2,
                dtype: DType::F32,
            }),
        ];
        let layout = StackLayout {
            fingerprint: format!("scripted-{seed}-{vocab_size}"),
            layers,
            device: Device::Cpu,
        };
        Self {
            spec: ModelSpec {
                family: String::from("scripted"),
                vocab_size,
                hidden_size: HIDDEN,
                max_positions: 1 << 16,
                eos: Vec::new(),
                layout: Arc::new(layout),
            },
            seed,
            faults: Vec::new(),
            forwards: AtomicUsize::new(0),
            tokens: AtomicUsize::new(0),
            logit_rows: AtomicUsize::new(0),
        }
    }

    /// Sets the ids that end a text.
    #[must_use]
    pub fn with_eos(mut self, eos: impl Into<Vec<u32>>) -> Self {
        self.spec.eos = eos.into();
        self
    }

    /// Sets the longest sequence.
    #[must_use]
    pub fn with_max_positions(mut self, max_positions: usize) -> Self {
        self.spec.max_positions = max_positions;
        self
    }

    /// Adds something that goes wrong.
    #[must_use]
    pub fn with_fault(mut self, fault: Fault) -> Self {
        self.faults.push(fault);
        self
    }

    /// Calls of `forward` so far, refused and failed ones included.
    pub fn forwards(&self) -> usize {
        self.forwards.load(Ordering::SeqCst)
    }

    /// Tokens given to `forward` so far.
    pub fn tokens(&self) -> usize {
        self.tokens.load(Ordering::SeqCst)
    }

    /// Rows of logits made so far.
    pub fn logit_rows(&self) -> usize {
        self.logit_rows.load(Ordering::SeqCst)
    }

    /// The logits after `history`, told without any cache, for caches that keep all tokens: `[vocab_size]`.
    ///
    /// None before the first token.
    pub fn logits_after(&self, history: &[u32]) -> Option<Vec<f32>> {
        let query = history.len().checked_sub(1)?;
        let mut hashes = [0; FACTORS.len()];
        for token in history {
            advance(&mut hashes, u64::from(*token));
        }
        let rows = history
            .iter()
            .enumerate()
            .map(|(position, token)| (position as u64, u64::from(*token)));
        Some(self.logits(&hidden(&hashes, attend(rows, query))))
    }

    /// The id that greedy decoding chooses after `history`; 0 before the first token.
    pub fn next(&self, history: &[u32]) -> u32 {
        let logits = self.logits_after(history).unwrap_or_default();
        let best = (0..logits.len()).reduce(|best, id| if logits[id] > logits[best] { id } else { best });
        best.and_then(|id| u32::try_from(id).ok()).unwrap_or(0)
    }

    /// What greedy decoding adds to `prompt`: up to `most` ids, the last of them one that ends the text if there is one.
    pub fn continuation(&self, prompt: &[u32], most: usize) -> Vec<u32> {
        let mut text = prompt.to_vec();
        while text.len() < prompt.len() + most {
            let next = self.next(&text);
            text.push(next);
            if self.spec.eos.contains(&next) {
                break;
            }
        }
        text.split_off(prompt.len())
    }

    fn logits(&self, hidden: &[u64; HIDDEN]) -> Vec<f32> {
        let state = hidden.iter().fold(mix(self.seed), |hash, x| mix(hash ^ x));
        (0..self.spec.vocab_size as u64)
            .map(|id| (mix(state ^ mix(id)) % 17) as f32 / 4.)
            .collect()
    }

    fn strike(&self, forward: usize, place: Place) -> Result<()> {
        let struck = self
            .faults
            .iter()
            .find(|f| f.forward == forward && f.place == place);
        match struck.map(|fault| fault.harm) {
            None => Ok(()),
            Some(Harm::Error) => Err(Error::other(format!(
                "scripted error in call {forward}: {place:?}"
            ))),
            Some(Harm::Panic) => panic!("scripted panic in call {forward}: {place:?}"),
        }
    }

    fn recurrent(
        &self,
        caches: &mut CacheStack,
        tokens: &[u32],
        strike: impl Fn() -> Result<()>,
    ) -> Result<Vec<[u64; FACTORS.len()]>> {
        let cache = caches.recurrent(RECURRENT)?;
        let step = cache.begin(tokens.len())?;
        let mut base = hashes_in(&step.arrays)?;
        if let Err(error) = strike() {
            cache.abandon();
            return Err(error);
        }
        step.fold.iter().try_for_each(|record| fold(&mut base, record))?;
        let mut work = base;
        step.replay
            .iter()
            .try_for_each(|record| fold(&mut work, record))?;
        let rows: Vec<_> = tokens
            .iter()
            .map(|token| {
                advance(&mut work, u64::from(*token));
                work
            })
            .collect();
        if step.writes() {
            let new = hashes_tensor(if step.recording { &base } else { &work })?;
            for array in &step.arrays {
                array.slice_set(&new, 0, 0)?;
            }
        }
        let records = match step.recording {
            true => vec![column(tokens)?],
            false => Vec::new(),
        };
        cache.finish(step.arrays, records)?;
        Ok(rows)
    }

    fn attention(&self, caches: &mut CacheStack, start: usize, tokens: &[u32]) -> Result<Vec<u64>> {
        let cache = caches.attention(ATTENTION)?;
        let rows: Vec<f32> = (start..)
            .zip(tokens)
            .flat_map(|(position, token)| [position as f32, *token as f32])
            .collect();
        let keys = Tensor::from_vec(rows, (tokens.len(), 1, 2), &Device::Cpu)?;
        cache.append(&keys, &(&keys + 1.)?)?;
        let view = cache.view()?;
        (start..start + tokens.len())
            .map(|query| read(&view, query))
            .collect()
    }
}

impl LanguageModel for ScriptedModel {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn forward(&self, batch: &mut [Segment<'_>]) -> Result<Output> {
        let forward = self.forwards.fetch_add(1, Ordering::SeqCst);
        self.spec.check(batch)?;
        self.strike(forward, Place::Before)?;
        let mut segments = Vec::with_capacity(batch.len());
        for (index, segment) in batch.iter_mut().enumerate() {
            let start = recant_core::Cache::len(segment.caches);
            let first = index == 0;
            let strike = |place| {
                if first {
                    self.strike(forward, place)
                } else {
                    Ok(())
                }
            };
            let hashes = self.recurrent(segment.caches, segment.tokens, || strike(Place::Kernel))?;
            strike(Place::Middle)?;
            let seen = self.attention(segment.caches, start, segment.tokens)?;
            let rows: Vec<_> = hashes.iter().zip(seen).map(|(h, seen)| hidden(h, seen)).collect();
            self.tokens.fetch_add(rows.len(), Ordering::SeqCst);
            segments.push(self.output(segment, &rows)?);
        }
        self.strike(forward, Place::After)?;
        Ok(Output { segments })
    }
}

impl ScriptedModel {
    fn output(&self, segment: &Segment<'_>, rows: &[[u64; HIDDEN]]) -> Result<SegmentOutput> {
        let wanted = segment.logits.count(rows.len());
        self.logit_rows.fetch_add(wanted, Ordering::SeqCst);
        let logits: Vec<f32> = rows[rows.len() - wanted..]
            .iter()
            .flat_map(|row| self.logits(row))
            .collect();
        let flat: Vec<f32> = rows.iter().flatten().map(|x| *x as f32).collect();
        let tensor = |data, shape| Tensor::from_vec(data, shape, &Device::Cpu);
        Ok(SegmentOutput {
            logits: (wanted > 0)
                .then(|| tensor(logits, (wanted, self.spec.vocab_size)))
                .transpose()?,
            largest: None,
            // There is no norm, so the rows before and after it are the same.
            hidden: segment
                .hidden
                .map(|_| tensor(flat, (rows.len(), HIDDEN)))
                .transpose()?,
        })
    }
}

fn advance(hashes: &mut [u64; FACTORS.len()], token: u64) {
    for (hash, factor) in hashes.iter_mut().zip(FACTORS) {
        *hash = (*hash * factor + token + 1) % MODULUS;
    }
}

fn hidden(hashes: &[u64; FACTORS.len()], seen: u64) -> [u64; HIDDEN] {
    let mut out = [seen; HIDDEN];
    out[..FACTORS.len()].copy_from_slice(hashes);
    out
}

/// Takes in visible rows, given as position and token, in order of position.
fn attend(rows: impl Iterator<Item = (u64, u64)>, query: usize) -> u64 {
    rows.fold(query as u64 % MODULUS, |hash, (position, token)| {
        (hash * 3571 + position * 29 + token * 7 + 1) % MODULUS
    })
}

fn read(view: &KvView, query: usize) -> Result<u64> {
    let mut rows = Vec::new();
    for block in &view.blocks {
        let keys: Vec<f32> = block.keys.narrow(0, 0, block.rows)?.flatten_all()?.to_vec1()?;
        let values: Vec<f32> = block.values.narrow(0, 0, block.rows)?.flatten_all()?.to_vec1()?;
        for (row, (key, value)) in keys.chunks(2).zip(values.chunks(2)).enumerate() {
            let at = block.start + row;
            if at <= query
                && view
                    .window
                    .is_none_or(|window| query - at < window || at < view.sink)
            {
                // The key's position and the value's token: a row in another place, or half of one, shows.
                rows.push((key[0] as u64, value[1] as u64 - 1));
            }
        }
    }
    Ok(attend(rows.into_iter(), query))
}

fn hashes_in(arrays: &[Tensor]) -> Result<[u64; FACTORS.len()]> {
    let [array] = arrays else {
        return Err(Error::mismatch("arrays of a scripted layer", 1, arrays.len()));
    };
    let mut hashes = [0; FACTORS.len()];
    for (hash, held) in hashes.iter_mut().zip(array.to_vec1::<f32>()?) {
        *hash = held as u64;
    }
    Ok(hashes)
}

fn hashes_tensor(hashes: &[u64; FACTORS.len()]) -> Result<Tensor> {
    let held = hashes.map(|hash| hash as f32);
    Ok(Tensor::from_slice(&held, FACTORS.len(), &Device::Cpu)?)
}

fn column(tokens: &[u32]) -> Result<Tensor> {
    let held: Vec<f32> = tokens.iter().map(|token| *token as f32).collect();
    Ok(Tensor::from_vec(held, (tokens.len(), 1), &Device::Cpu)?)
}

fn fold(hashes: &mut [u64; FACTORS.len()], record: &RecordSlice) -> Result<()> {
    let [tokens] = record.arrays.as_slice() else {
        return Err(Error::mismatch(
            "records of a scripted layer",
            1,
            record.arrays.len(),
        ));
    };
    let rows = tokens.narrow(0, record.rows.start, record.rows.len())?;
    for token in rows.flatten_all()?.to_vec1::<f32>()? {
        advance(hashes, token as u64);
    }
    Ok(())
}

struct HashFold;

impl Fold for HashFold {
    fn fold(&self, arrays: &[Tensor], records: &[RecordSlice]) -> Result<Vec<Tensor>> {
        let mut hashes = hashes_in(arrays)?;
        records.iter().try_for_each(|record| fold(&mut hashes, record))?;
        Ok(vec![hashes_tensor(&hashes)?])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use recant_core::{Cache, CacheOptions, Rows, Transaction};

    #[test]
    fn the_formula_and_the_caches_agree() -> Result<()> {
        let model = ScriptedModel::new(3, 20);
        let text: Vec<u32> = (0..30).map(|i| (7 * i + 3) % 20).collect();
        let mut stack = model.new_caches(&CacheOptions::default())?;
        let output = model.forward(&mut [Segment::new(&text, &mut stack, Rows::All)])?;
        let rows = output.segments[0].logits()?.to_vec2::<f32>()?;
        for (index, row) in rows.iter().enumerate() {
            assert_eq!(Some(row), model.logits_after(&text[..=index]).as_ref());
        }
        assert_eq!(
            (model.forwards(), model.tokens(), model.logit_rows()),
            (1, 30, 30)
        );
        Ok(())
    }

    #[test]
    fn a_token_that_is_missing_changes_what_follows() {
        let model = ScriptedModel::new(3, 20);
        let text: Vec<u32> = (0..12).map(|i| (7 * i + 3) % 20).collect();
        let whole = model.logits_after(&text);
        for gone in 0..text.len() - 1 {
            let mut shorter = text.clone();
            shorter.remove(gone);
            assert_ne!(whole, model.logits_after(&shorter), "without token {gone}");
        }
    }

    #[test]
    fn a_fault_strikes_once_and_where_it_is_told() -> Result<()> {
        for place in [Place::Before, Place::Kernel, Place::Middle, Place::After] {
            let harm = Harm::Error;
            let model = ScriptedModel::new(1, 8).with_fault(Fault {
                forward: 1,
                place,
                harm,
            });
            let mut stack = model.new_caches(&CacheOptions::default())?;
            model.forward(&mut [Segment::new(&[1, 2], &mut stack, Rows::None)])?;
            let mut round = Transaction::begin(&mut stack)?;
            assert!(model
                .forward(&mut [Segment::new(&[3], round.cache(), Rows::None)])
                .is_err());
            let lengths: Vec<usize> = round.cache().layers().map(|cache| cache.len()).collect();
            let expected = match place {
                Place::Before | Place::Kernel => [2, 2],
                Place::Middle => [3, 2],
                Place::After => [3, 3],
            };
            assert_eq!(lengths, expected, "{place:?}");
            drop(round);
            assert_eq!(stack.len(), 2);
            model.forward(&mut [Segment::new(&[3], &mut stack, Rows::None)])?;
        }
        Ok(())
    }
}
