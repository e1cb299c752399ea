//! `config.json`, checked: what the families have in common. What only one of them has, [`Family`] reads.

mod error;
mod fields;
mod rope;

use std::collections::BTreeSet;

use recant_kernels::{GatedDeltaShape, MoeShape};
use serde_json::Value;

use crate::Family;

pub use error::ConfigError;
use fields::shown;
pub use fields::Fields;

/// Bounds on single sizes, far above any real model, that keep a corrupt file from asking for absurd allocations.
const MAX_HEADS: usize = 1 << 16;
const MAX_HEAD_DIM: usize = 1 << 16;
const MAX_LAYERS: usize = 1 << 12;
const MAX_TAPS: usize = 1 << 10;
const MAX_POSITIONS: usize = 1 << 31;
/// Bound on the elements of one matrix. The largest published one has 2^31. Several such rows of 8 bytes an element
/// still fit an `isize`.
const MAX_ELEMENTS: u64 = if isize::BITS >= 64 {
    1 << 36
} else {
    isize::MAX as u64 / 64
};

type Result<T> = std::result::Result<T, ConfigError>;

/// What mixes tokens in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LayerKind {
    /// A Gated DeltaNet layer, `linear_attention`.
    Linear,
    /// A full attention layer, `full_attention`.
    Full,
}

/// Whether the embedding matrix is also the output head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tie {
    /// The embedding is the head. A `lm_head.weight` in the checkpoint is a copy and not used.
    Tied,
    /// The head is `lm_head.weight`, which must exist.
    Untied,
    /// Root and text part of the configuration contradict each other: the checkpoint decides.
    Conflict,
}

impl Tie {
    /// Whether the embedding is the head, given whether the checkpoint has a `lm_head.weight`.
    pub fn is_tied(self, has_lm_head: bool) -> bool {
        match self {
            Self::Tied => true,
            Self::Untied => false,
            Self::Conflict => !has_lm_head,
        }
    }
}

/// What follows the mixer in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FeedForward {
    /// One MLP.
    Dense {
        /// Width inside it.
        width: usize,
    },
    /// A mixture of experts, with one that all rows share.
    Sparse {
        /// Sizes of the mixture.
        shape: MoeShape,
        /// Width inside the shared expert.
        shared_width: usize,
    },
}

/// The configuration of a hybrid language model, checked for coherence.
///
/// The sizes of every tensor and of every state follow from it without overflow: a matrix has at most 2^36 elements.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Config {
    /// Width of the residual stream, H.
    pub hidden_size: usize,
    /// Layers; the length of [`layer_kinds`](Self::layer_kinds) and [`feed_forward`](Self::feed_forward).
    pub num_hidden_layers: usize,
    /// Query heads of a full attention layer, a multiple of the key/value heads.
    pub num_attention_heads: usize,
    /// Key/value heads of a full attention layer.
    pub num_key_value_heads: usize,
    /// Width of a head of a full attention layer. Not `hidden_size / num_attention_heads`.
    pub head_dim: usize,
    /// Key heads of a linear layer.
    pub linear_num_key_heads: usize,
    /// Value heads of a linear layer, a multiple of its key heads.
    pub linear_num_value_heads: usize,
    /// Width of a key head of a linear layer.
    pub linear_key_head_dim: usize,
    /// Width of a value head of a linear layer.
    pub linear_value_head_dim: usize,
    /// Taps of a linear layer's convolution, at least 2.
    pub linear_conv_kernel_dim: usize,
    /// Rows of the embedding; more than there are tokens in published models.
    pub vocab_size: usize,
    /// Epsilon of the RMS norms.
    pub rms_norm_eps: f64,
    /// Longest sequence, in tokens.
    pub max_position_embeddings: usize,
    /// The kind of each layer.
    pub layer_kinds: Vec<LayerKind>,
    /// What follows the mixer of each layer.
    pub feed_forward: Vec<FeedForward>,
    /// Whether the projections of full attention have biases.
    pub attention_bias: bool,
    /// Whether the query projection of full attention also gives an output gate. True in every published model.
    pub attn_output_gate: bool,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Leading dimensions of a head that are rotated: even, at least 2, at most `head_dim`.
    pub rotary_dims: usize,
    /// Whether the embedding is also the output head.
    pub tie: Tie,
    /// Ids that end a text: the union of what `config.json` and `generation_config.json` say, sorted, each once.
    /// Empty where neither says anything. The tokenizer's own is not among them.
    pub eos_token_ids: Vec<u32>,
    /// Contradictions that were settled by a rule, in words for the user.
    pub warnings: Vec<String>,
}

