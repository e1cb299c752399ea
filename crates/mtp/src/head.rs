//! The head itself.

use std::sync::Arc;

use recant_core::candle::Tensor;
use recant_core::{Cache, CacheOptions, CacheStack, LanguageModel, StackLayout};
use recant_kernels::{Linear, Rotary};
use recant_layers::{
    Assembly, DecoderBlock, Family, FeedForward, HybridModel, LayerKind, LoadOptions, RmsNorm, Sequence,
};
use recant_weights::{Folder, Norms, Weights};

use crate::{Error, Result};

/// The head of one target. Clones share the weights.
#[derive(Debug, Clone)]
pub struct MtpHead {
    target: HybridModel,
    parts: Arc<Parts>,
}

#[derive(Debug)]
struct Parts {
    fc: Linear,
    /// Whether `fc` takes [hidden, embedding].
    swapped: bool,
    norm_embedding: RmsNorm,
    norm_hidden: RmsNorm,
    block: DecoderBlock,
    norm: RmsNorm,
    rotary: Rotary,
    layout: Arc<StackLayout>,
}

impl MtpHead {
    /// Loads the head in `folder` for `target`: the folder of the target itself, or one that holds a head alone.
    ///
    /// # Errors
    /// There is no head, a tensor of it is missing, left over or misshaped, or it belongs to a model of another shape.
    pub fn load(
        family: &dyn Family,
        target: &HybridModel,
        folder: &Folder,
        options: &LoadOptions,
    ) -> Result<Self> {
        Self::load_as(family, target, folder, options, Reading::default())
    }

    /// Reads a head's tensors in a given way.
    pub(crate) fn load_as(
        family: &dyn Family,
        target: &HybridModel,
        folder: &Folder,
        options: &LoadOptions,
        reading: Reading,
    ) -> Result<Self> {
        fits(target, folder)?;
        let Some(head) = folder.mtp()? else {
            return Err(Error::Absent {
                folder: folder.path().to_owned(),
                promised: promise(folder),
            });
        };
        let mut weights = match (reading.other_norms, head.norms()) {
            (false, norms) => head.with_norms(norms),
            (true, Norms::ZeroCentred) => head.with_norms(Norms::OnePlus),
            (true, Norms::OnePlus) => head.with_norms(Norms::ZeroCentred),
        };
        let parts = parts(family, target, folder, options, &mut weights, reading.swapped)?;
        weights.finish()?;
        Ok(Self {
            target: target.clone(),
            parts: Arc::new(parts),
        })
    }

    /// The model it drafts for.
    pub fn target(&self) -> &HybridModel {
        &self.target
    }

    /// Empty caches for one sequence: keys and values of one layer.
    pub fn new_caches(&self) -> Result<CacheStack> {
        Ok(CacheStack::standard(
            Arc::clone(&self.parts.layout),
            &CacheOptions::default(),
        )?)
    }

    /// Runs the pairs (hidden row, token after it) at the positions that follow what `caches` hold, and gives for each the
    /// row that the target's head turns into a guess.
    ///
    /// # Shapes
    /// `hidden`: `[tokens, hidden_size]`. Result: the same.
    ///
    /// # Errors
    /// Another number or width of rows, a token outside the vocabulary, or caches of another head. The caches are then as
    /// they were, unless a cache from elsewhere failed midway.
    pub fn forward(&self, hidden: &Tensor, tokens: &[u32], caches: &mut CacheStack) -> Result<Tensor> {
        let parts = &*self.parts;
        let spec = self.target.spec();
        caches.belongs_to(&parts.layout)?;
        if hidden.dims() != [tokens.len(), spec.hidden_size] || tokens.is_empty() {
            return Err(recant_core::Error::mismatch(
                "hidden rows for the multi-token-prediction head",
                format!("one of {} for each of {} tokens", spec.hidden_size, tokens.len()),
                format!("{:?}", hidden.dims()),
            )
            .into());
        }
        caches.admit(tokens.len())?;
        let embedded = parts.norm_embedding.forward(&self.target.embed(tokens)?)?;
        let hidden = parts.norm_hidden.forward(&hidden.contiguous()?)?;
        let both = match parts.swapped {
            false => Tensor::cat(&[embedded, hidden], 1)?,
            true => Tensor::cat(&[hidden, embedded], 1)?,
        };
        let x = parts.fc.forward(&both).map_err(recant_core::Error::from)?;
        let start = caches.len();
        let positions: Vec<usize> = (start..start + tokens.len()).collect();
        let rotary = parts
            .rotary
            .table(&positions, &spec.layout.device)
            .map_err(recant_core::Error::from)?;
        let sequence = Sequence {
            rows: tokens.len(),
            position: start,
            caches,
        };
        let y = parts.block.forward(&x, 0, &rotary, &mut [sequence])?;
        Ok(parts.norm.forward(&y)?)
    }
}

