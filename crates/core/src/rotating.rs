//! The sliding-window cache of keys and values.

use candle_core::{Device, Tensor};

use crate::blocks::Blocks;
use crate::kv::{KEYS, VALUES};
use crate::{
    AttentionCache, AttentionLayout, Cache, Checkpoint, Error, Footprint, KvBlock, KvType, KvView, Ledger,
    Result, Snapshot,
};

/// Most rows in a block.
const MAX_BLOCK: usize = 256;
const SINK_KEYS: &str = "sink_keys";
const SINK_VALUES: &str = "sink_values";

/// What a [`RotatingKvCache`] keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// Newest positions that a row sees, its own included. At least 1.
    pub window: usize,
    /// First positions that stay visible for ever.
    pub sink: usize,
}

/// Keys and values of the newest `window` tokens and of the first `sink`.
///
/// The row at position `p` sees `j` when `p - j < window` or `j < sink`; that rule alone decides what attention reads, so
/// results do not depend on how tokens were grouped. Rows live in a ring of blocks with slack: a row is let go only
/// once neither the next token, nor any token after the open checkpoint, nor a trim of up to `slack` tokens without one,
/// can need it. So `trim` is exact before, at and after the wrap, and after several one-token steps.
///
/// It does *not* promise that a snapshot carries the slack: a cache loaded after the wrap can trim nothing until more is
/// fed.
/// Under an open checkpoint the ring grows with what is fed; its blocks are used again, its memory is not given back.
#[derive(Debug)]
pub struct RotatingKvCache {
    window: Window,
    slack: usize,
    ring: Blocks,
    sink: Blocks,
    ledger: Ledger,
}

impl RotatingKvCache {
    /// An empty cache that can trim at least `slack` tokens without a checkpoint, and stores rows in the layout's own type.
    ///
    /// # Errors
    /// The window is 0.
    pub fn new(layout: AttentionLayout, window: Window, slack: usize, device: &Device) -> Result<Self> {
        Self::stored_as(layout, KvType::Native, window, slack, device)
    }

    /// As [`new`](Self::new), but rows are stored as `stored`.
    ///
    /// # Errors
    /// The window is 0.
    pub fn stored_as(
        layout: AttentionLayout,
        stored: KvType,
        window: Window,
        slack: usize,
        device: &Device,
    ) -> Result<Self> {
        if window.window == 0 {
            return Err(Error::mismatch(
                "window of a rotating cache",
                "at least 1 token",
                0,
            ));
        }
        // Bounded first: the next power of two of a very wide window would overflow.
        let rows = window.window.saturating_add(slack).min(MAX_BLOCK);
        let block = rows.next_power_of_two().max(8);
        let stored = stored.of(layout.dtype);
        Ok(Self {
            window,
            slack,
            ring: Blocks::new(layout.clone(), stored, device.clone(), block),
            sink: Blocks::new(layout, stored, device.clone(), window.sink.min(MAX_BLOCK)),
            ledger: Ledger::new(),
        })
    }

    /// What it keeps.
    pub fn window(&self) -> Window {
        self.window
    }

    /// Oldest row that a cache of `len` tokens must hold: for its next token, and for its snapshot.
    fn oldest_needed(&self, len: usize) -> usize {
        len.saturating_sub(self.window.window)
    }

    /// Adds rows of the sink's range, if any of these are.
    fn append_sink(&mut self, keys: &Tensor, values: &Tensor) -> Result<()> {
        let missing = self.window.sink.saturating_sub(self.sink.end());
        let rows = missing.min(keys.dims()[0]);
        if rows > 0 {
            self.sink
                .append(&keys.narrow(0, 0, rows)?, &values.narrow(0, 0, rows)?)?;
        }
        Ok(())
    }

    fn truncate(&mut self, len: usize) {
        self.ring.truncate(len);
        self.sink.truncate(len);
    }

    /// Rows that a snapshot of `len` tokens holds outside the sink.
    fn kept_rows(&self, len: usize) -> usize {
        len.min(self.window.window)
    }

    fn sink_rows(&self, len: usize) -> usize {
        len.min(self.window.sink)
    }

