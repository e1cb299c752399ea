//! Tensors to layers.

mod experts;

use recant_core::candle::{DType, Device, Tensor};
use recant_kernels::{
    ActivationPrecision, AttentionShape, Backend, GroupFormat, GroupScales, GroupWeights, Linear, Weight,
};
use recant_weights::{Coding, Norms, Source, Stored, StoredGroups};

use crate::{
    AttentionWeights, Config, DecoderBlock, DeltaInputs, DeltaNetWeights, Error, Family, FeedForward, Ffn,
    GatedAttention, GatedDeltaNet, LayerKind, Mixer, Mlp, Result, RmsNorm,
};

/// Where a model runs, and on what.
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// Own kernels, or ops of candle.
    pub backend: Backend,
    /// Where the weights are put.
    pub device: Device,
    /// Rounds matrices to groups while they are loaded, where their input features are a multiple of the group: all but
    /// the small ones of gates and routers. `None` leaves each in the type that it is stored in.
    pub quantize: Option<GroupFormat>,
    /// What activations are rounded to where they meet weights in groups.
    pub activations: ActivationPrecision,
}

impl Default for LoadOptions {
    /// Own kernels on the CPU.
    fn default() -> Self {
        Self {
            backend: Backend::Cpu,
            device: Device::Cpu,
            quantize: None,
            activations: ActivationPrecision::default(),
        }
    }
}

/// Takes tensors by name and makes layers of them.
pub struct Assembly<'a> {
    family: &'a dyn Family,
    config: &'a Config,
    options: &'a LoadOptions,
    source: &'a mut dyn Source,
}

impl<'a> Assembly<'a> {
    /// # Errors
    /// A device that the backend does not run on.
    pub fn new(
        family: &'a dyn Family,
        config: &'a Config,
        options: &'a LoadOptions,
        source: &'a mut dyn Source,
    ) -> Result<Self> {
        if options.backend == Backend::Cpu && !options.device.is_cpu() {
            return Err(Error::Device {
                device: format!("{:?}", options.device.location()),
            });
        }
        Ok(Self {
            family,
            config,
            options,
            source,
        })
    }

