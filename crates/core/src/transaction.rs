//! A guard that takes tokens back unless told to keep them.

use crate::{Cache, CacheStack, Checkpoint, Error, Result};

/// An open checkpoint that is restored when the guard is dropped.
///
/// An error, a panic or an early return between [`begin`](Transaction::begin) and [`keep`](Transaction::keep) leaves the
/// cache as it was at `begin`. Only a kernel that is cut off by a panic while it writes a layer's state cannot be undone: that
/// cache is [torn](crate::Error::Torn), and says so.
///
/// ```
/// use recant_core::{AttentionCache, AttentionLayout, Cache, KvCache, Transaction};
/// use recant_core::candle::{DType, Device, Tensor};
///
/// # fn main() -> recant_core::Result<()> {
/// let layout = AttentionLayout { kv_heads: 1, head_dim: 2, dtype: DType::F32 };
/// let mut cache = KvCache::new(layout, &Device::Cpu);
/// let rows = Tensor::zeros((3, 1, 2), DType::F32, &Device::Cpu)?;
///
/// let mut round = Transaction::begin(&mut cache)?;
/// round.cache().append(&rows, &rows)?;
/// round.keep(1)?;
/// assert_eq!(cache.len(), 1);
///
/// let mut round = Transaction::begin(&mut cache)?;
/// round.cache().append(&rows, &rows)?;
/// drop(round);
/// assert_eq!(cache.len(), 1);
/// # Ok(())
/// # }
/// ```
#[must_use = "dropping a transaction takes its tokens back"]
pub struct Transaction<'a, C: Cache + ?Sized = CacheStack> {
    cache: &'a mut C,
    /// Present until the transaction has ended.
    checkpoint: Option<Checkpoint>,
}

impl<'a, C: Cache + ?Sized> Transaction<'a, C> {
    /// Opens a checkpoint.
    ///
    /// # Errors
    /// What [`Cache::checkpoint`] says.
    pub fn begin(cache: &'a mut C) -> Result<Self> {
        let checkpoint = Some(cache.checkpoint()?);
        Ok(Self { cache, checkpoint })
    }

    /// The cache, to be fed.
    pub fn cache(&mut self) -> &mut C {
        self.cache
    }

    /// Tokens fed since the checkpoint.
    pub fn fed(&self) -> usize {
        let start = self.checkpoint.as_ref().map_or(0, Checkpoint::len);
        self.cache.len().saturating_sub(start)
    }

    /// Keeps the first `n` of the tokens fed, drops the others and commits.
    ///
    /// # Errors
    /// Fewer were fed, or the cache refuses to trim; everything is then taken back.
    pub fn keep(mut self, n: usize) -> Result<()> {
        let fed = self.fed();
        if n > fed {
            return Err(Error::Checkpoint(format!(
                "{n} tokens were to be kept, but {fed} were fed"
            )));
        }
        self.cache.trim(fed - n)?;
        if let Some(checkpoint) = self.checkpoint.take() {
            self.cache.commit(checkpoint);
        }
        Ok(())
    }
}

impl<C: Cache + ?Sized> Drop for Transaction<'_, C> {
    fn drop(&mut self) {
        if let Some(checkpoint) = self.checkpoint.take() {
            // A cache that cannot be restored is torn or uneven, and says so to whoever uses it next.
            let _ = self.cache.restore(&checkpoint);
            self.cache.commit(checkpoint);
        }
    }
}
