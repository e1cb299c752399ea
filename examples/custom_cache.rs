//! A cache written outside the library: keys and values stored in f16, at half the memory.
//!
//! The model takes it as it takes its own. Storing in f16 changes what attention reads, so the text may differ from that of
//! the standard cache; but speculation with this cache equals plain decoding with this cache, bit for bit, since
//! the cache keeps the law: what it holds depends only on the tokens fed and kept.

use std::path::Path;

use anyhow::{ensure, Result};
use recant::candle::{DType, Device, Tensor};
use recant::core::{
    ArraySpec, AttentionCache, AttentionLayout, Cache, CacheStack, Checkpoint, Error, Footprint, KvBlock,
    KvView, LayerCache, LayerLayout, Ledger, Snapshot,
};
use recant::{CacheOptions, Loaded};

/// Keys and values in f16, in one array each that doubles when it is full.
pub struct HalfKvCache {
    layout: AttentionLayout,
    keys: Tensor,
    values: Tensor,
    len: usize,
    /// Keeps the rules of checkpoints.
    ledger: Ledger,
}

impl HalfKvCache {
    /// An empty cache.
    pub fn new(layout: AttentionLayout, device: &Device) -> Result<Self, Error> {
        Ok(Self {
            keys: rows(&layout, 64, device)?,
            values: rows(&layout, 64, device)?,
            layout,
            len: 0,
            ledger: Ledger::new(),
        })
    }

    fn capacity(&self) -> usize {
        self.keys.dims()[0]
    }

    /// Makes room, without changing what is held.
    fn reserve(&mut self, len: usize) -> Result<(), Error> {
        if len <= self.capacity() {
            return Ok(());
        }
        let device = self.keys.device().clone();
        let (keys, values) = (
            rows(&self.layout, len.next_power_of_two(), &device)?,
            rows(&self.layout, len.next_power_of_two(), &device)?,
        );
        if self.len > 0 {
            keys.slice_set(&self.keys.narrow(0, 0, self.len)?, 0, 0)?;
            values.slice_set(&self.values.narrow(0, 0, self.len)?, 0, 0)?;
        }
        (self.keys, self.values) = (keys, values);
        Ok(())
    }

    fn write(&mut self, keys: &Tensor, values: &Tensor) -> Result<(), Error> {
        let tokens = keys.dims()[0];
        self.reserve(self.len + tokens)?;
        self.keys
            .slice_set(&keys.to_dtype(DType::F16)?.contiguous()?, 0, self.len)?;
        self.values
            .slice_set(&values.to_dtype(DType::F16)?.contiguous()?, 0, self.len)?;
        self.len += tokens;
        Ok(())
    }

    /// What a snapshot's arrays look like.
    fn spec(&self, name: &'static str) -> ArraySpec {
        ArraySpec {
            name,
            shape: vec![self.layout.kv_heads, self.layout.head_dim],
            dtype: DType::F16,
        }
    }
}

fn rows(layout: &AttentionLayout, rows: usize, device: &Device) -> Result<Tensor, Error> {
    Ok(Tensor::zeros(
        (rows, layout.kv_heads, layout.head_dim),
        DType::F16,
        device,
    )?)
}

impl Cache for HalfKvCache {
    fn kind(&self) -> &str {
        "half-kv"
    }

    fn len(&self) -> usize {
        self.len
    }

    fn trimmable(&self) -> usize {
        self.len - self.ledger.open_at().unwrap_or(0)
    }

    fn trim(&mut self, n: usize) -> Result<(), Error> {
        Error::check_trim(self, n)?;
        self.len -= n;
        Ok(())
    }

    fn checkpoint(&mut self) -> Result<Checkpoint, Error> {
        self.ledger.open(self.len)
    }

    fn restore(&mut self, to: &Checkpoint) -> Result<(), Error> {
        self.ledger.verify(to)?;
        self.len = to.len();
        Ok(())
    }

    fn commit(&mut self, checkpoint: Checkpoint) {
        self.ledger.close(&checkpoint);
    }

