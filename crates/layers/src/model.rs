//! The model: embedding, decoder layers, final norm, head.

use std::sync::Arc;

use recant_core::candle::Tensor;
use recant_core::{
    Cancel, Candidate, Hidden, LanguageModel, ModelSpec, Output, Readout, Result, Rows, Segment,
    SegmentOutput, StackLayout,
};
use recant_kernels::{Linear, Rotary};
use recant_weights::{Folder, Inventory, Norms, Source, Stored, Weights};

use crate::{Assembly, Config, DecoderBlock, Error, Family, LoadOptions, RmsNorm, Sequence};

/// A hybrid language model of any [`Family`]. Clones share the weights.
///
/// Weights stay in the type they are stored in; activations, caches and logits are f32. It keeps the law of
/// [`LanguageModel`] for every number of rows, segments and threads with [`Backend::Cpu`](crate::Backend::Cpu). With
/// `Backend::Composed` it runs on any device of candle, and does not promise that: candle's matrix products choose their
/// kernel by the number of rows.
#[derive(Debug, Clone)]
pub struct HybridModel {
    trunk: Arc<Trunk>,
    /// Rows of the head, where not all of them are wanted.
    head_rows: Option<Arc<Linear>>,
}

#[derive(Debug)]
struct Trunk {
    spec: ModelSpec,
    config: Config,
    embed: Linear,
    blocks: Vec<DecoderBlock>,
    norm: RmsNorm,
    /// Absent when the embedding is the head.
    head: Option<Linear>,
    rotary: Rotary,
}

