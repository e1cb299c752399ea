//! The cache traits. Their documentation is the specification; `recant-testkit` checks implementations against it.

use candle_core::Tensor;
use std::ops::Range;

use crate::{AttentionLayout, Checkpoint, RecurrentLayout, Result, Snapshot};

/// Bytes that a cache occupies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Footprint {
    /// The state of the tokens held.
    pub live: usize,
    /// What is kept so that tokens can be taken back.
    pub records: usize,
    /// Allocated and unused.
    pub reserve: usize,
}

impl Footprint {
    /// All bytes together.
    pub fn total(&self) -> usize {
        self.live + self.records + self.reserve
    }
}

impl std::iter::Sum for Footprint {
    fn sum<I: Iterator<Item = Self>>(parts: I) -> Self {
        parts.fold(Self::default(), |a, b| Self {
            live: a.live + b.live,
            records: a.records + b.records,
            reserve: a.reserve + b.reserve,
        })
    }
}

/// State that a model keeps for one sequence in one layer, or in all of them.
///
/// # The law
/// What a cache holds is a function of the tokens fed and kept, and of nothing else: not of how many came in one call,
/// and not of tokens that were fed and then trimmed or restored away. Equality is of bits: two caches of one kind with
/// the same history of kept tokens give equal [`snapshot`](Cache::snapshot)s.
///
/// # Words
/// *Length*: tokens held. *Checkpoint*: a place to come back to. *Trim*: drop the newest tokens, exactly. *Record*: what
/// is kept for a token so that it can be dropped. *Commit*: give up the way back. *Settle*: fold kept records into the
/// state.
///
/// # After an error
/// The cache is as it was before the call. A cache whose kernel was cut off in mid-write answers
/// [`Error::Torn`](crate::Error::Torn) to everything but [`reset`](Cache::reset) and [`load`](Cache::load).
///
/// # Checkpoints
/// At most one is open. While it is, no trim goes below it. It ends by [`commit`](Cache::commit), by
/// [`reset`](Cache::reset) or by [`load`](Cache::load); [`restore`](Cache::restore) leaves it open.
pub trait Cache: Send {
    /// What kind of cache this is, in a word or two, for messages and files: `kv`, `rotating-kv`, `arrays`.
    fn kind(&self) -> &str;

    /// Tokens held. Recurrent caches have a length too, though it cannot be read off their arrays.
    fn len(&self) -> usize;

    /// True when no tokens are held.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many of the newest tokens [`trim`](Cache::trim) can drop right now. `trim(n)` succeeds exactly for
    /// `n <= trimmable()`.
    fn trimmable(&self) -> usize;

    /// Drops the newest `n` tokens, as though they had never been fed.
    ///
    /// # Errors
    /// [`Error::Trim`](crate::Error::Trim) if `n` is more than [`trimmable`](Cache::trimmable). Never fewer than asked.
    fn trim(&mut self, n: usize) -> Result<()>;

    /// Opens a checkpoint at the present length. From here on, tokens can be taken back.
    ///
    /// # Errors
    /// One is open already.
    fn checkpoint(&mut self) -> Result<Checkpoint>;

    /// Goes back to `to`: every token fed since is dropped. The checkpoint stays open.
    ///
    /// # Errors
    /// `to` is not this cache's open checkpoint.
    fn restore(&mut self, to: &Checkpoint) -> Result<()>;

    /// Gives up the way back to `checkpoint` and keeps what is held. A checkpoint that is not open is ignored.
    fn commit(&mut self, checkpoint: Checkpoint);

    /// The state as owned, settled arrays that share no storage with the cache. It depends only on the tokens held.
    fn snapshot(&self) -> Result<Snapshot>;

    /// Refuses a snapshot that [`load`](Cache::load) could not take: another kind, shape, type or setting.
    ///
    /// A stack asks every layer before it loads any, so `load` must take what this accepts.
    fn fits(&self, from: &Snapshot) -> Result<()>;

    /// Takes on the state of a snapshot, by copy. An open checkpoint ends.
    ///
    /// # Errors
    /// What [`fits`](Cache::fits) says; the cache is then unchanged.
    fn load(&mut self, from: &Snapshot) -> Result<()>;

    /// Forgets everything: length 0, no checkpoint. Allocations may be kept.
    fn reset(&mut self);

    /// Bytes held.
    fn footprint(&self) -> Footprint;

    /// Refuses, before anything changes, a call of `tokens` tokens that the cache could not take.
    ///
    /// A model asks every layer before it feeds any, so a cache with a limit of its own must answer here. The default
    /// has no limit.
    fn admit(&self, tokens: usize) -> Result<()> {
        let _ = tokens;
        Ok(())
    }
}

