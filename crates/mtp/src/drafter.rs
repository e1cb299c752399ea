//! Drafting with a head.

use std::sync::Arc;

use recant_core::candle::Tensor;
use recant_core::{Cache, CacheStack, Checkpoint, Hidden, LanguageModel, ModelSpec, Snapshot, Transaction};
use recant_generate::{caches_of, DraftHead, DraftVocabulary, Drafter, Draws, Error, Proposed, Result};

use crate::MtpHead;

/// Name of the newest row in a snapshot.
const NEWEST: &str = "newest";

/// Hidden rows that may wait before they are fed without being asked for.
const WAITING: usize = 64;

/// Drafts with a multi-token-prediction head.
///
/// The head's caches hold a row for every pair of a target's hidden row and the token after it. Drafts beyond the first are
/// chained on rows of the head's own; after each round those are taken back and the pairs of true hidden rows fed in their
/// place, so that what the head has seen never depends on what was drafted.
pub struct MtpDrafter {
    head: MtpHead,
    hidden: Hidden,
    caches: CacheStack,
    vocabulary: Option<DraftVocabulary>,
    /// What proposes: the target's head, or some rows of it. Known once there is a target.
    chooser: DraftHead,
    /// Pairs that the caches do not hold yet.
    waiting: Vec<(Tensor, Vec<u32>)>,
    /// The head's row for the newest pair, from which the first draft comes.
    newest: Option<Tensor>,
    /// Rows after this are chained on drafts.
    chain: Option<Checkpoint>,
    /// What went wrong where nothing could be returned.
    failed: Option<Error>,
}

impl MtpDrafter {
    /// A drafter fed with the target's hidden rows of the given kind.
    ///
    /// # Errors
    /// No caches can be made.
    pub fn new(head: MtpHead, hidden: Hidden) -> crate::Result<Self> {
        Ok(Self {
            caches: head.new_caches()?,
            vocabulary: None,
            chooser: DraftHead::whole(Arc::new(head.target().clone())),
            head,
            hidden,
            waiting: Vec::new(),
            newest: None,
            chain: None,
            failed: None,
        })
    }

    /// Drafts only tokens of a vocabulary, and computes only their logits: the target's whole head is a large share of a
    /// draft's cost.
    #[must_use]
    pub fn with_vocabulary(mut self, vocabulary: DraftVocabulary) -> Self {
        self.vocabulary = Some(vocabulary);
        self
    }

    /// The head's caches. Once a proposal was observed and the next one asked for, they begin with a row for each pair of
    /// the text.
    pub fn caches(&self) -> &CacheStack {
        &self.caches
    }

    fn waiting_rows(&self) -> usize {
        self.waiting.iter().map(|(_, tokens)| tokens.len()).sum()
    }

    /// Takes back the rows that were chained on drafts.
    fn cut_chain(&mut self) -> Result<()> {
        if let Some(checkpoint) = self.chain.take() {
            let restored = self.caches.restore(&checkpoint);
            self.caches.commit(checkpoint);
            restored?;
        }
        Ok(())
    }

    /// Feeds all pairs that wait.
    fn catch_up(&mut self) -> Result<()> {
        if self.waiting.is_empty() {
            return Ok(());
        }
        let hidden: Vec<&Tensor> = self.waiting.iter().map(|(hidden, _)| hidden).collect();
        let hidden = Tensor::cat(&hidden, 0)?;
        let tokens: Vec<u32> = self
            .waiting
            .iter()
            .flat_map(|(_, tokens)| tokens)
            .copied()
            .collect();
        let mut feeding = Transaction::begin(&mut self.caches)?;
        let rows = self
            .head
            .forward(&hidden, &tokens, feeding.cache())
            .map_err(other)?;
        feeding.keep(tokens.len())?;
        // A copy, since a view would keep all rows alive.
        self.newest = Some(rows.narrow(0, tokens.len() - 1, 1)?.force_contiguous()?);
        self.waiting.clear();
        Ok(())
    }

    /// Adds pairs: tokens, and the hidden row before each.
    fn pair(&mut self, tokens: &[u32], hidden: Option<&Tensor>) -> Result<()> {
        let hidden = hidden.ok_or_else(|| {
            Error::Drafter("it was told of new tokens without the target's hidden rows".to_owned())
        })?;
        // A copy, since a view would keep all that was computed beside it alive.
        self.waiting.push((hidden.force_contiguous()?, tokens.to_vec()));
        Ok(())
    }

    /// What a snapshot of its caches is called: those of another head are none.
    fn state(&self) -> String {
        format!("mtp {} {:?}", self.caches.layout().fingerprint, self.hidden)
    }

