//! What the tests across crates share: models, goldens, a small random number generator.
#![allow(dead_code, unreachable_pub)]

pub mod checkpoint;
pub mod counting;
pub mod law;
pub mod seeded;
pub mod small_floats;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use recant::candle::{safetensors, Device, Tensor};
use recant::core::{Cache, CacheStack, LanguageModel, Rows, Segment};
use recant::Loaded;

pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A checkpoint folder: those of the demo pair are in the repository, the others beside it or nowhere.
pub fn folder(name: &str) -> Option<PathBuf> {
    let own = root().join("examples/models").join(name);
    let shared = root().join("../shared/models").join(name);
    [own, shared].into_iter().find(|p| p.is_dir())
}

/// The folder, or a printed line that says which test did not run and why.
pub fn folder_or_skip(test: &str, name: &str) -> Option<PathBuf> {
    let found = folder(name);
    if found.is_none() {
        println!("SKIPPED {test}: there is no ../shared/models/{name} beside the repository");
    }
    found
}

pub fn load(name: &str) -> Result<Loaded> {
    let path = folder(name).ok_or_else(|| format!("no checkpoint {name}"))?;
    Ok(recant::load(path)?)
}

/// What the reference implementation gave for a checkpoint and a prompt of `n` tokens.
pub struct Golden {
    pub outputs: HashMap<String, Tensor>,
    pub state: HashMap<String, Tensor>,
}

impl Golden {
    pub fn read(model: &str, n: usize) -> Result<Self> {
        let own = root().join("tests/golden").join(model);
        let shared = root().join("../shared/golden").join(model);
        let folder = if own.is_dir() { own } else { shared };
        let read = |name: String| safetensors::load(folder.join(name), &Device::Cpu);
        Ok(Self {
            outputs: read(format!("p{n}.safetensors"))?,
            state: read(format!("p{n}.state.safetensors"))?,
        })
    }

    pub fn ids(&self, name: &str) -> Result<Vec<u32>> {
        Ok(self.outputs[name]
            .to_vec1::<i64>()?
            .into_iter()
            .map(|id| id as u32)
            .collect())
    }
}

/// A text of the demo tokenizer: the first `n` tokens of a golden prompt.
pub fn text_ids(n: usize) -> Result<Vec<u32>> {
    let mut ids = Golden::read("demo-target", 300)?.ids("input_ids")?;
    ids.truncate(n);
    Ok(ids)
}

/// Texts that no checkpoint was trained on.
pub fn heldout() -> Result<Vec<String>> {
    let lines = std::fs::read_to_string(root().join("../shared/models/heldout.jsonl"))?;
    lines
        .lines()
        .map(|line| {
            let line: serde_json::Value = serde_json::from_str(line)?;
            Ok(line["text"].as_str().ok_or("a line without a text")?.to_owned())
        })
        .collect()
}

/// The bits of a tensor's elements.
pub fn bits(tensor: &Tensor) -> Result<Vec<u32>> {
    Ok(tensor
        .flatten_all()?
        .to_vec1::<f32>()?
        .into_iter()
        .map(f32::to_bits)
        .collect())
}

/// The largest absolute difference over the largest magnitude of what is compared with.
pub fn relative_error(ours: &Tensor, theirs: &Tensor) -> Result<f32> {
    assert_eq!(ours.dims(), theirs.dims());
    let ours = ours.flatten_all()?.to_vec1::<f32>()?;
    let theirs = theirs.flatten_all()?.to_vec1::<f32>()?;
    let scale = theirs.iter().fold(0f32, |m, x| m.max(x.abs()));
    let error = ours
        .iter()
        .zip(&theirs)
        .fold(0f32, |m, (a, b)| m.max((a - b).abs()));
    // A maximum passes over NaN.
    assert!(
        ours.iter().chain(&theirs).all(|x| x.is_finite()),
        "something is no number"
    );
    let error = error / scale.max(f32::MIN_POSITIVE);
    Ok(error)
}

/// Feeds one sequence alone and gives the bits of its logits, row after row.
pub fn feed(model: &dyn LanguageModel, caches: &mut CacheStack, tokens: &[u32]) -> Result<Vec<u32>> {
    let output = model.forward(&mut [Segment::new(tokens, caches, Rows::All)])?;
    bits(output.segments[0].logits()?)
}

/// Fails, naming the place, if two stacks differ in any bit.
pub fn assert_same(what: &str, a: &CacheStack, b: &CacheStack) -> Result<()> {
    if let Some(difference) = a.snapshot()?.difference(&b.snapshot()?) {
        return Err(format!("{what}: caches differ: {difference}").into());
    }
    Ok(())
}

/// SplitMix64.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// Cuts `total` into random pieces of 1 to `most`.
    pub fn partition(&mut self, total: usize, most: usize) -> Vec<usize> {
        let mut pieces = Vec::new();
        let mut left = total;
        while left > 0 {
            let piece = 1 + self.below(most.min(left));
            pieces.push(piece);
            left -= piece;
        }
        pieces
    }
}

/// A seeded tiny dense model: see [`seeded`].
pub fn tiny(edit: impl FnOnce(&mut serde_json::Value)) -> Result<Arc<dyn LanguageModel>> {
    tiny_of(&seeded::dense(edit))
}

/// A seeded tiny model of any family.
pub fn tiny_of(config: &serde_json::Value) -> Result<Arc<dyn LanguageModel>> {
    Ok(Arc::new(seeded::model(config, 7, recant::candle::DType::F32)?))
}