/// Keys and values at consecutive positions.
///
/// # Shapes
/// `keys` and `values`: `[rows, kv_heads, head_dim]`, contiguous, with at least as many rows as are valid.
#[derive(Debug, Clone)]
pub struct KvBlock {
    /// Position of the first row.
    pub start: usize,
    /// Valid rows.
    pub rows: usize,
    /// Keys, after their norm and rotation.
    pub keys: Tensor,
    /// Values.
    pub values: Tensor,
}

/// What attention reads: blocks in ascending order of position, and which of their rows a query may see.
///
/// The row at position `p` sees the key at position `j` when `j <= p` and, if there is a window, `p - j < window` or
/// `j < sink`. Blocks may hold rows that no query sees, but must hold every row that one does. Where blocks are cut does
/// not matter: attention accumulates by position.
#[derive(Debug, Clone)]
pub struct KvView {
    /// The blocks.
    pub blocks: Vec<KvBlock>,
    /// How many of the newest positions a row sees, its own included. `None`: all.
    pub window: Option<usize>,
    /// How many of the first positions stay visible outside the window.
    pub sink: usize,
}

/// Keys and values of one attention layer, for one sequence.
pub trait AttentionCache: Cache {
    /// Shape of a row.
    fn layout(&self) -> &AttentionLayout;

    /// Appends rows at positions `len()..len() + tokens`.
    ///
    /// # Shapes
    /// `keys`, `values`: `[tokens, kv_heads, head_dim]`, of the layout's type. They are copied in.
    ///
    /// # Errors
    /// Another shape or type.
    fn append(&mut self, keys: &Tensor, values: &Tensor) -> Result<()>;

    /// The rows held, readable until the next call that changes the cache.
    ///
    /// Every row that the newest append's queries may see is in it, the oldest query's window included.
    fn view(&self) -> Result<KvView>;
}

/// Some rows of one call's records.
///
/// # Shapes
/// `arrays[i]`: `[n, ..layout.records[i].shape]` with `n >= rows.end`.
#[derive(Debug, Clone)]
pub struct RecordSlice {
    /// The recorded arrays, in the layout's order.
    pub arrays: Vec<Tensor>,
    /// Which of their rows count.
    pub rows: Range<usize>,
}

/// What a recurrent layer needs for one call: see [`RecurrentCache::begin`].
#[derive(Debug)]
pub struct RecurrentStep {
    /// The state before the records in `fold`, in the layout's order. A kernel may write these arrays in place. On the CPU they are
    /// worked on faster if they begin with a cache line, as those of [`ArraysCache`](crate::ArraysCache) do.
    pub arrays: Vec<Tensor>,
    /// Records of kept tokens, to be folded into the state for good.
    pub fold: Vec<RecordSlice>,
    /// Records of tokens since the checkpoint, to be applied after `fold` but not written to the state.
    pub replay: Vec<RecordSlice>,
    /// Whether the call's own tokens must be recorded and kept out of the state (true), or folded in (false).
    pub recording: bool,
}

impl RecurrentStep {
    /// Whether the arrays change: there is something to fold, or the call is not recorded.
    pub fn writes(&self) -> bool {
        !self.fold.is_empty() || !self.recording
    }
}

/// State of one recurrent layer, for one sequence: arrays, and a journal of records since.
///
/// A call goes `begin`, kernel, then `finish`, or `abandon` if the kernel refused before it wrote anything. A cache
/// left between `begin` and `finish` is torn if the step [writes](RecurrentStep::writes).
pub trait RecurrentCache: Cache {
    /// Arrays and records.
    fn layout(&self) -> &RecurrentLayout;

    /// Hands out what a call of `tokens` tokens works on.
    ///
    /// # Errors
    /// The tokens could not be recorded ([`admit`](Cache::admit)), or the cache is torn.
    fn begin(&mut self, tokens: usize) -> Result<RecurrentStep>;

    /// Takes the results of the call that was begun.
    ///
    /// `arrays` are the state after `fold`, and after the call's tokens too if it was not recorded; they may be the
    /// tensors that `begin` gave, written in place. `records` has one array `[tokens, ..]` for each of the layout's
    /// records if the call was recorded, and is empty if not.
    ///
    /// # Errors
    /// Another number, shape or type of arrays. The cache is then torn if the step writes.
    fn finish(&mut self, arrays: Vec<Tensor>, records: Vec<Tensor>) -> Result<()>;

    /// Ends a call whose kernel wrote nothing.
    fn abandon(&mut self);
}
