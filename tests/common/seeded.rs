//! Models of random weights: small ones for tests, and one of a published shape for benches.

use rayon::prelude::*;
use recant::candle::{DType, Device, Tensor};
use recant::LoadOptions;
use recant_layers::{Config, Family, HybridModel};
use recant_qwen3_5::Qwen35;
use recant_qwen3_5_moe::Qwen35Moe;
use recant_qwen3_next::Qwen3Next;
use recant_weights::Source;
use serde_json::{json, Value};

/// The smallest model with everything in it: three linear layers and a full one, two value heads a key head.
fn text(model_type: &str) -> Value {
    json!({
        "model_type": model_type,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "full_attention_interval": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "vocab_size": 256,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": false
    })
}

/// Eight experts of which a token goes to two, and a shared one.
fn mixture(text: &mut Value) {
    for (name, value) in [
        ("num_experts", 8),
        ("num_experts_per_tok", 2),
        ("moe_intermediate_size", 24),
        ("shared_expert_intermediate_size", 40),
    ] {
        text[name] = json!(value);
    }
}

/// A small dense model.
pub fn dense(edit: impl FnOnce(&mut Value)) -> Value {
    let mut text = text("qwen3_5_text");
    text["intermediate_size"] = json!(96);
    edit(&mut text);
    json!({"model_type": "qwen3_5", "text_config": text})
}

/// A small model with a mixture of experts in every layer.
pub fn moe(edit: impl FnOnce(&mut Value)) -> Value {
    let mut text = text("qwen3_5_moe_text");
    mixture(&mut text);
    edit(&mut text);
    json!({"model_type": "qwen3_5_moe", "text_config": text})
}

/// A small Qwen3-Next, with old rotary fields.
pub fn next(edit: impl FnOnce(&mut Value)) -> Value {
    let mut text = text("qwen3_next");
    mixture(&mut text);
    for (name, value) in [
        ("rope_parameters", json!(null)),
        ("rope_theta", json!(10000.0)),
        ("partial_rotary_factor", json!(0.25)),
        ("rope_scaling", json!(null)),
        ("intermediate_size", json!(96)),
        ("decoder_sparse_step", json!(1)),
        ("mlp_only_layers", json!([])),
        ("norm_topk_prob", json!(true)),
    ] {
        text[name] = value;
    }
    edit(&mut text);
    text
}

/// The family of a configuration.
pub fn family(config: &Value) -> &'static dyn Family {
    match config["model_type"].as_str() {
        Some("qwen3_5_moe") => &Qwen35Moe,
        Some("qwen3_next") => &Qwen3Next,
        _ => &Qwen35,
    }
}

/// The shape of Qwen3.5-0.8B.
pub fn qwen3_5_0_8b() -> Value {
    dense(|text| {
        for (name, value) in [
            ("hidden_size", 1024),
            ("intermediate_size", 3584),
            ("num_hidden_layers", 24),
            ("num_attention_heads", 8),
            ("num_key_value_heads", 2),
            ("head_dim", 256),
            ("linear_num_key_heads", 16),
            ("linear_num_value_heads", 16),
            ("linear_key_head_dim", 128),
            ("linear_value_head_dim", 128),
            ("vocab_size", 248_320),
            ("max_position_embeddings", 262_144),
        ] {
            text[name] = json!(value);
        }
        text["rope_parameters"]["rope_theta"] = json!(1e7);
        text["tie_word_embeddings"] = json!(true);
    })
}

/// A model of random weights in `dtype`.
pub fn model(config: &Value, seed: u64, dtype: DType) -> Result<HybridModel, Box<dyn std::error::Error>> {
    model_of(
        config,
        &format!("seeded-{seed}-{dtype:?}"),
        &mut Seeded { seed, dtype },
        &LoadOptions::default(),
    )
}

/// A model of a source's weights.
pub fn model_of(
    config: &Value,
    fingerprint: &str,
    source: &mut dyn Source,
    options: &LoadOptions,
) -> Result<HybridModel, Box<dyn std::error::Error>> {
    let family = family(config);
    let config = Config::from_json(family, config, None)?;
    Ok(HybridModel::build(family, config, fingerprint, source, options)?)
}

/// Numbers that are made one after the other: a model of a published size is made by all threads.
const BLOCK: usize = 1 << 16;

/// Random tensors, a function of seed and name. Matrices have a standard deviation that keeps activations of
/// ordinary size; decays, biases and norms have ranges like those of trained models.
pub struct Seeded {
    pub seed: u64,
    pub dtype: DType,
}

impl Seeded {
    pub fn tensor(&self, name: &str, shape: &[usize]) -> recant::candle::Result<Tensor> {
        let count: usize = shape.iter().product();
        let (low, high) = if name.ends_with("A_log") {
            (-1.0, 1.5)
        } else if name.ends_with("dt_bias") {
            (-2.0, 1.0)
        } else if name.ends_with("linear_attn.norm.weight") {
            (0.6, 1.4)
        } else if shape.len() == 1 {
            (-0.17, 0.17)
        } else if name.ends_with("conv1d.weight") {
            (-0.8, 0.8)
        } else if name == "embed_tokens.weight" {
            (-1.0, 1.0)
        } else {
            // Uniform with variance 1 / width.
            let width = *shape.last().unwrap_or(&1) as f32;
            let bound = (3.0 / width).sqrt();
            (-bound, bound)
        };
        let seed = name.bytes().fold(self.seed ^ 0xcbf2_9ce4_8422_2325, |h, b| {
            (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        let mut values = vec![0.0_f32; count];
        values
            .par_chunks_mut(BLOCK)
            .enumerate()
            .for_each(|(block, values)| {
                let mut state = (seed ^ (block as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)) | 1;
                for value in values {
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    *value = low + (high - low) * ((state >> 40) as f32 / (1u64 << 24) as f32);
                }
            });
        Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(self.dtype)
    }
}

impl Source for Seeded {
    /// Experts come together.
    fn has(&self, name: &str) -> bool {
        !name.contains(".mlp.experts.") && !name.contains(".switch_mlp.")
    }

    fn take(&mut self, name: &str, shape: &[usize]) -> recant_weights::Result<Tensor> {
        self.tensor(name, shape)
            .map_err(|source| recant_weights::Error::Tensor {
                tensor: name.to_owned(),
                source: source.into(),
            })
    }

    fn discard(&mut self, _name: &str) {}
}
