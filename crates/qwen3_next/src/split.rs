//! The rows of the fused projections, put into the order that four tensors have.
//!
//! Both are grouped by key head. `in_proj_qkvz`, for each: its query rows, its key rows, the value rows of its value heads,
//! the gate rows of the same. `in_proj_ba`: b of its value heads, then a of them.

use recant_core::candle::{Result, Tensor};
use recant_layers::{Config, DeltaInputs};

pub(crate) struct Split {
    key_heads: usize,
    /// Rows of a key head.
    keys: usize,
    /// Rows of a key head's value heads together.
    values: usize,
    /// Value heads of a key head.
    heads: usize,
}

impl Split {
    pub(crate) fn of(config: &Config) -> Self {
        let heads = config.linear_num_value_heads / config.linear_num_key_heads;
        Self {
            key_heads: config.linear_num_key_heads,
            keys: config.linear_key_head_dim,
            values: heads * config.linear_value_head_dim,
            heads,
        }
    }

    pub(crate) fn qkvz_rows(&self) -> usize {
        2 * self.key_heads * (self.keys + self.values)
    }

    pub(crate) fn ba_rows(&self) -> usize {
        2 * self.key_heads * self.heads
    }

    /// # Shapes
    /// `qkvz`: `[qkvz_rows, hidden_size]`; `ba`: `[ba_rows, hidden_size]`.
    pub(crate) fn apply(&self, qkvz: &Tensor, ba: &Tensor) -> Result<DeltaInputs> {
        let q = self.rows(qkvz, 0, self.keys)?;
        let k = self.rows(qkvz, self.keys, self.keys)?;
        let v = self.rows(qkvz, 2 * self.keys, self.values)?;
        Ok(DeltaInputs {
            qkv: Tensor::cat(&[q, k, v], 0)?,
            z: self.rows(qkvz, 2 * self.keys + self.values, self.values)?,
            b: self.rows(ba, 0, self.heads)?,
            a: self.rows(ba, self.heads, self.heads)?,
        })
    }

    /// Of each key head's rows, `count` from `start` on.
    fn rows(&self, fused: &Tensor, start: usize, count: usize) -> Result<Tensor> {
        let (rows, width) = fused.dims2()?;
        fused
            .reshape((self.key_heads, rows / self.key_heads, width))?
            .narrow(1, start, count)?
            .contiguous()?
            .reshape((self.key_heads * count, width))
    }
}
