//! Tensors to layers.

use recant_core::candle::{Device, Tensor};
use recant_kernels::{AttentionShape, Backend, GatedDeltaShape, Linear};
use recant_layers::{
    AttentionWeights, DecoderBlock, DeltaNetWeights, GatedAttention, GatedDeltaNet, Mixer, Mlp, RmsNorm,
};
use recant_weights::Source;

use crate::{Config, Error, LayerKind, Result};

/// Where a model runs, and on what.
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// Own kernels, or ops of candle.
    pub backend: Backend,
    /// Where the weights are put.
    pub device: Device,
}

impl Default for LoadOptions {
    /// Own kernels on the CPU.
    fn default() -> Self {
        Self {
            backend: Backend::Cpu,
            device: Device::Cpu,
        }
    }
}

/// The parts of a model.
pub(crate) struct Parts {
    pub(crate) embed: Linear,
    pub(crate) blocks: Vec<DecoderBlock>,
    pub(crate) norm: RmsNorm,
    /// Absent when the embedding is the head.
    pub(crate) head: Option<Linear>,
}

/// Takes a model's tensors by name and makes layers of them.
pub(crate) struct Assembly<'a> {
    pub(crate) config: &'a Config,
    pub(crate) options: &'a LoadOptions,
    pub(crate) source: &'a mut dyn Source,
}

impl Assembly<'_> {
    pub(crate) fn parts(&mut self) -> Result<Parts> {
        let config = self.config;
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        let embed = self.linear("embed_tokens.weight", vocab, hidden)?;
        let head = if config.tie.is_tied(self.source.has("lm_head.weight")) {
            self.source.discard("lm_head.weight");
            None
        } else {
            Some(self.linear("lm_head.weight", vocab, hidden)?)
        };
        let blocks = (0..config.num_hidden_layers)
            .map(|layer| self.block(layer))
            .collect::<Result<Vec<_>>>()?;
        let norm = self.norm("norm.weight")?;
        Ok(Parts {
            embed,
            blocks,
            norm,
            head,
        })
    }

    fn take(&mut self, name: &str, shape: &[usize]) -> Result<Tensor> {
        let tensor = self.source.take(name, shape)?;
        tensor
            .to_device(&self.options.device)
            .map_err(|e| part(name, e.into()))
    }

    fn linear(&mut self, name: &str, rows: usize, width: usize) -> Result<Linear> {
        let weight = self.take(name, &[rows, width])?;
        Linear::new(self.options.backend, &[weight], None).map_err(|e| part(name, e.into()))
    }

    fn norm(&mut self, name: &str) -> Result<RmsNorm> {
        let weight = self.take(name, &[self.config.hidden_size])?;
        RmsNorm::zero_centred(self.options.backend, &weight, self.config.rms_norm_eps)
            .map_err(|e| part(name, e))
    }

    fn block(&mut self, layer: usize) -> Result<DecoderBlock> {
        let prefix = format!("layers.{layer}");
        Ok(DecoderBlock {
            input_norm: self.norm(&format!("{prefix}.input_layernorm.weight"))?,
            mixer: match self.config.layer_kinds[layer] {
                LayerKind::Linear => Mixer::Linear(self.delta_net(&format!("{prefix}.linear_attn"))?),
                LayerKind::Full => Mixer::Full(self.attention(&format!("{prefix}.self_attn"))?),
            },
            post_norm: self.norm(&format!("{prefix}.post_attention_layernorm.weight"))?,
            mlp: self.mlp(&format!("{prefix}.mlp"))?,
        })
    }

    fn mlp(&mut self, prefix: &str) -> Result<Mlp> {
        let (hidden, width) = (self.config.hidden_size, self.config.intermediate_size);
        let gate = self.take(&format!("{prefix}.gate_proj.weight"), &[width, hidden])?;
        let up = self.take(&format!("{prefix}.up_proj.weight"), &[width, hidden])?;
        let down = self.take(&format!("{prefix}.down_proj.weight"), &[hidden, width])?;
        Mlp::new(self.options.backend, &gate, &up, &down).map_err(|e| part(prefix, e))
    }

    fn attention(&mut self, prefix: &str) -> Result<GatedAttention> {
        let config = self.config;
        let shape = AttentionShape {
            heads: config.num_attention_heads,
            kv_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            rotary_dims: config.rotary_dims,
            gated: config.attn_output_gate,
            eps: config.rms_norm_eps,
        };
        let hidden = config.hidden_size;
        let (inner, kv) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
        let q_rows = if shape.gated { 2 * inner } else { inner };
        let weights = AttentionWeights {
            q: self.take(&format!("{prefix}.q_proj.weight"), &[q_rows, hidden])?,
            k: self.take(&format!("{prefix}.k_proj.weight"), &[kv, hidden])?,
            v: self.take(&format!("{prefix}.v_proj.weight"), &[kv, hidden])?,
            o: self.take(&format!("{prefix}.o_proj.weight"), &[hidden, inner])?,
            biases: if config.attention_bias {
                Some([
                    self.take(&format!("{prefix}.q_proj.bias"), &[q_rows])?,
                    self.take(&format!("{prefix}.k_proj.bias"), &[kv])?,
                    self.take(&format!("{prefix}.v_proj.bias"), &[kv])?,
                    self.take(&format!("{prefix}.o_proj.bias"), &[hidden])?,
                ])
            } else {
                None
            },
            q_norm: self.take(&format!("{prefix}.q_norm.weight"), &[shape.head_dim])?,
            k_norm: self.take(&format!("{prefix}.k_norm.weight"), &[shape.head_dim])?,
        };
        GatedAttention::new(self.options.backend, shape, &weights).map_err(|e| part(prefix, e))
    }

    fn delta_net(&mut self, prefix: &str) -> Result<GatedDeltaNet> {
        let config = self.config;
        let shape = GatedDeltaShape {
            key_heads: config.linear_num_key_heads,
            value_heads: config.linear_num_value_heads,
            key_dim: config.linear_key_head_dim,
            value_dim: config.linear_value_head_dim,
            conv_kernel: config.linear_conv_kernel_dim,
            eps: config.rms_norm_eps,
        };
        let (hidden, heads, taps) = (config.hidden_size, shape.value_heads, shape.conv_kernel);
        let values = heads * shape.value_dim;
        let channels = 2 * shape.key_heads * shape.key_dim + values;
        let conv = self.take(&format!("{prefix}.conv1d.weight"), &[channels, 1, taps])?;
        let weights = DeltaNetWeights {
            qkv: self.take(&format!("{prefix}.in_proj_qkv.weight"), &[channels, hidden])?,
            z: self.take(&format!("{prefix}.in_proj_z.weight"), &[values, hidden])?,
            b: self.take(&format!("{prefix}.in_proj_b.weight"), &[heads, hidden])?,
            a: self.take(&format!("{prefix}.in_proj_a.weight"), &[heads, hidden])?,
            conv: conv.squeeze(1).map_err(|e| part(prefix, e.into()))?,
            a_log: self.take(&format!("{prefix}.A_log"), &[heads])?,
            dt_bias: self.take(&format!("{prefix}.dt_bias"), &[heads])?,
            norm: self.take(&format!("{prefix}.norm.weight"), &[shape.value_dim])?,
            out: self.take(&format!("{prefix}.out_proj.weight"), &[hidden, values])?,
        };
        GatedDeltaNet::new(self.options.backend, shape, &weights).map_err(|e| part(prefix, e))
    }
}

pub(crate) fn part(name: &str, source: recant_core::Error) -> Error {
    Error::Part {
        part: name.to_owned(),
        source,
    }
}
