//! The growing cache of keys and values.

use candle_core::{Device, Tensor};

use crate::blocks::Blocks;
use crate::{
    AttentionCache, AttentionLayout, Cache, Checkpoint, Error, Footprint, KvType, KvView, Ledger, Result,
    Snapshot,
};

/// Rows in a block.
const BLOCK: usize = 256;
pub(crate) const KEYS: &str = "keys";
pub(crate) const VALUES: &str = "values";

/// Keys and values of every token, in blocks of 256 rows that are appended to in place.
///
/// Appending costs the same at token 10 and at token 100,000; trimming moves nothing. Any number of tokens can be
/// trimmed, but none below an open checkpoint. Memory grows by a block at a time and is kept by `reset`.
///
/// A snapshot holds the rows as they are stored: caches of another [`KvType`] refuse it.
#[derive(Debug)]
pub struct KvCache {
    blocks: Blocks,
    ledger: Ledger,
}

impl KvCache {
    /// An empty cache that stores rows in the layout's own type.
    pub fn new(layout: AttentionLayout, device: &Device) -> Self {
        Self::stored_as(layout, KvType::Native, device)
    }

    /// An empty cache that stores rows as `stored`.
    pub fn stored_as(layout: AttentionLayout, stored: KvType, device: &Device) -> Self {
        let stored = stored.of(layout.dtype);
        Self {
            blocks: Blocks::new(layout, stored, device.clone(), BLOCK),
            ledger: Ledger::new(),
        }
    }
}

impl Cache for KvCache {
    fn kind(&self) -> &str {
        "kv"
    }

    fn len(&self) -> usize {
        self.blocks.end()
    }

    fn trimmable(&self) -> usize {
        self.len() - self.ledger.open_at().unwrap_or(0)
    }

    fn trim(&mut self, n: usize) -> Result<()> {
        Error::check_trim(self, n)?;
        self.blocks.truncate(self.len() - n);
        Ok(())
    }

    fn checkpoint(&mut self) -> Result<Checkpoint> {
        self.ledger.open(self.len())
    }

    fn restore(&mut self, to: &Checkpoint) -> Result<()> {
        self.ledger.verify(to)?;
        self.blocks.truncate(to.len());
        Ok(())
    }

    fn commit(&mut self, checkpoint: Checkpoint) {
        self.ledger.close(&checkpoint);
    }

    fn snapshot(&self) -> Result<Snapshot> {
        let snapshot = Snapshot::new(self.kind(), self.len());
        if self.is_empty() {
            return Ok(snapshot);
        }
        let (keys, values) = self.blocks.copy(0, self.len())?;
        Ok(snapshot.with_rows(KEYS, keys).with_rows(VALUES, values))
    }

    fn fits(&self, from: &Snapshot) -> Result<()> {
        from.expect_kind(self.kind())?;
        self.blocks.arrays(from, [KEYS, VALUES], from.len())?;
        Ok(())
    }

    fn load(&mut self, from: &Snapshot) -> Result<()> {
        self.fits(from)?;
        let rows = self.blocks.arrays(from, [KEYS, VALUES], from.len())?;
        self.reset();
        rows.map_or(Ok(()), |rows| self.blocks.restore(rows))
    }

    fn reset(&mut self) {
        self.blocks.restart(0);
        self.ledger.clear();
    }

    fn footprint(&self) -> Footprint {
        let live = self.len() * self.blocks.row_bytes();
        Footprint {
            live,
            records: 0,
            reserve: self.blocks.capacity() * self.blocks.row_bytes() - live,
        }
    }
}

impl AttentionCache for KvCache {
    fn layout(&self) -> &AttentionLayout {
        self.blocks.layout()
    }

    fn append(&mut self, keys: &Tensor, values: &Tensor) -> Result<()> {
        self.blocks.append(keys, values)
    }

    fn view(&self) -> Result<KvView> {
        Ok(KvView {
            blocks: self.blocks.view(0)?,
            window: None,
            sink: 0,
        })
    }
}