    fn extend(&mut self, k: usize, draws: &Draws<'_>) -> Result<Vec<Proposed>> {
        let Some(newest) = self.newest.clone() else {
            return Ok(Vec::new());
        };
        let mut proposed = vec![self.chooser.choose_after(&newest, draws, &[])?];
        if k > 1 {
            self.chain = Some(self.caches.checkpoint()?);
        }
        let mut row = newest;
        while proposed.len() < k {
            let last = proposed[proposed.len() - 1].id;
            row = self
                .head
                .forward(&row, &[last], &mut self.caches)
                .map_err(other)?;
            proposed.push(self.chooser.choose_after(&row, draws, &proposed)?);
        }
        Ok(proposed)
    }
}

fn other(error: crate::Error) -> Error {
    match error {
        crate::Error::Core(error) => error.into(),
        crate::Error::Generate(error) => error,
        error => recant_core::Error::other(error).into(),
    }
}

impl Drafter for MtpDrafter {
    fn attach(&mut self, target: &ModelSpec, vocab: usize) -> Result<()> {
        let own = self.head.target().spec();
        if own.layout.fingerprint != target.layout.fingerprint {
            return Err(Error::Drafter(format!(
                "the multi-token-prediction head was loaded for the model {}, the target is {}",
                own.layout.fingerprint, target.layout.fingerprint
            )));
        }
        let model: Arc<dyn LanguageModel> = Arc::new(self.head.target().clone());
        self.chooser = DraftHead::of(&model, self.vocabulary.as_ref(), target, vocab)?;
        Ok(())
    }

    fn prefill(&mut self, tokens: &[u32], hidden: Option<&Tensor>) -> Result<()> {
        self.cut_chain()?;
        // The first token of a text has no row before it, and is in no pair.
        let first = self.caches.is_empty() && self.waiting.is_empty() && tokens.len() == 1;
        if hidden.is_some() || !first {
            self.pair(tokens, hidden)?;
        }
        self.catch_up()
    }

    fn propose(&mut self, k: usize) -> Result<Vec<u32>> {
        let proposed = self.draw(k, &Draws::greedy())?;
        Ok(proposed.into_iter().map(|token| token.id).collect())
    }

    fn draw(&mut self, k: usize, draws: &Draws<'_>) -> Result<Vec<Proposed>> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        self.cut_chain()?;
        if k == 0 {
            return Ok(Vec::new());
        }
        self.catch_up()?;
        let proposed = self.extend(k, draws);
        if proposed.is_err() {
            self.cut_chain()?;
        }
        proposed
    }

    fn observe(&mut self, tokens: &[u32], hidden: Option<&Tensor>) {
        let taken = self.cut_chain().and_then(|()| {
            self.pair(tokens, hidden)?;
            if self.waiting_rows() > WAITING {
                self.catch_up()?;
            }
            Ok(())
        });
        if let Err(error) = taken {
            self.failed = Some(error);
        }
    }

    fn wants_hidden(&self) -> Option<Hidden> {
        Some(self.hidden)
    }

    fn snapshot(&mut self) -> Result<Option<Snapshot>> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        self.cut_chain()?;
        self.catch_up()?;
        let snapshot =
            Snapshot::new(self.state(), self.caches.len() + 1).with_parts(vec![self.caches.snapshot()?]);
        Ok(Some(match &self.newest {
            Some(newest) => snapshot.with_array(NEWEST, newest.copy()?),
            None => snapshot,
        }))
    }

    fn resume(&mut self, tokens: &[u32], state: Option<&Snapshot>) -> Result<()> {
        self.reset();
        let Some(state) = state else {
            return Err(Error::Drafter(
                "it follows the target's hidden rows and cannot take up a text without them".to_owned(),
            ));
        };
        let caches = caches_of(state, &self.state(), tokens.len())?;
        let newest = state.arrays().get(NEWEST);
        let row = [1, self.head.target().spec().hidden_size];
        if caches.is_empty() == newest.is_some() || newest.is_some_and(|newest| newest.dims() != row) {
            return Err(recant_core::Error::mismatch(
                "the newest row of a drafter's state",
                format!("{row:?}"),
                format!("{:?}", newest.map(Tensor::dims)),
            )
            .into());
        }
        self.caches.load(caches)?;
        self.newest = newest.cloned();
        Ok(())
    }

    fn reset(&mut self) {
        self.caches.reset();
        self.waiting.clear();
        self.newest = None;
        self.chain = None;
        self.failed = None;
    }
}