impl FeedForward {
    /// A dense layer, as wide as `intermediate_size` says.
    ///
    /// # Errors
    /// The field is missing or out of range.
    pub fn dense(text: &Fields<'_>) -> Result<Self> {
        Ok(Self::Dense {
            width: text.required_width("intermediate_size", 1)?,
        })
    }

    /// A mixture of experts. Weights are renormalized unless `norm_topk_prob` is false.
    ///
    /// # Errors
    /// A field is missing or out of range, or rows go to more experts than there are.
    pub fn sparse(text: &Fields<'_>) -> Result<Self> {
        let shape = MoeShape {
            hidden_size: text.required_width("hidden_size", 1)?,
            width: text.required_width("moe_intermediate_size", 1)?,
            experts: text.required_width("num_experts", 1)?,
            top_k: text.required_width("num_experts_per_tok", 1)?,
            renormalize: text.flag("norm_topk_prob")?.unwrap_or(true),
        };
        if shape.top_k > shape.experts {
            return Err(ConfigError::Incoherent {
                what: format!(
                    "{} is {} and {} is {}",
                    text.path("num_experts_per_tok"),
                    shape.top_k,
                    text.path("num_experts"),
                    shape.experts
                ),
                expected: "a token cannot go to more experts than there are".to_owned(),
            });
        }
        Ok(Self::Sparse {
            shape,
            shared_width: text.required_width("shared_expert_intermediate_size", 1)?,
        })
    }
}

impl Config {
    /// Reads `config.json`, and `generation_config.json` where there is one.
    ///
    /// The text fields are those of `text_config` where there is one, else those of the root. A null is an absent
    /// field. Fields that are not known are ignored; fields that are known to change what a model computes are not.
    ///
    /// # Errors
    ///
    /// Another model type; a field that is missing, of the wrong type or out of range; sizes that do not fit each
    /// other; arithmetic that is not implemented here. Each names the field.
    pub fn from_json(family: &dyn Family, config: &Value, generation: Option<&Value>) -> Result<Self> {
        let root = Fields::root("config.json", config, "")?;
        let nested = root.object("text_config")?;
        let text = nested.as_ref().unwrap_or(&root);
        check_model_type(family, &root, nested.as_ref())?;
        refuse_other_arithmetic(text)?;

        let mut warnings = Vec::new();
        if nested.is_some() {
            warn_of_two_places(&root, text, &mut warnings);
        }
        let head_dim = text.size("head_dim", 1, MAX_HEAD_DIM)?.ok_or_else(|| {
            text.missing(
                "head_dim",
                "the width of an attention head, which cannot be derived from hidden_size",
            )
        })?;
        let rope = rope::read(text, head_dim, &mut warnings)?;
        let vocab_size = text.required_width("vocab_size", 1)?;
        let eos_token_ids = eos_token_ids(&root, text, generation)?;
        warn_of_unused_values(text, &eos_token_ids, vocab_size, &mut warnings);
        let num_hidden_layers = text.required_size("num_hidden_layers", 1, MAX_LAYERS)?;
        let config = Self {
            hidden_size: text.required_width("hidden_size", 1)?,
            num_hidden_layers,
            num_attention_heads: text.required_size("num_attention_heads", 1, MAX_HEADS)?,
            num_key_value_heads: text.required_size("num_key_value_heads", 1, MAX_HEADS)?,
            head_dim,
            linear_num_key_heads: text.required_size("linear_num_key_heads", 1, MAX_HEADS)?,
            linear_num_value_heads: text.required_size("linear_num_value_heads", 1, MAX_HEADS)?,
            linear_key_head_dim: text.required_size("linear_key_head_dim", 1, MAX_HEAD_DIM)?,
            linear_value_head_dim: text.required_size("linear_value_head_dim", 1, MAX_HEAD_DIM)?,
            linear_conv_kernel_dim: text.size("linear_conv_kernel_dim", 2, MAX_TAPS)?.unwrap_or(4),
            vocab_size,
            rms_norm_eps: text.positive("rms_norm_eps", 1.0)?.unwrap_or(1e-6),
            max_position_embeddings: text.required_size("max_position_embeddings", 1, MAX_POSITIONS)?,
            layer_kinds: layer_kinds(text, num_hidden_layers)?,
            feed_forward: family.feed_forward(text, num_hidden_layers)?,
            attention_bias: text.flag("attention_bias")?.unwrap_or(false),
            attn_output_gate: text.flag("attn_output_gate")?.unwrap_or(true),
            rope_theta: rope.theta,
            rotary_dims: rope.dims,
            tie: tie(&root, nested.as_ref(), &mut warnings)?,
            eos_token_ids,
            warnings,
        };
        config.check_coherence(text)?;
        config.check_products(text)?;
        Ok(config)
    }