    /// A snapshot's rows of the ring, and those of the sink.
    fn arrays<'a>(&self, from: &'a Snapshot) -> Result<[Option<[&'a Tensor; 2]>; 2]> {
        let (ring, sink) = (self.kept_rows(from.len()), self.sink_rows(from.len()));
        Ok([
            self.ring.arrays(from, [KEYS, VALUES], ring)?,
            self.sink.arrays(from, [SINK_KEYS, SINK_VALUES], sink)?,
        ])
    }
}

impl Cache for RotatingKvCache {
    fn kind(&self) -> &str {
        "rotating-kv"
    }

    fn len(&self) -> usize {
        self.ring.end()
    }

    fn trimmable(&self) -> usize {
        let above_checkpoint = self.len() - self.ledger.open_at().unwrap_or(0);
        // Down to the shortest length that needs no row older than the oldest held.
        let held = match self.ring.first() {
            0 => self.len(),
            first => self.len().saturating_sub(self.window.window + first),
        };
        above_checkpoint.min(held)
    }

    fn trim(&mut self, n: usize) -> Result<()> {
        Error::check_trim(self, n)?;
        self.truncate(self.len() - n);
        Ok(())
    }

    fn checkpoint(&mut self) -> Result<Checkpoint> {
        self.ledger.open(self.len())
    }

    fn restore(&mut self, to: &Checkpoint) -> Result<()> {
        self.ledger.verify(to)?;
        self.truncate(to.len());
        Ok(())
    }

    fn commit(&mut self, checkpoint: Checkpoint) {
        self.ledger.close(&checkpoint);
    }

    fn snapshot(&self) -> Result<Snapshot> {
        let len = self.len();
        let mut snapshot = Snapshot::new(self.kind(), len)
            .with_setting("window", self.window.window)
            .with_setting("sink", self.window.sink);
        if len > 0 {
            let (keys, values) = self.ring.copy(len - self.kept_rows(len), len)?;
            snapshot = snapshot.with_array(KEYS, keys).with_array(VALUES, values);
        }
        if self.sink_rows(len) > 0 {
            let (keys, values) = self.sink.copy(0, self.sink_rows(len))?;
            snapshot = snapshot
                .with_array(SINK_KEYS, keys)
                .with_array(SINK_VALUES, values);
        }
        Ok(snapshot)
    }

    fn fits(&self, from: &Snapshot) -> Result<()> {
        from.expect_kind(self.kind())?;
        from.expect_setting("window", self.window.window)?;
        from.expect_setting("sink", self.window.sink)?;
        self.arrays(from)?;
        Ok(())
    }

    fn load(&mut self, from: &Snapshot) -> Result<()> {
        self.fits(from)?;
        let [ring, sink] = self.arrays(from)?;
        self.reset();
        if let Some(rows) = ring {
            self.ring.restart(from.len() - self.kept_rows(from.len()));
            self.ring.restore(rows)?;
        }
        sink.map_or(Ok(()), |rows| self.sink.restore(rows))
    }

    fn reset(&mut self) {
        self.ring.restart(0);
        self.sink.restart(0);
        self.ledger.clear();
    }

    fn footprint(&self) -> Footprint {
        let rows = self.kept_rows(self.len()) + self.sink_rows(self.len());
        let live = rows * self.ring.row_bytes();
        let capacity = self.ring.capacity() + self.sink.capacity();
        Footprint {
            live,
            records: 0,
            reserve: capacity * self.ring.row_bytes() - live,
        }
    }
}

impl AttentionCache for RotatingKvCache {
    fn layout(&self) -> &AttentionLayout {
        self.ring.layout()
    }

    fn append(&mut self, keys: &Tensor, values: &Tensor) -> Result<()> {
        let rows = self.ring.check(keys, values)?;
        let (old, new) = (self.len(), self.len() + rows);
        // What the call's first row, a restore and a trim within the slack can still ask for.
        let earliest = self
            .ledger
            .open_at()
            .unwrap_or(old)
            .min(new.saturating_sub(self.slack))
            .min(old);
        self.append_sink(keys, values)?;
        if let Err(error) = self.ring.append(keys, values) {
            self.sink.truncate(old);
            return Err(error);
        }
        self.ring.release_before(self.oldest_needed(earliest));
        Ok(())
    }

    fn view(&self) -> Result<KvView> {
        let mut blocks: Vec<KvBlock> = self.sink.view(0)?;
        blocks.extend(self.ring.view(self.sink.end())?);
        Ok(KvView {
            blocks,
            window: Some(self.window.window),
            sink: self.window.sink,
        })
    }
}