    fn snapshot(&self) -> Result<Snapshot, Error> {
        let snapshot = Snapshot::new(self.kind(), self.len);
        if self.len == 0 {
            return Ok(snapshot);
        }
        Ok(snapshot
            .with_rows("keys", self.keys.narrow(0, 0, self.len)?.copy()?)
            .with_rows("values", self.values.narrow(0, 0, self.len)?.copy()?))
    }

    fn fits(&self, from: &Snapshot) -> Result<(), Error> {
        from.expect_kind(self.kind())?;
        if from.is_empty() {
            return Ok(());
        }
        from.array(&self.spec("keys"), Some(from.len()))?;
        from.array(&self.spec("values"), Some(from.len()))?;
        Ok(())
    }

    fn load(&mut self, from: &Snapshot) -> Result<(), Error> {
        self.fits(from)?;
        self.reset();
        if from.is_empty() {
            return Ok(());
        }
        let keys = from.array(&self.spec("keys"), Some(from.len()))?;
        let values = from.array(&self.spec("values"), Some(from.len()))?;
        self.write(keys, values)
    }

    fn reset(&mut self) {
        self.len = 0;
        self.ledger.clear();
    }

    fn footprint(&self) -> Footprint {
        let row = 2 * self.layout.kv_heads * self.layout.head_dim * DType::F16.size_in_bytes();
        Footprint {
            live: self.len * row,
            records: 0,
            reserve: (self.capacity() - self.len) * row,
        }
    }
}

impl AttentionCache for HalfKvCache {
    fn layout(&self) -> &AttentionLayout {
        &self.layout
    }

    fn append(&mut self, keys: &Tensor, values: &Tensor) -> Result<(), Error> {
        let spec = ArraySpec {
            dtype: self.layout.dtype,
            ..self.spec("rows to append")
        };
        let tokens = keys.dims().first().copied();
        spec.check(keys, tokens)?;
        spec.check(values, tokens)?;
        self.write(keys, values)
    }

    fn view(&self) -> Result<KvView, Error> {
        Ok(KvView {
            blocks: vec![KvBlock {
                start: 0,
                rows: self.len,
                keys: self.keys.clone(),
                values: self.values.clone(),
            }],
            window: None,
            sink: 0,
        })
    }
}

/// The model's caches, with the attention layers' replaced.
fn half_caches(target: &Loaded) -> Result<CacheStack> {
    let layout = &target.model().spec().layout;
    let options = CacheOptions::default();
    let layers = layout
        .layers
        .iter()
        .map(|layer| match layer {
            LayerLayout::Attention(attention) => Ok(LayerCache::Attention(Box::new(HalfKvCache::new(
                attention.clone(),
                &layout.device,
            )?))),
            other => LayerCache::standard(other, &options, &layout.device),
        })
        .collect::<Result<Vec<_>, Error>>()?;
    Ok(CacheStack::new(layout.clone(), layers)?)
}

fn main() -> Result<()> {
    let models = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/models"));
    let target = recant::load(models.join("demo-target"))?;
    let draft = recant::load(models.join("demo-draft"))?;
    let prompt = "fn main() {\n    let mut total = 0;\n";

    let mut plain = target.session().caches(half_caches(&target)?).build()?;
    plain.start(prompt)?;
    for event in plain.generate(120) {
        print!("{}", event?.text());
    }
    println!();

    let mut speculative = target
        .session()
        .caches(half_caches(&target)?)
        .draft(&draft)
        .build()?;
    speculative.start(prompt)?;
    for event in speculative.generate(120) {
        event?;
    }
    ensure!(plain.tokens() == speculative.tokens(), "the two outputs differ");
    ensure!(
        plain
            .caches()
            .snapshot()?
            .difference(&speculative.caches().snapshot()?)
            .is_none(),
        "the two caches differ"
    );
    println!(
        "\n{} tokens with keys and values in f16, plain and speculative identical, caches too; {} of {} drafts accepted",
        plain.stats().generated_tokens,
        speculative.stats().accepted,
        speculative.stats().drafted
    );
    for (layer, cache) in plain.caches().layers().enumerate() {
        println!(
            "layer {layer}: {:<8} {:>8} bytes live",
            cache.kind(),
            cache.footprint().live
        );
    }
    Ok(())
}
