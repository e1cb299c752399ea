//! The rows of the fused projections, put into the order that four tensors have.
//!
//! Both are grouped by key head. `in_proj_qkvz`, for each: its query rows, its key rows, the value rows of its value heads,
//! the gate rows of the same. `in_proj_ba`: b of its value heads, then a of them.

use recant_core::candle::{Result, Tensor};
use recant_layers::Config;
use recant_weights::Stored;

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

    /// The q, k and v rows, and the z rows, of `fused`: `[qkvz_rows, hidden_size]`.
    pub(crate) fn qkvz(&self, fused: &Stored) -> Result<[Stored; 2]> {
        let qkv = fused.map_rows(|fused| {
            let q = self.rows(fused, 0, self.keys)?;
            let k = self.rows(fused, self.keys, self.keys)?;
            let v = self.rows(fused, 2 * self.keys, self.values)?;
            Tensor::cat(&[q, k, v], 0)
        })?;
        let z = fused.map_rows(|fused| self.rows(fused, 2 * self.keys + self.values, self.values))?;
        Ok([qkv, z])
    }

    /// The b rows, and the a rows, of `fused`: `[ba_rows, hidden_size]`.
    pub(crate) fn ba(&self, fused: &Stored) -> Result<[Stored; 2]> {
        let b = fused.map_rows(|fused| self.rows(fused, 0, self.heads))?;
        let a = fused.map_rows(|fused| self.rows(fused, self.heads, self.heads))?;
        Ok([b, a])
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

#[cfg(test)]
mod tests {
    use super::*;
    use recant_core::candle::Device;

    /// Rows in a fused projection by what they are: the value of each names head and place.
    #[test]
    fn rows_of_three_value_heads_a_key_head_go_to_their_places() -> Result<()> {
        let split = Split {
            key_heads: 2,
            keys: 2,
            values: 3,
            heads: 3,
        };
        let column = |rows: &[f32]| Tensor::from_slice(rows, (rows.len(), 1), &Device::Cpu);
        // q of head 0 is 10 and 11, k is 20 and 21, its value heads 30, 31, 32, their gates 40, 41, 42; head 1 is 100 more.
        let of_head = [10., 11., 20., 21., 30., 31., 32., 40., 41., 42.];
        let both = [of_head, of_head.map(|row| row + 100.)].concat();
        let ba = [50., 51., 52., 60., 61., 62., 150., 151., 152., 160., 161., 162.];
        assert_eq!((split.qkvz_rows(), split.ba_rows()), (both.len(), ba.len()));
        let [qkv, z] = split.qkvz(&Stored::Float(column(&both)?))?;
        let [b, a] = split.ba(&Stored::Float(column(&ba)?))?;
        let rows = |stored: &Stored| match stored {
            Stored::Float(x) => x.flatten_all()?.to_vec1::<f32>(),
            _ => Ok(Vec::new()),
        };
        assert_eq!(
            rows(&qkv)?,
            [10., 11., 110., 111., 20., 21., 120., 121., 30., 31., 32., 130., 131., 132.]
        );
        assert_eq!(rows(&z)?, [40., 41., 42., 140., 141., 142.]);
        assert_eq!(rows(&b)?, [50., 51., 52., 150., 151., 152.]);
        assert_eq!(rows(&a)?, [60., 61., 62., 160., 161., 162.]);
        Ok(())
    }
}
