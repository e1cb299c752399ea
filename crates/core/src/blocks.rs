//! Fixed-size blocks of keys and values, cut at absolute positions. Both attention caches are made of them.

use std::collections::VecDeque;

use candle_core::{DType, Device, Tensor};

use crate::memory;
use crate::{ArraySpec, AttentionLayout, Error, KvBlock, Result, Snapshot};

/// Rows at positions `first..end`, in blocks that start at multiples of `block`.
///
/// Rows are written in place and never moved, so appending costs the same whatever is held. Blocks dropped from the
/// front are used again at the back.
#[derive(Debug)]
pub(crate) struct Blocks {
    layout: AttentionLayout,
    stored: DType,
    device: Device,
    block: usize,
    first: usize,
    end: usize,
    blocks: VecDeque<(Tensor, Tensor)>,
    spare: Vec<(Tensor, Tensor)>,
}

impl Blocks {
    /// Blocks of `block` rows whose elements are stored as `stored`.
    pub(crate) fn new(layout: AttentionLayout, stored: DType, device: Device, block: usize) -> Self {
        Self {
            layout,
            stored,
            device,
            block: block.max(1),
            first: 0,
            end: 0,
            blocks: VecDeque::new(),
            spare: Vec::new(),
        }
    }

    pub(crate) fn layout(&self) -> &AttentionLayout {
        &self.layout
    }

    /// Position of the oldest row held.
    pub(crate) fn first(&self) -> usize {
        self.first
    }

    /// Position after the newest row.
    pub(crate) fn end(&self) -> usize {
        self.end
    }

    /// Refuses rows of another shape, type or device, and gives their number.
    pub(crate) fn check(&self, keys: &Tensor, values: &Tensor) -> Result<usize> {
        let rows = keys.dims().first().copied().unwrap_or(0);
        let shape = [rows, self.layout.kv_heads, self.layout.head_dim];
        for (name, tensor) in [("keys", keys), ("values", values)] {
            if tensor.dims() != shape
                || tensor.dtype() != self.layout.dtype
                || !tensor.device().same_device(&self.device)
            {
                return Err(Error::mismatch(
                    name,
                    format!("{:?} of {shape:?} on {:?}", self.layout.dtype, self.device),
                    format!(
                        "{:?} of {:?} on {:?}",
                        tensor.dtype(),
                        tensor.dims(),
                        tensor.device()
                    ),
                ));
            }
        }
        Ok(rows)
    }

    /// Rounds rows to the type that they are stored in, and writes them at `end..`.
    pub(crate) fn append(&mut self, keys: &Tensor, values: &Tensor) -> Result<()> {
        self.check(keys, values)?;
        self.write(&keys.to_dtype(self.stored)?, &values.to_dtype(self.stored)?)
    }

    /// Writes rows that [`arrays`](Self::arrays) gave at `end..`.
    pub(crate) fn restore(&mut self, [keys, values]: [&Tensor; 2]) -> Result<()> {
        self.write(&keys.to_device(&self.device)?, &values.to_device(&self.device)?)
    }

    /// Writes stored rows at `end..`. What lay there before is overwritten only once room for all rows is there.
    fn write(&mut self, keys: &Tensor, values: &Tensor) -> Result<()> {
        let rows = keys.dims()[0];
        let (keys, values) = (keys.contiguous()?, values.contiguous()?);
        let base = self.first / self.block;
        while (base + self.blocks.len()) * self.block < self.end + rows {
            let block = match self.spare.pop() {
                Some(block) => block,
                None => (self.fresh()?, self.fresh()?),
            };
            self.blocks.push_back(block);
        }
        let mut done = 0;
        while done < rows {
            let position = self.end + done;
            let offset = position % self.block;
            let count = (self.block - offset).min(rows - done);
            let (k, v) = &self.blocks[position / self.block - base];
            k.slice_set(&keys.narrow(0, done, count)?, 0, offset)?;
            v.slice_set(&values.narrow(0, done, count)?, 0, offset)?;
            done += count;
        }
        self.end += rows;
        Ok(())
    }

