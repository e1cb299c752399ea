//! Metadata to the configuration that a Hub folder of the same model has.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{json, Map};

use super::header::{Array, Kind, Value};
use super::heads::Heads;
use crate::error::{clipped, Error, Result};

/// Architectures, and the model types of the same models.
const FAMILIES: [(&str, &str); 3] = [
    ("qwen35", "qwen3_5"),
    ("qwen35moe", "qwen3_5_moe"),
    ("qwen3next", "qwen3_next"),
];
/// Bound on heads and widths, so that their products fit. Far above any real model.
const MAX_SIZE: u64 = 1 << 20;

/// The metadata of a file.
#[derive(Clone, Copy)]
pub(crate) struct Metadata<'a> {
    pub(super) file: &'a Path,
    pub(super) values: &'a BTreeMap<String, Value>,
    /// The bytes that arrays lie in.
    pub(super) bytes: &'a [u8],
}

impl<'a> Metadata<'a> {
    pub(super) fn wrong(&self, key: &str, expected: &str, found: &str) -> Error {
        Error::GgufKey {
            file: self.file.to_owned(),
            key: key.to_owned(),
            expected: expected.to_owned(),
            found: clipped(found),
        }
    }

    fn mistyped(&self, key: &str, expected: &str, found: &Value) -> Error {
        self.wrong(key, expected, &described(found))
    }

    /// A whole number.
    pub(super) fn number(&self, key: &str) -> Result<Option<u64>> {
        const EXPECTED: &str = "a whole number of at least 0";
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Unsigned(x)) => Ok(Some(*x)),
            Some(Value::Signed(x)) if *x >= 0 => Ok(Some(x.unsigned_abs())),
            Some(other) => Err(self.mistyped(key, EXPECTED, other)),
        }
    }

    /// A whole number, or one for each layer, of which those that are not zero agree.
    fn number_of_layers(&self, key: &str) -> Result<Option<u64>> {
        let Some(Value::Array(array)) = self.values.get(key) else {
            return self.number(key);
        };
        let mut numbers: Vec<i64> = array.numbers(self.bytes).collect();
        if numbers.len() < array.count {
            return Err(self.mistyped(key, "whole numbers", &Value::Array(array.clone())));
        }
        numbers.retain(|x| *x != 0);
        numbers.dedup();
        match numbers[..] {
            [] => Ok(None),
            [only] if only > 0 => Ok(Some(only.unsigned_abs())),
            _ => Err(self.wrong(
                key,
                "the same number for all layers that have any",
                "different ones",
            )),
        }
    }

    fn required(&self, key: &str) -> Result<u64> {
        self.number_of_layers(key)?
            .ok_or_else(|| self.wrong(key, "a whole number", "nothing"))
    }

    /// A size that can be multiplied with others.
    fn size(&self, key: &str) -> Result<usize> {
        let found = self.required(key)?;
        if found == 0 || found > MAX_SIZE {
            return Err(self.wrong(key, &format!("a number from 1 to {MAX_SIZE}"), &found.to_string()));
        }
        Ok(found as usize)
    }

    fn float(&self, key: &str) -> Result<Option<f64>> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Float(x)) if x.is_finite() => Ok(Some(*x)),
            Some(other) => Err(self.mistyped(key, "a finite number", other)),
        }
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Text(text)) => Ok(Some(text)),
            Some(other) => Err(self.mistyped(key, "a text", other)),
        }
    }

    /// An array of elements of one of some kinds.
    pub(super) fn array(&self, key: &str, kinds: &[Kind], expected: &str) -> Result<Option<&'a Array>> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Array(array)) if array.count == 0 || kinds.contains(&array.kind) => Ok(Some(array)),
            Some(other) => Err(self.mistyped(key, expected, other)),
        }
    }
}

