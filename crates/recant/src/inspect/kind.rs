//! What a tensor is, by its canonical name.

use recant_weights::Part;
use serde::Serialize;

/// What a tensor belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ModuleKind {
    /// The embedding, and where there is no output head the head too.
    Embedding,
    /// Gated DeltaNet layers.
    LinearAttention,
    /// Full attention layers.
    FullAttention,
    /// MLPs, those that all tokens of a mixture share included.
    Mlp,
    /// Experts.
    Experts,
    /// Routers and gates.
    Gates,
    /// Norms.
    Norms,
    /// The output head.
    Head,
    /// The multi-token-prediction head.
    Mtp,
    /// The vision tower.
    Vision,
    /// Nothing that is known.
    Unknown,
}

impl ModuleKind {
    pub(super) fn of(part: Part<'_>) -> Self {
        let name = match part {
            Part::Text(name) => name,
            Part::Mtp(_) => return Self::Mtp,
            Part::Vision => return Self::Vision,
            _ => return Self::Unknown,
        };
        let has = |part: &str| name.contains(part);
        if has("embed_tokens.") {
            Self::Embedding
        } else if name.starts_with("lm_head.") {
            Self::Head
        } else if has(".mlp.gate.") || has(".shared_expert_gate.") {
            Self::Gates
        } else if has(".mlp.experts.") || has(".switch_mlp.") {
            Self::Experts
        } else if has(".mlp.") {
            Self::Mlp
        } else if has(".linear_attn.") {
            Self::LinearAttention
        } else if has(".self_attn.") {
            Self::FullAttention
        } else if has("norm.") {
            Self::Norms
        } else {
            Self::Unknown
        }
    }

    /// A few words for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Embedding => "embedding",
            Self::LinearAttention => "linear attention",
            Self::FullAttention => "full attention",
            Self::Mlp => "mlp",
            Self::Experts => "experts",
            Self::Gates => "gates",
            Self::Norms => "norms",
            Self::Head => "output head",
            Self::Mtp => "mtp head",
            Self::Vision => "vision tower",
            Self::Unknown => "unknown",
        }
    }
}
