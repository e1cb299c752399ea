//! What a language model is to the rest of the library.

use std::sync::Arc;

use candle_core::Tensor;

use crate::{largest, Cache, CacheOptions, CacheStack, Cancel, Candidate, Error, Result, StackLayout};

/// Which rows of a segment logits are wanted for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rows {
    /// None: prefill up to the last chunk.
    None,
    /// The last row.
    Last,
    /// Every row.
    All,
}

impl Rows {
    /// How many of `tokens` rows that is.
    pub fn count(self, tokens: usize) -> usize {
        match self {
            Self::None => 0,
            Self::Last => tokens.min(1),
            Self::All => tokens,
        }
    }
}

/// Which of a model's last hidden rows a drafter is fed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Hidden {
    /// After the final norm: what the head sees.
    PostNorm,
    /// Before the final norm: the residual stream after the last layer.
    PreNorm,
}

/// What is wanted of rows' logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Readout {
    /// All of them.
    All,
    /// The `count` largest among the first `among`, as [`largest`] gives them: without writing the others, where a model can.
    Largest {
        /// How many.
        count: usize,
        /// Ids from here on are passed over.
        among: usize,
    },
}

/// One sequence's share of a call: new tokens, and the caches that hold those before them.
#[derive(Debug)]
pub struct Segment<'a> {
    /// The new tokens, at least one.
    pub tokens: &'a [u32],
    /// The sequence's caches.
    pub caches: &'a mut CacheStack,
    /// Rows to give logits for.
    pub logits: Rows,
    /// What to give of them.
    pub readout: Readout,
    /// Which hidden rows of all tokens to give, if any.
    pub hidden: Option<Hidden>,
    /// A call of which all segments are cancelled stops as soon as the model looks.
    pub cancel: Option<&'a Cancel>,
}

impl<'a> Segment<'a> {
    /// A segment that wants all logits of the given rows and no hidden rows.
    pub fn new(tokens: &'a [u32], caches: &'a mut CacheStack, logits: Rows) -> Self {
        Self {
            tokens,
            caches,
            logits,
            readout: Readout::All,
            hidden: None,
            cancel: None,
        }
    }
}

/// What a call gives one segment.
#[derive(Debug, Clone)]
pub struct SegmentOutput {
    /// `[rows wanted, vocab_size]` in f32; absent when none were wanted, or only the largest and the model gives those.
    pub logits: Option<Tensor>,
    /// The largest logits of each row wanted, if only those were. A model that cannot give them gives all logits.
    pub largest: Option<Vec<Vec<Candidate>>>,
    /// `[tokens, hidden_size]`, of the kind asked for; absent when not wanted.
    pub hidden: Option<Tensor>,
}

impl SegmentOutput {
    /// The logits that were asked for.
    ///
    /// # Errors
    /// The model gave none.
    pub fn logits(&self) -> Result<&Tensor> {
        self.logits
            .as_ref()
            .ok_or_else(|| Error::mismatch("a segment's output", "logits", "none: ask for rows"))
    }

    /// The largest logits that were asked for, in whichever form the model gives them. The arguments are those that were
    /// asked with.
    ///
    /// # Errors
    /// The model gave neither them nor logits.
    pub fn largest(&self, count: usize, among: usize) -> Result<Vec<Vec<Candidate>>> {
        match &self.largest {
            Some(largest) => Ok(largest.clone()),
            None => Ok(largest(self.logits()?, count, among)?),
        }
    }

    /// The hidden rows that were asked for.
    ///
    /// # Errors
    /// The model gave none.
    pub fn hidden(&self) -> Result<&Tensor> {
        self.hidden
            .as_ref()
            .ok_or_else(|| Error::mismatch("a segment's output", "hidden rows", "none: ask for them"))
    }
}

/// What a call gives: one entry a segment, in order.
#[derive(Debug, Clone)]
pub struct Output {
    /// The segments' outputs.
    pub segments: Vec<SegmentOutput>,
}

impl Output {
    /// What a call of one segment gave it.
    ///
    /// # Errors
    /// The model gave another number of outputs.
    pub fn only(&self) -> Result<&SegmentOutput> {
        match self.segments.as_slice() {
            [segment] => Ok(segment),
            segments => Err(Error::mismatch(
                "outputs of a call of one segment",
                1,
                segments.len(),
            )),
        }
    }
}

/// What is known of a model without running it.
#[derive(Debug, Clone)]
pub struct ModelSpec {
    /// Family, as checkpoints name it: `qwen3_5`.
    pub family: String,
    /// Rows of the embedding and of the whole output head: ids below it may be fed. The tokenizer's may end earlier.
    pub vocab_size: usize,
    /// Width of a hidden row.
    pub hidden_size: usize,
    /// Longest sequence, in tokens.
    pub max_positions: usize,
    /// Ids that end a text.
    pub eos: Vec<u32>,
    /// Layers' caches, the model's fingerprint and the device.
    pub layout: Arc<StackLayout>,
}