    /// Shape of a linear layer.
    pub fn delta_shape(&self) -> GatedDeltaShape {
        GatedDeltaShape {
            key_heads: self.linear_num_key_heads,
            value_heads: self.linear_num_value_heads,
            key_dim: self.linear_key_head_dim,
            value_dim: self.linear_value_head_dim,
            conv_kernel: self.linear_conv_kernel_dim,
            eps: self.rms_norm_eps,
        }
    }

    /// Channels of a linear layer's convolution: queries, keys, values.
    pub fn linear_channels(&self) -> usize {
        2 * self.linear_num_key_heads * self.linear_key_head_dim
            + self.linear_num_value_heads * self.linear_value_head_dim
    }

    fn check_coherence(&self, text: &Fields<'_>) -> Result<()> {
        let multiples = [
            (
                "num_attention_heads",
                self.num_attention_heads,
                "num_key_value_heads",
                self.num_key_value_heads,
            ),
            (
                "linear_num_value_heads",
                self.linear_num_value_heads,
                "linear_num_key_heads",
                self.linear_num_key_heads,
            ),
        ];
        for (many, n, few, of) in multiples {
            if n % of != 0 {
                return Err(ConfigError::Incoherent {
                    what: format!("{} is {n} and {} is {of}", text.path(many), text.path(few)),
                    expected: "the first must be a multiple of the second".to_owned(),
                });
            }
        }
        Ok(())
    }

    /// Refuses sizes whose products no machine could hold, so that nobody after this has to check a multiplication.
    fn check_products(&self, text: &Fields<'_>) -> Result<()> {
        let mut matrices = vec![
            (
                "num_attention_heads x head_dim",
                self.num_attention_heads,
                self.head_dim,
            ),
            (
                "linear_num_key_heads x linear_key_head_dim",
                self.linear_num_key_heads,
                self.linear_key_head_dim,
            ),
            (
                "linear_num_value_heads x linear_value_head_dim",
                self.linear_num_value_heads,
                self.linear_value_head_dim,
            ),
            ("vocab_size", self.vocab_size, 1),
        ];
        for feed_forward in &self.feed_forward {
            match *feed_forward {
                FeedForward::Dense { width } => matrices.push(("intermediate_size", width, 1)),
                FeedForward::Sparse { shape, shared_width } => matrices.extend([
                    (
                        "num_experts x 2 moe_intermediate_size",
                        shape.experts,
                        2 * shape.width,
                    ),
                    ("shared_expert_intermediate_size", shared_width, 1),
                ]),
            }
        }
        // A row meets the residual stream in a projection, a key in the state, the taps in a convolution.
        let widest = self
            .hidden_size
            .max(self.linear_key_head_dim)
            .max(self.linear_conv_kernel_dim);
        for (what, rows, width) in matrices {
            let elements = [width, widest]
                .iter()
                .fold(rows as u64, |product, &size| product.saturating_mul(size as u64));
            if elements > MAX_ELEMENTS {
                return Err(ConfigError::Incoherent {
                    what: format!(
                        "{} by a width of {widest} makes a matrix of {elements} elements",
                        text.path(what)
                    ),
                    expected: format!("expected at most {MAX_ELEMENTS}, which is more than any model has"),
                });
            }
        }
        Ok(())
    }
}

/// Warns where the root repeats a size of the text part with another value. The text part's is used.
fn warn_of_two_places(root: &Fields<'_>, text: &Fields<'_>, warnings: &mut Vec<String>) {
    for name in [
        "hidden_size",
        "intermediate_size",
        "num_experts",
        "num_experts_per_tok",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "rms_norm_eps",
        "rope_theta",
    ] {
        if let (Some(outer), Some(inner)) = (root.get(name), text.get(name)) {
            if outer != inner {
                warnings.push(format!(
                    "{} is {} and {} is {}; the first is used",
                    text.path(name),
                    shown(inner),
                    root.path(name),
                    shown(outer)
                ));
            }
        }
    }
}

fn warn_of_unused_values(text: &Fields<'_>, eos: &[u32], vocab_size: usize, warnings: &mut Vec<String>) {
    if let Some(dtype) = text.get("mamba_ssm_dtype").filter(|dtype| **dtype != "float32") {
        warnings.push(format!(
            "{} is {}; the recurrent state is kept in float32",
            text.path("mamba_ssm_dtype"),
            shown(dtype)
        ));
    }
    for id in eos.iter().filter(|id| **id as usize >= vocab_size) {
        warnings.push(format!(
            "eos_token_id names {id}, which a model with {vocab_size} tokens never gives"
        ));
    }
}