fn described(value: &Value) -> String {
    match value {
        Value::Unsigned(x) => x.to_string(),
        Value::Signed(x) => x.to_string(),
        Value::Float(x) => x.to_string(),
        Value::Bool(x) => x.to_string(),
        Value::Text(x) => format!("{x:?}"),
        Value::Array(x) => format!("an array of {} {:?} elements", x.count, x.kind),
    }
}

/// What the metadata says of a model's blocks.
pub(super) struct Model {
    pub(super) architecture: &'static str,
    model_type: &'static str,
    /// Blocks before those of a multi-token-prediction head.
    pub(super) trunk: usize,
    pub(super) blocks: usize,
}

impl Model {
    pub(super) fn read(metadata: Metadata<'_>) -> Result<Self> {
        const KEY: &str = "general.architecture";
        let found = metadata
            .text(KEY)?
            .ok_or_else(|| metadata.wrong(KEY, "a text", "nothing"))?;
        let Some((architecture, model_type)) = FAMILIES.into_iter().find(|(name, _)| *name == found) else {
            let supported = FAMILIES.map(|(name, _)| name).join(", ");
            return Err(metadata.wrong(KEY, &format!("one of {supported}"), found));
        };
        let blocks = metadata.size(&format!("{architecture}.block_count"))?;
        let key = format!("{architecture}.nextn_predict_layers");
        let heads = metadata.number(&key)?.unwrap_or(0);
        let trunk = usize::try_from(heads)
            .ok()
            .and_then(|heads| blocks.checked_sub(heads))
            .filter(|trunk| *trunk > 0)
            .ok_or_else(|| {
                metadata.wrong(
                    &key,
                    &format!("less than the {blocks} blocks"),
                    &heads.to_string(),
                )
            })?;
        Ok(Self {
            architecture,
            model_type,
            trunk,
            blocks,
        })
    }

    /// The value heads of linear layers.
    pub(super) fn heads(&self, metadata: Metadata<'_>) -> Result<Heads> {
        let size = |name: &str| metadata.size(&format!("{}.ssm.{name}", self.architecture));
        let (keys, values) = (size("group_count")?, size("time_step_rank")?);
        let inner = size("inner_size")?;
        for (name, of, what) in [("time_step_rank", values, keys), ("inner_size", inner, values)] {
            if of % what != 0 {
                return Err(metadata.wrong(
                    &format!("{}.ssm.{name}", self.architecture),
                    &format!("a multiple of {what}"),
                    &of.to_string(),
                ));
            }
        }
        Ok(Heads {
            keys,
            values,
            key_dim: size("state_size")?,
            value_dim: inner / values,
            dealt: self.architecture != "qwen3next",
        })
    }