impl ModelSpec {
    /// [`Error::Cancelled`] if nobody waits for a call any more: for models to ask between two layers.
    pub fn check_wanted(batch: &[Option<&Cancel>]) -> Result<()> {
        if !batch.is_empty()
            && batch
                .iter()
                .all(|cancel| cancel.is_some_and(Cancel::is_cancelled))
        {
            return Err(Error::Cancelled);
        }
        Ok(())
    }

    fn not_offered(&self, what: &'static str) -> Error {
        Error::NotOffered {
            family: self.family.clone(),
            what,
        }
    }

    /// Refuses a call that the model could not carry out, before anything changes.
    ///
    /// # Errors
    /// An empty segment, caches of another model, a token outside the vocabulary, a sequence longer than the model takes,
    /// or a cache that does not admit the tokens.
    pub fn check(&self, batch: &[Segment<'_>]) -> Result<()> {
        for segment in batch {
            let len = segment.caches.len();
            segment.caches.belongs_to(&self.layout)?;
            if segment.tokens.is_empty() {
                return Err(Error::mismatch("tokens of a segment", "at least 1", 0));
            }
            if len + segment.tokens.len() > self.max_positions {
                return Err(Error::Context {
                    len,
                    tokens: segment.tokens.len(),
                    max: self.max_positions,
                });
            }
            for (offset, &id) in segment.tokens.iter().enumerate() {
                if id as usize >= self.vocab_size {
                    return Err(Error::Token {
                        id,
                        position: len + offset,
                        vocab_size: self.vocab_size,
                    });
                }
            }
            segment.caches.admit(segment.tokens.len())?;
        }
        Ok(())
    }
}

/// A causal language model whose state lives in caches that the caller owns.
///
/// # The law
/// A token's logits, and what its caches hold after it, depend only on the model, the device and the tokens before it:
/// never on how many tokens came in the call, which segments shared it, or how many threads ran it. Equality is of bits.
/// An implementation that keeps this only for some groupings says for which.
pub trait LanguageModel: Send + Sync {
    /// What is known of it without running it.
    fn spec(&self) -> &ModelSpec;

    /// Empty caches for one sequence.
    fn new_caches(&self, options: &CacheOptions) -> Result<CacheStack> {
        CacheStack::standard(Arc::clone(&self.spec().layout), options)
    }

    /// Feeds each segment's tokens to its caches.
    ///
    /// # Errors
    /// What [`ModelSpec::check`] refuses leaves all caches unchanged. An error in the middle, from a device or a cache
    /// written elsewhere, leaves a stack without an open checkpoint uneven, which it says when it is used again; under a
    /// [`Transaction`](crate::Transaction) the checkpoint comes back.
    fn forward(&self, batch: &mut [Segment<'_>]) -> Result<Output>;

    /// Rows of the embedding: what `forward` begins with. A drafter that shares it asks here.
    ///
    /// # Shapes
    /// `[ids, hidden_size]`, f32.
    ///
    /// # Errors
    /// An id outside the vocabulary; or [`Error::NotOffered`], which is what this does unless a model overrides it.
    fn embed(&self, ids: &[u32]) -> Result<Tensor> {
        let _ = ids;
        Err(self.spec().not_offered("rows of its embedding (`embed`)"))
    }

    /// Logits of rows that come after the final norm: what `forward` ends with. A drafter that shares the head asks here.
    /// The bits are those that `forward` gives for the same rows.
    ///
    /// # Shapes
    /// `hidden`: `[rows, hidden_size]`, f32. Result: `[rows, vocab_size]`, f32; of a model from
    /// [`with_head_rows`](Self::with_head_rows) `[rows, ids]`.
    ///
    /// # Errors
    /// Rows of another width; or [`Error::NotOffered`], which is what this does unless a model overrides it.
    fn project(&self, hidden: &Tensor) -> Result<Tensor> {
        let _ = hidden;
        Err(self.spec().not_offered("its head on its own (`project`)"))
    }

    /// The largest logits of such rows, as [`largest`] gives them.
    ///
    /// # Errors
    /// As [`project`](Self::project) says.
    fn project_largest(&self, hidden: &Tensor, count: usize, among: usize) -> Result<Vec<Vec<Candidate>>> {
        Ok(largest(&self.project(hidden)?, count, among)?)
    }

    /// The same model with fewer logits: those of `ids` only, in that order, bit for bit those of the whole head. It shares
    /// all weights but the rows of the head, and takes the same caches.
    ///
    /// Entry `i` of a row of logits is that of token `ids[i]`, so whoever chooses from it has to map indices back. Its
    /// `spec().vocab_size` stays that of the whole vocabulary: any token may be fed. Ids are those of the whole
    /// vocabulary also where the model has a reduced head already.
    ///
    /// # Errors
    /// No ids, or one outside the vocabulary; or [`Error::NotOffered`], which is what this does unless a model overrides it.
    fn with_head_rows(&self, ids: &[u32]) -> Result<Arc<dyn LanguageModel>> {
        let _ = ids;
        Err(self
            .spec()
            .not_offered("logits of chosen tokens only (`with_head_rows`)"))
    }
}
