//! A model's caches, one a layer, as one cache.

use std::sync::Arc;

use candle_core::Device;

use crate::{
    ArraysCache, AttentionCache, Cache, Checkpoint, Error, Footprint, KvCache, KvType, LayerLayout, Ledger,
    RecurrentCache, Result, RotatingKvCache, Snapshot, StackLayout, Window,
};

/// How a model's standard caches are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheOptions {
    /// Lets attention layers see only this much, in bounded memory. Recurrent layers are not affected. `None`: all
    /// tokens.
    pub window: Option<Window>,
    /// Type in which attention layers store keys and values. Recurrent layers are not affected.
    pub kv: KvType,
    /// Most tokens that may be fed between a checkpoint and its commit.
    pub record_limit: usize,
}

impl Default for CacheOptions {
    /// All tokens, not rounded, and records of up to 64.
    fn default() -> Self {
        Self {
            window: None,
            kv: KvType::Native,
            record_limit: 64,
        }
    }
}

/// The cache of one layer.
pub enum LayerCache {
    /// Keys and values.
    Attention(Box<dyn AttentionCache>),
    /// Arrays with a journal.
    Recurrent(Box<dyn RecurrentCache>),
}

impl LayerCache {
    /// The cache of this crate for a layer.
    pub fn standard(layout: &LayerLayout, options: &CacheOptions, device: &Device) -> Result<Self> {
        Ok(match (layout, options.window) {
            (LayerLayout::Attention(layout), None) => {
                Self::Attention(Box::new(KvCache::stored_as(layout.clone(), options.kv, device)))
            }
            (LayerLayout::Attention(layout), Some(window)) => Self::Attention(Box::new(
                RotatingKvCache::stored_as(layout.clone(), options.kv, window, options.record_limit, device)?,
            )),
            (LayerLayout::Recurrent(layout), _) => Self::Recurrent(Box::new(ArraysCache::new(
                layout.clone(),
                options.record_limit,
                device,
            )?)),
        })
    }

    fn cache(&self) -> &dyn Cache {
        match self {
            Self::Attention(cache) => cache.as_ref(),
            Self::Recurrent(cache) => cache.as_ref(),
        }
    }

    fn cache_mut(&mut self) -> &mut dyn Cache {
        match self {
            Self::Attention(cache) => cache.as_mut(),
            Self::Recurrent(cache) => cache.as_mut(),
        }
    }

    fn check(&self, layout: &LayerLayout) -> Result<()> {
        let (expected, found) = match (layout, self) {
            (LayerLayout::Attention(want), Self::Attention(cache)) => {
                if want == cache.layout() {
                    return Ok(());
                }
                (format!("{want:?}"), format!("{:?}", cache.layout()))
            }
            (LayerLayout::Recurrent(want), Self::Recurrent(cache)) => {
                if want == cache.layout() {
                    return Ok(());
                }
                (format!("{want:?}"), format!("{:?}", cache.layout()))
            }
            (want, Self::Attention(cache)) => (
                format!("{} cache", want.kind()),
                format!("attention cache `{}`", cache.kind()),
            ),
            (want, Self::Recurrent(cache)) => (
                format!("{} cache", want.kind()),
                format!("recurrent cache `{}`", cache.kind()),
            ),
        };
        Err(Error::mismatch("the layer's cache", expected, found))
    }
}

/// The caches of all layers of one model, for one sequence.
///
/// It asks every layer before it changes any: a refusal leaves all as they were, and names the layer, its kind, what was
/// asked and what it could give. It belongs to the model whose [`StackLayout`] it was made with; other models refuse it.
pub struct CacheStack {
    layout: Arc<StackLayout>,
    layers: Vec<LayerCache>,
    ledger: Ledger,
}

impl std::fmt::Debug for CacheStack {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kinds: Vec<&str> = self.layers.iter().map(|l| l.cache().kind()).collect();
        f.debug_struct("CacheStack")
            .field("len", &self.len())
            .field("layers", &kinds)
            .finish_non_exhaustive()
    }
}