    /// Drops the rows from position `end` on.
    pub(crate) fn truncate(&mut self, end: usize) {
        self.end = end.clamp(self.first, self.end);
    }

    /// Lets go of whole blocks that hold no position from `floor` on.
    pub(crate) fn release_before(&mut self, floor: usize) {
        while (self.first / self.block + 1) * self.block <= floor.min(self.end) {
            if let Some(block) = self.blocks.pop_front() {
                self.spare.push(block);
            }
            self.first = (self.first / self.block + 1) * self.block;
        }
    }

    /// Forgets all rows, and makes `start` the position of the next one. Blocks are kept for use.
    pub(crate) fn restart(&mut self, start: usize) {
        self.spare.extend(self.blocks.drain(..));
        self.first = start;
        self.end = start;
    }

    /// The rows from position `from` on.
    pub(crate) fn view(&self, from: usize) -> Result<Vec<KvBlock>> {
        let base = self.first / self.block;
        let from = from.max(self.first);
        let mut out = Vec::with_capacity(self.blocks.len());
        for (index, (k, v)) in self.blocks.iter().enumerate() {
            let start = (base + index) * self.block;
            let (low, high) = (start.max(from), (start + self.block).min(self.end));
            if low >= high {
                continue;
            }
            let (keys, values) = if low == start {
                (k.clone(), v.clone())
            } else {
                let (offset, rows) = (low - start, start + self.block - low);
                (k.narrow(0, offset, rows)?, v.narrow(0, offset, rows)?)
            };
            out.push(KvBlock {
                start: low,
                rows: high - low,
                keys,
                values,
            });
        }
        Ok(out)
    }

    /// Copies of the rows at positions `from..to`: `[to - from, kv_heads, head_dim]`.
    pub(crate) fn copy(&self, from: usize, to: usize) -> Result<(Tensor, Tensor)> {
        let zeros = || Tensor::zeros(self.shape(to - from), self.stored, &self.device);
        let (keys, values) = (zeros()?, zeros()?);
        for block in self.view(from)? {
            let rows = block.rows.min(to.saturating_sub(block.start));
            if rows > 0 {
                keys.slice_set(&block.keys.narrow(0, 0, rows)?, 0, block.start - from)?;
                values.slice_set(&block.values.narrow(0, 0, rows)?, 0, block.start - from)?;
            }
        }
        Ok((keys, values))
    }

    /// The arrays of a snapshot, by the names of keys and of values, that hold `rows` stored rows; none when `rows` is 0.
    pub(crate) fn arrays<'a>(
        &self,
        from: &'a Snapshot,
        names: [&'static str; 2],
        rows: usize,
    ) -> Result<Option<[&'a Tensor; 2]>> {
        if rows == 0 {
            return Ok(None);
        }
        let array = |name| {
            let spec = ArraySpec {
                name,
                shape: vec![self.layout.kv_heads, self.layout.head_dim],
                dtype: self.stored,
            };
            from.array(&spec, Some(rows))
        };
        Ok(Some([array(names[0])?, array(names[1])?]))
    }

    /// Bytes of one row, keys and values together.
    pub(crate) fn row_bytes(&self) -> usize {
        2 * self.layout.kv_heads * self.layout.head_dim * self.stored.size_in_bytes()
    }

    /// Rows that there is memory for.
    pub(crate) fn capacity(&self) -> usize {
        (self.blocks.len() + self.spare.len()) * self.block
    }

    /// Keys or values of a block.
    fn fresh(&self) -> Result<Tensor> {
        memory::zeros(self.shape(self.block), self.stored, &self.device)
    }

    fn shape(&self, rows: usize) -> (usize, usize, usize) {
        (rows, self.layout.kv_heads, self.layout.head_dim)
    }
}