    /// The configuration that gives shapes.
    pub fn config(&self) -> &'a Config {
        self.config
    }

    /// Whether the source has a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        self.source.has(name)
    }

    /// Sets a tensor aside as known and not wanted.
    pub fn discard(&mut self, name: &str) {
        self.source.discard(name);
    }

    /// A tensor of exactly this shape, on the device of the model.
    ///
    /// # Errors
    /// A tensor that is missing, taken already, or of another shape or type. So say all that take one.
    pub fn take(&mut self, name: &str, shape: &[usize]) -> Result<Tensor> {
        let tensor = self.source.take(name, shape)?;
        tensor
            .to_device(&self.options.device)
            .map_err(|e| Error::part(name, e))
    }

    /// A matrix of exactly this shape as the checkpoint has it: to be split, or for [`made`](Self::made).
    ///
    /// # Errors
    /// As [`take`](Self::take) says, or quantized parts that are missing or contradict one another.
    pub fn stored(&mut self, name: &str, shape: [usize; 2]) -> Result<Stored> {
        Ok(self.source.take_matrix(name, shape)?)
    }

    /// A matrix of exactly this shape, as the options want it.
    ///
    /// # Errors
    /// As [`stored`](Self::stored) says, or a weight that cannot be rounded.
    pub fn weight(&mut self, name: &str, shape: [usize; 2]) -> Result<Weight> {
        let stored = self.stored(name, shape)?;
        self.made(stored).map_err(|e| Error::part(name, e))
    }

    /// A small matrix that decides much, of a gate or a router: it is never rounded, and neither is what meets it.
    ///
    /// # Errors
    /// As [`stored`](Self::stored) says.
    pub fn gate_weight(&mut self, name: &str, shape: [usize; 2]) -> Result<Weight> {
        let stored = self.stored(name, shape)?;
        self.made_gate(stored).map_err(|e| Error::part(name, e))
    }

    /// A stored matrix as the options want it.
    ///
    /// # Errors
    /// A weight that cannot be rounded or put on the device, or numbers in groups that are not as they should be.
    pub fn made(&self, stored: Stored) -> recant_core::Result<Weight> {
        let options = self.options;
        match (stored, options.quantize) {
            (Stored::Float(tensor), Some(format)) if fits(&tensor, format) => {
                let weights = GroupWeights::quantize(&tensor, format)?;
                self.placed(weights.with_activations(options.activations))
            }
            (Stored::Groups(groups), _) => {
                self.placed(group_weights(groups)?.with_activations(options.activations))
            }
            (stored, _) => self.made_gate(stored),
        }
    }

    /// A stored matrix of a gate or a router.
    ///
    /// # Errors
    /// As [`made`](Self::made) says.
    pub fn made_gate(&self, stored: Stored) -> recant_core::Result<Weight> {
        match stored {
            Stored::Float(tensor) => Ok(tensor.to_device(&self.options.device)?.into()),
            Stored::Groups(groups) => {
                self.placed(group_weights(groups)?.with_activations(ActivationPrecision::Full))
            }
            _ => Err(recant_core::Error::mismatch(
                "a stored matrix",
                "floats, or 8 or 4 bits in groups",
                "another kind",
            )),
        }
    }

    /// Weights in groups where the backend wants them: only own kernels read them as they are.
    fn placed(&self, weights: GroupWeights) -> recant_core::Result<Weight> {
        Ok(match self.options.backend {
            Backend::Cpu => weights.into(),
            Backend::Composed => weights.dequantize()?.to_device(&self.options.device)?.into(),
        })
    }

    /// A layer without a bias of the matrix `[rows, width]` of this name.
    pub fn linear(&mut self, name: &str, rows: usize, width: usize) -> Result<Linear> {
        let weight = self.weight(name, [rows, width])?;
        Linear::new(self.options.backend, [weight], None).map_err(|e| Error::part(name, e))
    }

    /// A norm over the residual stream.
    pub fn norm(&mut self, name: &str) -> Result<RmsNorm> {
        let weight = self.norm_weight(name, self.config.hidden_size)?;
        Ok(RmsNorm::new(
            self.options.backend,
            weight,
            self.config.rms_norm_eps,
        ))
    }

    /// What a norm multiplies with, in f32, however the checkpoint stores it: `[width]`.
    fn norm_weight(&mut self, name: &str, width: usize) -> Result<Tensor> {
        let stored = self.take(name, &[width])?;
        let wide = stored.to_dtype(DType::F32);
        match self.source.norms() {
            Norms::ZeroCentred => wide.and_then(|w| w + 1.0),
            Norms::OnePlus => wide,
        }
        .map_err(|e| Error::part(name, e))
    }

    /// The decoder layer whose names begin with `prefix`, such as `layers.0`.
    pub fn block(
        &mut self,
        prefix: &str,
        kind: LayerKind,
        feed_forward: &FeedForward,
    ) -> Result<DecoderBlock> {
        Ok(DecoderBlock {
            backend: self.options.backend,
            input_norm: self.norm(&format!("{prefix}.input_layernorm.weight"))?,
            mixer: match kind {
                LayerKind::Linear => Mixer::Linear(self.delta_net(&format!("{prefix}.linear_attn"))?),
                LayerKind::Full => Mixer::Full(self.attention(&format!("{prefix}.self_attn"))?),
            },
            post_norm: self.norm(&format!("{prefix}.post_attention_layernorm.weight"))?,
            ffn: match *feed_forward {
                FeedForward::Dense { width } => Ffn::Dense(self.mlp(&format!("{prefix}.mlp"), width)?),
                FeedForward::Sparse { shape, shared_width } => {
                    let moe = self.sparse_moe(&format!("{prefix}.mlp"), shape, shared_width)?;
                    Ffn::Sparse(Box::new(moe))
                }
            },
        })
    }

    /// The MLP of this width whose names begin with `prefix`.
    pub fn mlp(&mut self, prefix: &str, width: usize) -> Result<Mlp> {
        let hidden = self.config.hidden_size;
        let gate = self.weight(&format!("{prefix}.gate_proj.weight"), [width, hidden])?;
        let up = self.weight(&format!("{prefix}.up_proj.weight"), [width, hidden])?;
        let down = self.weight(&format!("{prefix}.down_proj.weight"), [hidden, width])?;
        Mlp::new(self.options.backend, [gate, up], down).map_err(|e| Error::part(prefix, e))
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
            q: self.weight(&format!("{prefix}.q_proj.weight"), [q_rows, hidden])?,
            k: self.weight(&format!("{prefix}.k_proj.weight"), [kv, hidden])?,
            v: self.weight(&format!("{prefix}.v_proj.weight"), [kv, hidden])?,
            o: self.weight(&format!("{prefix}.o_proj.weight"), [hidden, inner])?,
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
            q_norm: self.norm_weight(&format!("{prefix}.q_norm.weight"), shape.head_dim)?,
            k_norm: self.norm_weight(&format!("{prefix}.k_norm.weight"), shape.head_dim)?,
        };
        GatedAttention::new(self.options.backend, shape, &weights).map_err(|e| Error::part(prefix, e))
    }

    fn delta_net(&mut self, prefix: &str) -> Result<GatedDeltaNet> {
        let shape = self.config.delta_shape();
        let (hidden, heads, taps) = (self.config.hidden_size, shape.value_heads, shape.conv_kernel);
        let channels = self.config.linear_channels();
        let family = self.family;
        let conv = self.take(&format!("{prefix}.conv1d.weight"), &[channels, 1, taps])?;
        let weights = DeltaNetWeights {
            inputs: family.delta_inputs(self, prefix)?,
            conv: conv.squeeze(1).map_err(|e| Error::part(prefix, e))?,
            a_log: self.take(&format!("{prefix}.A_log"), &[heads])?,
            dt_bias: self.take(&format!("{prefix}.dt_bias"), &[heads])?,
            norm: self.take(&format!("{prefix}.norm.weight"), &[shape.value_dim])?,
            out: self.weight(
                &format!("{prefix}.out_proj.weight"),
                [hidden, heads * shape.value_dim],
            )?,
        };
        GatedDeltaNet::new(self.options.backend, shape, &weights).map_err(|e| Error::part(prefix, e))
    }

    /// The input projections of a Gated DeltaNet layer, stored as four tensors.
    ///
    /// # Errors
    /// As [`stored`](Self::stored) says.
    pub fn delta_inputs(&mut self, prefix: &str) -> Result<DeltaInputs> {
        let shape = self.config.delta_shape();
        let (hidden, heads) = (self.config.hidden_size, shape.value_heads);
        let (channels, values) = (self.config.linear_channels(), heads * shape.value_dim);
        Ok(DeltaInputs {
            qkv: self.weight(&format!("{prefix}.in_proj_qkv.weight"), [channels, hidden])?,
            z: self.weight(&format!("{prefix}.in_proj_z.weight"), [values, hidden])?,
            b: self.gate_weight(&format!("{prefix}.in_proj_b.weight"), [heads, hidden])?,
            a: self.gate_weight(&format!("{prefix}.in_proj_a.weight"), [heads, hidden])?,
        })
    }
}