impl HybridModel {
    /// Loads a checkpoint folder. `progress` is told how many of how many bytes are read.
    ///
    /// # Errors
    /// A configuration or a tensor that is missing, unknown or contradicts another: each is named.
    pub fn load(
        family: &dyn Family,
        folder: &Folder,
        options: &LoadOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> crate::Result<(Self, Inventory)> {
        let config = Config::from_json(family, folder.config(), folder.generation_config())?;
        let mut weights = Watched {
            weights: folder.weights()?,
            progress,
        };
        let model = Self::build(family, config, folder.fingerprint(), &mut weights, options)?;
        let inventory = weights.weights.finish()?;
        Ok((model, inventory))
    }

    /// Makes a model of weights from anywhere. `fingerprint` tells its caches from those of other weights.
    ///
    /// # Errors
    /// A tensor that is missing or of another shape, or a device that the backend does not run on.
    pub fn build(
        family: &dyn Family,
        config: Config,
        fingerprint: &str,
        source: &mut dyn Source,
        options: &LoadOptions,
    ) -> crate::Result<Self> {
        let mut assembly = Assembly::new(family, &config, options, source)?;
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        let embed = assembly.linear("embed_tokens.weight", vocab, hidden)?;
        let head = if config.tie.is_tied(assembly.has("lm_head.weight")) {
            assembly.discard("lm_head.weight");
            None
        } else {
            Some(assembly.linear("lm_head.weight", vocab, hidden)?)
        };
        let kinds = config.layer_kinds.iter().zip(&config.feed_forward);
        let blocks = kinds
            .enumerate()
            .map(|(layer, (kind, feed_forward))| {
                assembly.block(&format!("layers.{layer}"), *kind, feed_forward)
            })
            .collect::<crate::Result<Vec<_>>>()?;
        let norm = assembly.norm("norm.weight")?;
        let rotary = Rotary::new(config.rope_theta, config.rotary_dims)
            .map_err(|e| Error::part("rope_parameters", e))?;
        let spec = ModelSpec {
            family: family.name().to_owned(),
            vocab_size: config.vocab_size,
            hidden_size: config.hidden_size,
            max_positions: config.max_position_embeddings,
            eos: config.eos_token_ids.clone(),
            layout: Arc::new(StackLayout {
                fingerprint: fingerprint.to_owned(),
                layers: blocks.iter().map(DecoderBlock::layout).collect(),
                device: options.device.clone(),
            }),
        };
        Ok(Self {
            trunk: Arc::new(Trunk {
                spec,
                config,
                embed,
                blocks,
                norm,
                head,
                rotary,
            }),
            head_rows: None,
        })
    }

    /// The configuration it was made with.
    pub fn config(&self) -> &Config {
        &self.trunk.config
    }

    /// [`forward`](LanguageModel::forward), showing the residual stream after each layer: `[rows, hidden_size]`, the rows
    /// of all segments end to end.
    pub fn forward_observed(
        &self,
        batch: &mut [Segment<'_>],
        observe: &mut dyn FnMut(usize, &Tensor),
    ) -> Result<Output> {
        let trunk = &*self.trunk;
        trunk.spec.check(batch)?;
        let ids: Vec<u32> = batch.iter().flat_map(|s| s.tokens).copied().collect();
        let wanted: Vec<Wanted> = batch.iter().map(Wanted::of).collect();
        let cancels: Vec<Option<&Cancel>> = batch.iter().map(|s| s.cancel).collect();
        let mut x = trunk.embed.gather(&ids)?;
        {
            let mut sequences: Vec<Sequence<'_>> = batch.iter_mut().map(Sequence::of).collect();
            let positions: Vec<usize> = sequences
                .iter()
                .flat_map(|s| s.position..s.position + s.rows)
                .collect();
            let rotary = trunk.rotary.table(&positions, &trunk.spec.layout.device)?;
            for (layer, block) in trunk.blocks.iter().enumerate() {
                ModelSpec::check_wanted(&cancels)?;
                x = block.forward(&x, layer, &rotary, &mut sequences)?;
                observe(layer, &x);
            }
        }
        self.finish(&x, &wanted)
    }

    /// What gives logits.
    fn head(&self) -> &Linear {
        self.head_rows.as_deref().unwrap_or(self.trunk.head())
    }

    /// Norm and head for the rows that are wanted.
    fn finish(&self, x: &Tensor, wanted: &[Wanted]) -> Result<Output> {
        let rows: usize = wanted.iter().map(|w| w.normed).sum();
        let normed = match rows {
            0 => None,
            _ => {
                let rows = tails(x, wanted.iter().map(|w| (w.tokens, w.normed)))?;
                Some(self.trunk.norm.forward(&rows)?)
            }
        };
        let (mut at, mut at_normed) = (0, 0);
        let mut segments = Vec::with_capacity(wanted.len());
        for run in wanted.chunk_by(|a, b| a.readout == b.readout) {
            let mut read = self.read(normed.as_ref(), at_normed, run)?;
            for w in run {
                let (logits, largest) = read.next(w.logits)?;
                segments.push(SegmentOutput {
                    logits,
                    largest,
                    hidden: match (w.hidden, &normed) {
                        (Some(Hidden::PostNorm), Some(normed)) => {
                            Some(normed.narrow(0, at_normed, w.normed)?)
                        }
                        (Some(Hidden::PreNorm), _) => Some(x.narrow(0, at, w.tokens)?),
                        _ => None,
                    },
                });
                at += w.tokens;
                at_normed += w.normed;
            }
        }
        Ok(Output { segments })
    }

    /// What is wanted of the logits of segments that want the same of theirs, whose normed rows begin at `at`.
    fn read(&self, normed: Option<&Tensor>, at: usize, run: &[Wanted]) -> Result<Read> {
        let count: usize = run.iter().map(|w| w.normed).sum();
        let (Some(normed), true) = (normed, run.iter().any(|w| w.logits > 0)) else {
            return Ok(Read::Nothing);
        };
        let rows = normed.narrow(0, at, count)?;
        let rows = tails(&rows, run.iter().map(|w| (w.normed, w.logits)))?;
        Ok(match run[0].readout {
            Readout::All => Read::Logits(self.project(&rows)?, 0),
            Readout::Largest { count, among } => {
                Read::Largest(self.project_largest(&rows, count, among)?.into_iter())
            }
        })
    }
}

/// What was read of the rows of several segments, handed out segment by segment.
enum Read {
    Nothing,
    /// `[rows, vocab_size]`, and how many rows are handed out.
    Logits(Tensor, usize),
    Largest(std::vec::IntoIter<Vec<Candidate>>),
}

impl Read {
    /// The next segment's, of so many rows.
    #[expect(clippy::type_complexity, reason = "two fields of `SegmentOutput`")]
    fn next(&mut self, rows: usize) -> Result<(Option<Tensor>, Option<Vec<Vec<Candidate>>>)> {
        Ok(match self {
            _ if rows == 0 => (None, None),
            Self::Nothing => (None, None),
            Self::Logits(logits, at) => {
                let own = logits.narrow(0, *at, rows)?;
                *at += rows;
                (Some(own), None)
            }
            Self::Largest(found) => (None, Some(found.by_ref().take(rows).collect())),
        })
    }
}

impl Trunk {
    fn head(&self) -> &Linear {
        self.head.as_ref().unwrap_or(&self.embed)
    }
}

impl LanguageModel for HybridModel {
    fn spec(&self) -> &ModelSpec {
        &self.trunk.spec
    }

    fn forward(&self, batch: &mut [Segment<'_>]) -> Result<Output> {
        self.forward_observed(batch, &mut |_, _| {})
    }

    fn embed(&self, ids: &[u32]) -> Result<Tensor> {
        Ok(self.trunk.embed.gather(ids)?)
    }

    fn project(&self, hidden: &Tensor) -> Result<Tensor> {
        Ok(self.head().forward(hidden)?)
    }

    fn project_largest(&self, hidden: &Tensor, count: usize, among: usize) -> Result<Vec<Vec<Candidate>>> {
        Ok(self.head().largest(hidden, count, among)?)
    }

    fn with_head_rows(&self, ids: &[u32]) -> Result<Arc<dyn LanguageModel>> {
        Ok(Arc::new(Self {
            trunk: Arc::clone(&self.trunk),
            head_rows: Some(Arc::new(self.trunk.head().select(ids)?)),
        }))
    }
}

/// How many of a segment's newest rows are wanted.
struct Wanted {
    tokens: usize,
    normed: usize,
    logits: usize,
    readout: Readout,
    hidden: Option<Hidden>,
}

impl Wanted {
    fn of(segment: &Segment<'_>) -> Self {
        let tokens = segment.tokens.len();
        let logits = segment.logits.count(tokens);
        Self {
            tokens,
            normed: if segment.hidden == Some(Hidden::PostNorm) {
                Rows::All.count(tokens)
            } else {
                logits
            },
            logits,
            readout: segment.readout,
            hidden: segment.hidden,
        }
    }
}

/// The newest rows of each run: `runs` gives for each its rows in `x` and how many of them are taken.
fn tails(x: &Tensor, runs: impl Iterator<Item = (usize, usize)>) -> Result<Tensor> {
    let mut start = 0;
    let mut taken = Vec::new();
    for (rows, count) in runs {
        if count > 0 {
            taken.push(x.narrow(0, start + rows - count, count)?);
        }
        start += rows;
    }
    match taken.as_slice() {
        [one] => Ok(one.clone()),
        all => Ok(Tensor::cat(all, 0)?),
    }
}

/// A checkpoint's weights, with somebody watching.
struct Watched<'a, 'f> {
    weights: Weights<'f>,
    progress: &'a mut dyn FnMut(u64, u64),
}

impl<'f> Watched<'_, 'f> {
    /// Takes something, and says how far things are.
    fn take<T>(&mut self, take: impl FnOnce(&mut Weights<'f>) -> T) -> T {
        let taken = take(&mut self.weights);
        (self.progress)(self.weights.bytes_taken(), self.weights.bytes_total());
        taken
    }
}

impl Source for Watched<'_, '_> {
    fn has(&self, name: &str) -> bool {
        self.weights.has(name)
    }

    fn take(&mut self, name: &str, shape: &[usize]) -> recant_weights::Result<Tensor> {
        self.take(|weights| weights.take(name, shape))
    }

    fn take_matrix(&mut self, name: &str, shape: [usize; 2]) -> recant_weights::Result<Stored> {
        self.take(|weights| weights.take_matrix(name, shape))
    }

    fn take_stacked(
        &mut self,
        name: &str,
        shape: [usize; 3],
        index: usize,
    ) -> recant_weights::Result<Stored> {
        self.take(|weights| weights.take_stacked(name, shape, index))
    }

    fn norms(&self) -> Norms {
        self.weights.norms()
    }

    fn discard(&mut self, name: &str) {
        self.weights.discard(name);
    }
}