impl CacheStack {
    /// A stack of the given caches, which may come from anywhere.
    ///
    /// # Errors
    /// Another number of layers than the layout has, a layer of another kind or shape, or a cache that is not empty.
    pub fn new(layout: Arc<StackLayout>, layers: Vec<LayerCache>) -> Result<Self> {
        if layers.len() != layout.layers.len() {
            return Err(Error::mismatch(
                "caches of a model",
                layout.layers.len(),
                layers.len(),
            ));
        }
        for (index, (layer, want)) in layers.iter().zip(&layout.layers).enumerate() {
            let cache = layer.cache();
            layer
                .check(want)
                .and_then(|()| match cache.len() {
                    0 => Ok(()),
                    len => Err(Error::mismatch("tokens in a new stack's cache", 0, len)),
                })
                .map_err(|e| e.in_layer(index, cache.kind()))?;
        }
        Ok(Self {
            layout,
            layers,
            ledger: Ledger::new(),
        })
    }

    /// A stack of this crate's own caches.
    pub fn standard(layout: Arc<StackLayout>, options: &CacheOptions) -> Result<Self> {
        let layers = layout
            .layers
            .iter()
            .map(|layer| LayerCache::standard(layer, options, &layout.device))
            .collect::<Result<Vec<_>>>()?;
        Self::new(layout, layers)
    }

    /// The layout it was made with.
    pub fn layout(&self) -> &Arc<StackLayout> {
        &self.layout
    }

    /// Refuses a stack that was made for another model.
    pub fn belongs_to(&self, layout: &Arc<StackLayout>) -> Result<()> {
        if Arc::ptr_eq(&self.layout, layout) || *self.layout == **layout {
            return Ok(());
        }
        if self.layout.fingerprint != layout.fingerprint {
            return Err(Error::mismatch(
                "the model that the caches were made for",
                &layout.fingerprint,
                &self.layout.fingerprint,
            ));
        }
        if !self.layout.device.same_device(&layout.device) {
            return Err(Error::mismatch(
                "device of the caches",
                format!("{:?}", layout.device.location()),
                format!("{:?}", self.layout.device.location()),
            ));
        }
        Err(Error::mismatch(
            "layout of the caches",
            format!("{:?}", layout.layers),
            format!("{:?}", self.layout.layers),
        ))
    }

    /// The layers' caches, for looking at.
    pub fn layers(&self) -> impl ExactSizeIterator<Item = &dyn Cache> {
        self.layers.iter().map(LayerCache::cache)
    }

    /// The attention cache of a layer: for models.
    ///
    /// # Errors
    /// There is no such layer, or it is recurrent.
    pub fn attention(&mut self, layer: usize) -> Result<&mut dyn AttentionCache> {
        match self.layers.get_mut(layer) {
            Some(LayerCache::Attention(cache)) => Ok(cache.as_mut()),
            other => Err(wrong_layer(layer, "attention", other.as_deref())),
        }
    }

    /// The recurrent cache of a layer: for models.
    ///
    /// # Errors
    /// There is no such layer, or it is attention.
    pub fn recurrent(&mut self, layer: usize) -> Result<&mut dyn RecurrentCache> {
        match self.layers.get_mut(layer) {
            Some(LayerCache::Recurrent(cache)) => Ok(cache.as_mut()),
            other => Err(wrong_layer(layer, "recurrent", other.as_deref())),
        }
    }

    /// Refuses a stack whose layers hold different numbers of tokens.
    pub fn check_even(&self) -> Result<()> {
        let first = self.len();
        match self.layers().position(|cache| cache.len() != first) {
            None => Ok(()),
            Some(layer) => Err(Error::Uneven {
                first,
                layer,
                len: self.layers[layer].cache().len(),
            }),
        }
    }

    fn each(&self, mut f: impl FnMut(usize, &dyn Cache) -> Result<()>) -> Result<()> {
        for (index, layer) in self.layers.iter().enumerate() {
            let cache = layer.cache();
            f(index, cache).map_err(|e| e.in_layer(index, cache.kind()))?;
        }
        Ok(())
    }