fn check_model_type(family: &dyn Family, root: &Fields<'_>, nested: Option<&Fields<'_>>) -> Result<()> {
    let supported = family.model_types().join(", ");
    let kind = root
        .text("model_type")?
        .ok_or_else(|| root.missing("model_type", format!("one of {supported}")))?;
    let inner = match nested {
        Some(text) => text.text("model_type")?.map(|kind| (text, kind)),
        None => None,
    };
    for (fields, kind) in [(root, kind)].into_iter().chain(inner) {
        if !family.model_types().contains(&kind) {
            return Err(ConfigError::ModelType {
                field: fields.path("model_type"),
                found: shown(&Value::from(kind)),
                supported,
            });
        }
    }
    Ok(())
}

/// Refuses every field that is known to change what the model computes in a way that is not implemented.
fn refuse_other_arithmetic(text: &Fields<'_>) -> Result<()> {
    for (name, wanted) in [
        ("layer_scale", false),
        ("is_causal", true),
        ("mtp_use_dedicated_embeddings", false),
    ] {
        if let Some(flag) = text.flag(name)? {
            if flag != wanted {
                return Err(text.unsupported(name, &format!("{wanted}, or no such field")));
            }
        }
    }
    for name in ["attn_logit_softcapping", "sliding_window"] {
        if text.get(name).is_some() {
            return Err(text.unsupported(name, "null, or no such field"));
        }
    }
    for (name, known) in [
        ("hidden_act", &["silu"][..]),
        ("output_gate_type", &["swish", "silu"]),
    ] {
        if let Some(kind) = text.text(name)? {
            if !known.contains(&kind) {
                return Err(text.unsupported(name, &format!("{}, or no such field", known.join(" or "))));
            }
        }
    }
    Ok(())
}

fn layer_kinds(text: &Fields<'_>, layers: usize) -> Result<Vec<LayerKind>> {
    let interval = text.width("full_attention_interval", 1)?.unwrap_or(4);
    let Some(value) = text.get("layer_types") else {
        return Ok((1..=layers)
            .map(|nth| {
                if nth % interval == 0 {
                    LayerKind::Full
                } else {
                    LayerKind::Linear
                }
            })
            .collect());
    };
    let list = value
        .as_array()
        .ok_or_else(|| text.wrong("layer_types", value, "a list with the kind of each layer"))?;
    if list.len() != layers {
        return Err(ConfigError::Incoherent {
            what: format!(
                "{} has {} entries and {} is {layers}",
                text.path("layer_types"),
                list.len(),
                text.path("num_hidden_layers")
            ),
            expected: "expected one entry a layer".to_owned(),
        });
    }
    list.iter()
        .enumerate()
        .map(|(layer, kind)| match kind.as_str() {
            Some("linear_attention") => Ok(LayerKind::Linear),
            Some("full_attention") => Ok(LayerKind::Full),
            _ => Err(text.wrong(
                &format!("layer_types[{layer}]"),
                kind,
                "\"linear_attention\" or \"full_attention\"",
            )),
        })
        .collect()
}

fn tie(root: &Fields<'_>, nested: Option<&Fields<'_>>, warnings: &mut Vec<String>) -> Result<Tie> {
    const NAME: &str = "tie_word_embeddings";
    let outer = root.flag(NAME)?;
    let inner = nested.map(|text| text.flag(NAME)).transpose()?.flatten();
    Ok(match (inner, outer) {
        (Some(inner), Some(outer)) if inner != outer => {
            warnings.push(format!(
                "text_config.{NAME} is {inner} and {NAME} is {outer}; the output head is lm_head.weight if the \
                 checkpoint has one, else the embedding"
            ));
            Tie::Conflict
        }
        (Some(true), _) | (None, Some(true)) => Tie::Tied,
        _ => Tie::Untied,
    })
}

fn eos_token_ids(root: &Fields<'_>, text: &Fields<'_>, generation: Option<&Value>) -> Result<Vec<u32>> {
    const NAME: &str = "eos_token_id";
    let mut ids: BTreeSet<u32> = text.token_ids(NAME)?.into_iter().collect();
    ids.extend(root.token_ids(NAME)?);
    if let Some(generation) = generation.filter(|value| !value.is_null()) {
        let generation = Fields::root("generation_config.json", generation, "generation_config.json: ")?;
        ids.extend(generation.token_ids(NAME)?);
    }
    Ok(ids.into_iter().collect())
}
