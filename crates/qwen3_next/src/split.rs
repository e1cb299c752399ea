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
            qkv: Tensor::cat(&[q, k, v], 0)?.into(),
            z: self.rows(qkvz, 2 * self.keys + self.values, self.values)?.into(),
            b: self.rows(ba, 0, self.heads)?.into(),
            a: self.rows(ba, self.heads, self.heads)?.into(),
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

#[cfg(test)]
mod tests {
    use super::*;
    use recant_core::candle::Device;
    use recant_layers::Weight;

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
        let found = split.apply(&column(&both)?, &column(&ba)?)?;
        let rows = |weight: &Weight| match weight {
            Weight::Float(x) => x.flatten_all()?.to_vec1::<f32>(),
            Weight::Groups(_) => Ok(Vec::new()),
        };
        assert_eq!(
            rows(&found.qkv)?,
            [10., 11., 110., 111., 20., 21., 120., 121., 30., 31., 32., 130., 131., 132.]
        );
        assert_eq!(rows(&found.z)?, [40., 41., 42., 140., 141., 142.]);
        assert_eq!(rows(&found.b)?, [50., 51., 52., 150., 151., 152.]);
        assert_eq!(rows(&found.a)?, [60., 61., 62., 160., 161., 162.]);
        Ok(())
    }
}