    fn each_mut(&mut self, mut f: impl FnMut(usize, &mut dyn Cache) -> Result<()>) -> Result<()> {
        for (index, layer) in self.layers.iter_mut().enumerate() {
            let result = f(index, layer.cache_mut());
            result.map_err(|e| e.in_layer(index, layer.cache().kind()))?;
        }
        Ok(())
    }
}

fn wrong_layer(layer: usize, expected: &str, found: Option<&LayerCache>) -> Error {
    let found = found.map_or("no such layer", |l| l.cache().kind());
    Error::mismatch(format!("cache of layer {layer}"), expected, found)
}

impl Cache for CacheStack {
    fn kind(&self) -> &str {
        "stack"
    }

    fn len(&self) -> usize {
        self.layers().next().map_or(0, |cache| cache.len())
    }

    fn trimmable(&self) -> usize {
        if self.check_even().is_err() {
            return 0;
        }
        self.layers().map(|cache| cache.trimmable()).min().unwrap_or(0)
    }

    fn trim(&mut self, n: usize) -> Result<()> {
        self.check_even()?;
        self.each(|_, cache| Error::check_trim(cache, n))?;
        self.each_mut(|_, cache| cache.trim(n))
    }

    fn checkpoint(&mut self) -> Result<Checkpoint> {
        self.check_even()?;
        self.ledger.can_open()?;
        let mut parts: Vec<Checkpoint> = Vec::with_capacity(self.layers.len());
        let opened = self.each_mut(|_, cache| {
            parts.push(cache.checkpoint()?);
            Ok(())
        });
        if let Err(error) = opened {
            for (layer, part) in self.layers.iter_mut().zip(parts) {
                layer.cache_mut().commit(part);
            }
            return Err(error);
        }
        self.ledger.open_with(self.len(), parts)
    }

    /// Every layer is restored even if one refuses; the first refusal is returned.
    fn restore(&mut self, to: &Checkpoint) -> Result<()> {
        self.ledger.verify(to)?;
        let mut first = Ok(());
        for (index, (layer, part)) in self.layers.iter_mut().zip(to.parts()).enumerate() {
            let result = layer.cache_mut().restore(part);
            if let (Ok(()), Err(e)) = (&first, result) {
                first = Err(e.in_layer(index, layer.cache().kind()));
            }
        }
        first
    }

    fn commit(&mut self, checkpoint: Checkpoint) {
        if self.ledger.close(&checkpoint) {
            for (layer, part) in self.layers.iter_mut().zip(checkpoint.into_parts()) {
                layer.cache_mut().commit(part);
            }
        }
    }

    fn snapshot(&self) -> Result<Snapshot> {
        self.check_even()?;
        let mut parts = Vec::with_capacity(self.layers.len());
        self.each(|_, cache| {
            parts.push(cache.snapshot()?);
            Ok(())
        })?;
        Ok(Snapshot::new(self.kind(), self.len()).with_parts(parts))
    }

    fn fits(&self, from: &Snapshot) -> Result<()> {
        from.expect_kind(self.kind())?;
        let parts = from.parts();
        if parts.len() != self.layers.len() {
            return Err(Error::mismatch(
                "layers of a snapshot",
                self.layers.len(),
                parts.len(),
            ));
        }
        self.each(|index, cache| {
            if parts[index].len() != from.len() {
                return Err(Error::mismatch(
                    "tokens of a layer's snapshot",
                    from.len(),
                    parts[index].len(),
                ));
            }
            cache.fits(&parts[index])
        })
    }

    fn load(&mut self, from: &Snapshot) -> Result<()> {
        self.fits(from)?;
        self.ledger.clear();
        self.each_mut(|index, cache| cache.load(&from.parts()[index]))
    }

    fn reset(&mut self) {
        self.ledger.clear();
        for layer in &mut self.layers {
            layer.cache_mut().reset();
        }
    }

    fn footprint(&self) -> Footprint {
        self.layers().map(|cache| cache.footprint()).sum()
    }

    fn admit(&self, tokens: usize) -> Result<()> {
        self.check_even()?;
        self.each(|_, cache| cache.admit(tokens))
    }
}