fn parts(
    family: &dyn Family,
    target: &HybridModel,
    folder: &Folder,
    options: &LoadOptions,
    source: &mut Weights<'_>,
    swapped: bool,
) -> Result<Parts> {
    let config = target.config();
    let hidden = config.hidden_size;
    let mut assembly = Assembly::new(family, config, options, source)?;
    let fc = assembly.linear("fc.weight", hidden, 2 * hidden)?;
    let norm_embedding = assembly.norm("pre_fc_norm_embedding.weight")?;
    let norm_hidden = assembly.norm("pre_fc_norm_hidden.weight")?;
    let block = assembly.block("layers.0", LayerKind::Full, feed_forward(&config.feed_forward))?;
    let norm = assembly.norm("norm.weight")?;
    let rotary = Rotary::new(config.rope_theta, config.rotary_dims).map_err(recant_core::Error::from)?;
    let layout = StackLayout {
        fingerprint: format!(
            "{} with head {}",
            target.spec().layout.fingerprint,
            folder.fingerprint()
        ),
        layers: vec![block.layout()],
        device: options.device.clone(),
    };
    Ok(Parts {
        fc,
        swapped,
        norm_embedding,
        norm_hidden,
        block,
        norm,
        rotary,
        layout: Arc::new(layout),
    })
}

/// A mixture of experts wherever the trunk has one in any layer.
fn feed_forward(trunk: &[FeedForward]) -> &FeedForward {
    trunk
        .iter()
        .find(|layer| !matches!(layer, FeedForward::Dense { .. }))
        .unwrap_or(&trunk[0])
}

/// Refuses a head published alone whose configuration is that of another model.
fn fits(target: &HybridModel, folder: &Folder) -> Result<()> {
    let config = target.config();
    let text = &folder.config()["text_config"];
    let text = if text.is_object() { text } else { folder.config() };
    for (field, want) in [
        ("hidden_size", config.hidden_size),
        ("vocab_size", config.vocab_size),
        ("num_attention_heads", config.num_attention_heads),
        ("num_key_value_heads", config.num_key_value_heads),
        ("head_dim", config.head_dim),
    ] {
        let found = &text[field];
        if !found.is_null() && found.as_u64() != Some(want as u64) {
            return Err(Error::Fit {
                folder: folder.path().to_owned(),
                field,
                head: found.to_string(),
                target: want.to_string(),
            });
        }
    }
    Ok(())
}

/// What a configuration says of a head that is not there.
fn promise(folder: &Folder) -> String {
    let config = folder.config();
    let layers = [&config["text_config"], config]
        .into_iter()
        .find_map(|part| part["mtp_num_hidden_layers"].as_u64())
        .unwrap_or(0);
    match layers {
        0 => String::new(),
        n => format!(", though config.json says mtp_num_hidden_layers {n}; many conversions drop them"),
    }
}

/// How a head's tensors are to be read, where not as its layout asks.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Reading {
    /// Norms stored the other way.
    pub(crate) other_norms: bool,
    /// The fusion matrix for [hidden, embedding].
    pub(crate) swapped: bool,
}
