//! Checkpoints, and the bookkeeping that every cache kind shares.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::{Error, Result};

/// A place to come back to, given by [`Cache::checkpoint`](crate::Cache::checkpoint).
///
/// It belongs to one cache and is good until that cache commits it, resets or loads a snapshot. It holds no data: the
/// cache keeps what it needs. A stack's checkpoint holds one of each layer.
#[derive(Debug)]
#[must_use = "a checkpoint that is neither committed nor restored keeps the cache recording"]
pub struct Checkpoint {
    owner: u64,
    serial: u64,
    len: usize,
    parts: Vec<Checkpoint>,
}

impl Checkpoint {
    /// Tokens held when it was made.
    // A length of zero is nothing special here.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The checkpoints of the parts, for a cache made of caches.
    pub fn parts(&self) -> &[Checkpoint] {
        &self.parts
    }

    pub(crate) fn into_parts(self) -> Vec<Checkpoint> {
        self.parts
    }
}

/// Which checkpoint of a cache is open. Every cache kind keeps one, so that all follow the same rules:
/// one open checkpoint at a time, refused if it is another cache's or an older one.
#[derive(Debug)]
pub struct Ledger {
    owner: u64,
    serial: u64,
    open: Option<usize>,
}

impl Default for Ledger {
    fn default() -> Self {
        Self::new()
    }
}

impl Ledger {
    /// A ledger with no open checkpoint and an identity of its own.
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self {
            owner: NEXT.fetch_add(1, Ordering::Relaxed),
            serial: 0,
            open: None,
        }
    }

    /// Length at the open checkpoint.
    pub fn open_at(&self) -> Option<usize> {
        self.open
    }

    /// Opens a checkpoint at `len` tokens.
    ///
    /// # Errors
    /// One is open already.
    pub fn open(&mut self, len: usize) -> Result<Checkpoint> {
        self.open_with(len, Vec::new())
    }

    pub(crate) fn open_with(&mut self, len: usize, parts: Vec<Checkpoint>) -> Result<Checkpoint> {
        self.can_open()?;
        self.serial += 1;
        self.open = Some(len);
        Ok(Checkpoint {
            owner: self.owner,
            serial: self.serial,
            len,
            parts,
        })
    }

    /// Refuses a second open checkpoint.
    pub fn can_open(&self) -> Result<()> {
        match self.open {
            None => Ok(()),
            Some(len) => Err(Error::Checkpoint(format!(
                "one is open already, at {len} tokens; commit it before opening another"
            ))),
        }
    }

    /// Refuses a checkpoint that is not the open one of this cache.
    pub fn verify(&self, checkpoint: &Checkpoint) -> Result<()> {
        if checkpoint.owner != self.owner {
            return Err(Error::Checkpoint("it was made by another cache".to_owned()));
        }
        if self.open.is_none() || checkpoint.serial != self.serial {
            return Err(Error::Checkpoint(
                "it is no longer open: it was committed, or the cache was reset or loaded since".to_owned(),
            ));
        }
        Ok(())
    }

    /// Closes `checkpoint` if it is the open one; otherwise does nothing. True when it was.
    pub fn close(&mut self, checkpoint: &Checkpoint) -> bool {
        let ours = self.verify(checkpoint).is_ok();
        if ours {
            self.open = None;
        }
        ours
    }

    /// Forgets the open checkpoint: for `reset` and `load`.
    pub fn clear(&mut self) {
        self.open = None;
    }
}