    /// The configuration as a Hub folder has it, flat. `facts`: what only the tensors tell.
    pub(super) fn config(
        &self,
        metadata: Metadata<'_>,
        heads: &Heads,
        facts: Facts,
    ) -> Result<serde_json::Value> {
        let key = |name: &str| format!("{}.{name}", self.architecture);
        let head_dim = metadata.required(&key("attention.key_length"))?;
        let value_length = key("attention.value_length");
        if metadata.required(&value_length)? != head_dim {
            return Err(metadata.wrong(
                &value_length,
                &format!("{head_dim}, as key_length"),
                "another number",
            ));
        }
        let mut config = Map::new();
        let mut set = |name: &str, value: serde_json::Value| config.insert(name.to_owned(), value);
        set("model_type", facts.model_type(self.model_type).into());
        for (name, from) in [
            ("hidden_size", "embedding_length"),
            ("num_attention_heads", "attention.head_count"),
            ("num_key_value_heads", "attention.head_count_kv"),
            ("max_position_embeddings", "context_length"),
            ("linear_conv_kernel_dim", "ssm.conv_kernel"),
        ] {
            set(name, metadata.required(&key(from))?.into());
        }
        for (name, from) in [
            ("intermediate_size", "feed_forward_length"),
            ("full_attention_interval", "full_attention_interval"),
            ("num_experts", "expert_count"),
            ("num_experts_per_tok", "expert_used_count"),
            ("moe_intermediate_size", "expert_feed_forward_length"),
            (
                "shared_expert_intermediate_size",
                "expert_shared_feed_forward_length",
            ),
        ] {
            if let Some(found) = metadata.number_of_layers(&key(from))? {
                set(name, found.into());
            }
        }
        set("num_hidden_layers", self.trunk.into());
        set("head_dim", head_dim.into());
        set("linear_num_key_heads", heads.keys.into());
        set("linear_num_value_heads", heads.values.into());
        set("linear_key_head_dim", heads.key_dim.into());
        set("linear_value_head_dim", heads.value_dim.into());
        set("vocab_size", facts.vocab.into());
        set("tie_word_embeddings", facts.tied.into());
        set("attention_bias", facts.biased.into());
        set("mtp_num_hidden_layers", (self.blocks - self.trunk).into());
        set("eos_token_id", json!(facts.eos));
        if let Some(eps) = metadata.float(&key("attention.layer_norm_rms_epsilon"))? {
            set("rms_norm_eps", json!(eps));
        }
        if let Some(kinds) = self.layer_kinds(metadata)? {
            set("layer_types", json!(kinds));
        }
        set("rope_parameters", self.rope(metadata, head_dim)?);
        Ok(config.into())
    }

    fn layer_kinds(&self, metadata: Metadata<'_>) -> Result<Option<Vec<&'static str>>> {
        let key = format!("{}.attention.recurrent_layers", self.architecture);
        let expected = "a truth value for each block";
        let Some(array) = metadata.array(&key, &[Kind::Bool], expected)? else {
            return Ok(None);
        };
        if array.count != self.blocks && array.count != self.trunk {
            return Err(metadata.wrong(
                &key,
                &format!("{expected}, {} in all", self.blocks),
                &array.count.to_string(),
            ));
        }
        let kinds = array.numbers(metadata.bytes).take(self.trunk);
        let kind = |recurrent| match recurrent {
            0 => "full_attention",
            _ => "linear_attention",
        };
        Ok(Some(kinds.map(kind).collect()))
    }

    fn rope(&self, metadata: Metadata<'_>, head_dim: u64) -> Result<serde_json::Value> {
        let key = |name: &str| format!("{}.rope.{name}", self.architecture);
        let mut rope = Map::new();
        // A scaling is passed on, for the configuration to refuse by its name.
        let scaling = metadata
            .text(&key("scaling.type"))?
            .filter(|name| *name != "none");
        rope.insert("rope_type".to_owned(), scaling.unwrap_or("default").into());
        if let Some(theta) = metadata.float(&key("freq_base"))? {
            rope.insert("rope_theta".to_owned(), json!(theta));
        }
        let dims_key = key("dimension_count");
        let dims = metadata.required(&dims_key)?;
        if dims > head_dim {
            return Err(metadata.wrong(&dims_key, &format!("at most {head_dim}"), &dims.to_string()));
        }
        let (dims, of) = (dims as f64, head_dim as f64);
        let mut factor = dims / of;
        // The configuration's reader rounds the product down; a quotient may be a little too small for that.
        if factor * of < dims {
            factor = factor.next_up();
        }
        rope.insert("partial_rotary_factor".to_owned(), json!(factor));
        Ok(rope.into())
    }
}

/// What of a configuration only the tensors and the vocabulary tell.
pub(super) struct Facts {
    pub(super) vocab: usize,
    pub(super) tied: bool,
    pub(super) biased: bool,
    /// Whether there is a multi-token-prediction head and no model.
    pub(super) head_alone: bool,
    pub(super) eos: Vec<u32>,
}

impl Facts {
    fn model_type(&self, model: &'static str) -> &'static str {
        if self.head_alone {
            "qwen3_5_mtp"
        } else {
            model
        }
    }
}