/// A stored matrix in groups as kernels take it.
///
/// # Errors
/// Parts that contradict one another.
pub fn group_weights(groups: StoredGroups) -> recant_kernels::Result<GroupWeights> {
    let StoredGroups {
        coding,
        group,
        quants,
        scales,
        biases,
        factors,
    } = groups;
    let coding = match coding {
        Coding::Whole { bits, zero } => recant_kernels::Coding::Whole { bits, zero },
        Coding::Table(table) => recant_kernels::Coding::Table(table),
        Coding::E4m3 => recant_kernels::Coding::E4m3,
    };
    // Rows that were moved or cut may be views.
    let whole = |tensor: Tensor| tensor.contiguous();
    let steps = |numbers, factors: Option<Tensor>| -> recant_kernels::Result<GroupScales> {
        Ok(match factors {
            None => whole(numbers)?.into(),
            Some(factors) => GroupScales::TwoLevel {
                numbers: whole(numbers)?,
                factors: whole(factors)?,
            },
        })
    };
    let (scale_factors, bias_factors) = match factors {
        Some(factors) => (Some(factors.scales), factors.biases),
        None => (None, None),
    };
    let biases = biases.map(|biases| steps(biases, bias_factors)).transpose()?;
    GroupWeights::new(
        coding,
        group,
        whole(quants)?,
        steps(scales, scale_factors)?,
        biases,
    )
}

/// Whether a matrix can be rounded to groups of this format: kernels read features in chunks of 32.
fn fits(tensor: &Tensor, format: GroupFormat) -> bool {
    let [_, features] = *tensor.dims() else {
        return false;
    };
    format.group > 0 && features.is_multiple_of(format.group) && features.is_multiple_of(32)
}
