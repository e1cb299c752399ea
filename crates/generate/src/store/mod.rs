//! Checkpoints of whole cache stacks, to be found again by the tokens that they hold.

mod files;
mod key;
#[cfg(test)]
mod tests;
mod tree;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use recant_core::{Error as CoreError, Snapshot};

use crate::Result;
use key::Key;
use tree::{bytes_of_tokens, Cut, Forest, Found, FoundDrafter, FoundEntry, Held, Outcome, Plan, Room};

/// The kind of a stack's snapshot.
const STACK: &str = "stack";

/// What a [`PromptStore`] is made with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreOptions {
    /// Most bytes that all entries together may take.
    pub budget: usize,
    /// While a prompt is read, its state is put at each multiple of so many tokens. 0 counts as 1.
    pub every: usize,
}

impl Default for StoreOptions {
    /// 1 GiB, and every 512 tokens.
    fn default() -> Self {
        Self {
            budget: 1 << 30,
            every: 512,
        }
    }
}

/// Figures of a [`PromptStore`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StoreStats {
    /// Entries held. Drafters' states are not counted.
    pub entries: usize,
    /// Bytes held: those of all arrays, and 4 for each token id.
    pub bytes: usize,
    /// Searches that found an entry that was taken.
    pub hits: u64,
    /// Searches that did not.
    pub misses: u64,
    /// Tokens of all entries that were taken.
    pub tokens_reused: u64,
    /// Entries that had to go so that others had room, likewise.
    pub evictions: u64,
}

/// What is stored for a text: its caches, and perhaps what a drafter knows.
#[derive(Debug, Clone)]
pub struct StoredState {
    /// Snapshot of the caches that hold the text.
    pub caches: Snapshot,
    /// The state of the drafter that was told it.
    pub drafter: Option<DrafterState>,
}

/// The state of a drafter.
///
/// If it has one part and that is the snapshot of a stack that holds exactly the text stored, rows in it are held once for all
/// entries that begin alike; a row may depend on as many tokens after its own as there are in `ahead`. Otherwise it is
/// held whole.
#[derive(Debug, Clone)]
pub struct DrafterState {
    /// Its own snapshot.
    pub snapshot: Snapshot,
    /// Tokens that it has been told beyond those stored: none, or the one that was pending. It serves only a prompt that goes
    /// on with them.
    pub ahead: Vec<u32>,
}

/// A stored prefix of a prompt.
#[derive(Debug, Clone)]
pub struct Hit {
    /// Tokens in it.
    pub tokens: usize,
    /// The state after them. If it has that of a drafter, the prompt goes on as that drafter was told.
    pub state: StoredState,
}

/// Checkpoints of whole cache stacks, to be found again by the tokens that they hold.
///
/// A clone is the same store, and all methods may be called from several threads at once. The longest stored prefix of a
/// prompt gives bit for bit the caches of a cold start, since stored arrays are never written to: caches copy what they load,
/// and an entry that is evicted while it is in use lives until its user lets go of it.
///
/// # What is held
/// Entries are kept in a tree by their tokens, one for each model and for each set of caches, by their kinds, settings, types and
/// devices. Rows of keys and values ([`Snapshot::with_rows`]) are held once for all entries that begin with the same tokens, so
/// the checkpoints of one text take as many rows as it has tokens. What belongs to an entry's last token alone is held for each
/// entry: the state of recurrent layers, the window of rotating caches, and caches of other crates that do not mark their rows.
/// States of drafters are held likewise beside the entries.
///
/// # Budget
/// The bytes of all arrays and token ids stay within [`StoreOptions::budget`] after every call: those entries go first that were not
/// used for longest. An entry goes alone; rows that other entries need stay. What is larger than the budget is not stored. The
/// store's own bookkeeping, some hundred bytes an array, is not counted.
///
/// # What it does not promise
/// The fingerprint must tell apart all models whose bits differ, and so must name the device if one store serves several.
///
/// # Example
/// ```
/// use recant_core::{Cache, CacheOptions, LanguageModel, Rows, Segment};
/// use recant_generate::{PromptStore, StoreOptions, StoredState};
/// # use recant_testkit::ScriptedModel;
///
/// # fn main() -> recant_generate::Result<()> {
/// # let model = ScriptedModel::new(1, 64);
/// let store = PromptStore::new(StoreOptions::default());
/// let fingerprint = &model.spec().layout.fingerprint;
/// let mut caches = model.new_caches(&CacheOptions::default())?;
/// model.forward(&mut [Segment::new(&[5, 6, 7], &mut caches, Rows::None)])?;
/// let state = StoredState { caches: caches.snapshot()?, drafter: None };
/// store.put(fingerprint, &[5, 6, 7], state)?;
///
/// let mut others = model.new_caches(&CacheOptions::default())?;
/// let prompt = [5, 6, 7, 8];
/// let hit = store.longest(fingerprint, &prompt, 3, &mut |hit| others.fits(&hit.state.caches).is_ok())?;
/// if let Some(hit) = hit {
///     others.load(&hit.state.caches)?;
/// }
/// assert_eq!(others.len(), 3);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct PromptStore {
    shared: Arc<Shared>,
}

struct Shared {
    options: StoreOptions,
    inner: Mutex<Inner>,
    /// Held while a folder is written.
    saving: Mutex<()>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared")
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Inner {
    forest: Forest,
    /// Those figures that are not counted by the forest.
    stats: StoreStats,
}

impl PromptStore {
    /// An empty store.
    pub fn new(options: StoreOptions) -> Self {
        Self {
            shared: Arc::new(Shared {
                options: StoreOptions {
                    every: options.every.max(1),
                    ..options
                },
                inner: Mutex::default(),
                saving: Mutex::default(),
            }),
        }
    }

    /// What it was made with.
    pub fn options(&self) -> &StoreOptions {
        &self.shared.options
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Nothing in this module panics while it holds the lock.
        self.shared.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The longest stored prefix of the first `most` tokens of `prompt`, for the model of fingerprint `model`.
    ///
    /// `fits` is asked, from the longest on, whether an entry would be taken: whether the session's caches
    /// [fit](recant_core::Cache::fits) it, and whether a drafter that needs its own state finds it. It is asked for an entry
    /// with each drafter's state that is stored with it, and then without. It may use the store. The entry taken counts as used.
    ///
    /// # Errors
    /// A tensor operation fails, or what somebody else's cache stored cannot be put together again.
    pub fn longest(
        &self,
        model: &str,
        prompt: &[u32],
        most: usize,
        fits: &mut dyn FnMut(&Hit) -> bool,
    ) -> Result<Option<Hit>> {
        let found = self.lock().forest.find(model, &prompt[..most.min(prompt.len())]);
        let mut entries: Vec<(&Found, &FoundEntry)> = found
            .iter()
            .flat_map(|found| found.entries.iter().map(move |entry| (found, entry)))
            .collect();
        entries.sort_by_key(|(_, entry)| std::cmp::Reverse(entry.tokens));
        for (found, entry) in entries {
            let drafters = self.lock().forest.find_drafters(model, prompt, entry.tokens);
            let mut hit = Hit {
                tokens: entry.tokens,
                state: StoredState {
                    caches: join(found, entry)?,
                    drafter: None,
                },
            };
            for drafter in drafters.iter().map(Some).chain([None]) {
                hit.state.drafter = match drafter {
                    Some(drafter) => Some(DrafterState {
                        snapshot: drafter.snapshot()?,
                        ahead: prompt[hit.tokens..hit.tokens + drafter.ahead].to_vec(),
                    }),
                    None => None,
                };
                if fits(&hit) {
                    let mut inner = self.lock();
                    if let Some(drafter) = drafter {
                        inner.forest.touch(drafter.entry.id);
                    }
                    inner.forest.touch(entry.id);
                    inner.stats.hits += 1;
                    inner.stats.tokens_reused += hit.tokens as u64;
                    return Ok(Some(hit));
                }
            }
        }
        self.lock().stats.misses += 1;
        Ok(None)
    }

    /// Stores the state after `tokens`. What is there already is not stored again, but counts as used; if it came without the
    /// state of this drafter, or with one that was told another next token, that is added. Nothing is stored for an empty text,
    /// nor what is larger than the budget.
    ///
    /// # Errors
    /// The caches do not hold exactly `tokens`, or rows are not as many as their snapshot says; nothing is then stored.
    pub fn put(&self, model: &str, tokens: &[u32], state: StoredState) -> Result<()> {
        let caches = &state.caches;
        if (caches.start(), caches.len()) != (0, tokens.len()) {
            let held = format!("{:?}", caches.start()..caches.len());
            return Err(CoreError::mismatch("tokens in the caches to store", tokens.len(), held).into());
        }
        let budget = self.shared.options.budget;
        let size = caches.bytes() + bytes_of_tokens(tokens.len());
        if tokens.is_empty() || size > budget {
            return Ok(());
        }
        if let Some(drafter) = &state.drafter {
            let apart = Apart::new(&drafter.snapshot, tokens.len());
            let text = [tokens, &drafter.ahead].concat();
            if size + apart.bytes() + bytes_of_tokens(text.len()) <= budget {
                let key = apart.key(model, drafter.ahead.len());
                // Before the model's caches, so that it is evicted before them.
                self.place(&key, &text, &apart.caches, Some(&apart.beside), true)?;
            }
        }
        self.place(&Key::of_model(model, caches), tokens, caches, None, true)?;
        Ok(())
    }

    /// Puts an entry; without `evict` only where there is room. True if it is stored.
    fn place(
        &self,
        key: &Key,
        text: &[u32],
        caches: &Snapshot,
        beside: Option<&Snapshot>,
        evict: bool,
    ) -> Result<bool> {
        if self.lock().forest.refresh(key, text) {
            return Ok(true);
        }
        let held = Held {
            caches: Arc::new(caches.after(caches.len())?),
            beside: beside.map(Snapshot::compact).transpose()?.map(Arc::new),
        };
        let mut room = Room {
            budget: self.shared.options.budget,
            evict,
            evicted: 0,
        };
        loop {
            let plan = self.lock().forest.plan(key, text);
            let cut = cut(key, caches, &plan)?;
            let mut inner = self.lock();
            let outcome = inner.forest.put(key, text, &plan, cut, held.clone(), &mut room);
            inner.stats.evictions += std::mem::take(&mut room.evicted);
            match outcome {
                Outcome::Stored => return Ok(true),
                Outcome::Full => return Ok(false),
                // Another thread put something at the same place in the meantime.
                Outcome::Stale => {}
            }
        }
    }

    /// Whether there is an entry of exactly these tokens, so that nobody makes a snapshot for nothing. It may be one of caches
    /// with other settings.
    pub fn contains(&self, model: &str, tokens: &[u32]) -> bool {
        self.lock().forest.contains(model, tokens)
    }

    /// Lets go of all entries. Figures of what was found and evicted stay.
    pub fn clear(&self) {
        // Freed after the lock is.
        let _all = std::mem::take(&mut self.lock().forest);
    }

    /// Figures.
    pub fn stats(&self) -> StoreStats {
        let inner = self.lock();
        StoreStats {
            entries: inner.forest.entries(),
            bytes: inner.forest.bytes(),
            ..inner.stats
        }
    }
}

/// Copies what a plan needs.
fn cut(key: &Key, caches: &Snapshot, plan: &Plan) -> Result<Cut> {
    let split = match &plan.split {
        Some((rows, at)) => {
            let at = key.row(*at);
            Some([
                Arc::new(rows.rows(rows.start()..at)?),
                Arc::new(rows.rows(at..rows.len())?),
            ])
        }
        None => None,
    };
    let tail = match plan.lacks_rows {
        true => Some(Arc::new(caches.rows(key.row(plan.tail)..caches.len())?)),
        false => None,
    };
    Ok(Cut { split, tail })
}

/// Puts an entry's caches together.
fn join(found: &Found, entry: &FoundEntry) -> Result<Snapshot> {
    let rows = found.rows[..entry.depth].iter().map(Arc::as_ref);
    let pieces: Vec<&Snapshot> = rows.chain([entry.held.caches.as_ref()]).collect();
    Ok(Snapshot::join(&pieces)?)
}

impl FoundDrafter {
    fn snapshot(&self) -> Result<Snapshot> {
        let apart = Apart {
            caches: join(&self.found, &self.entry)?,
            beside: match &self.entry.held.beside {
                Some(beside) => beside.as_ref().clone(),
                None => Snapshot::new("", 0),
            },
        };
        Ok(apart.together())
    }
}

/// A drafter's state taken apart: caches, and what is beside them.
struct Apart {
    caches: Snapshot,
    beside: Snapshot,
}

impl Apart {
    fn new(state: &Snapshot, tokens: usize) -> Self {
        match state.parts() {
            [caches] if (caches.kind(), caches.start(), caches.len()) == (STACK, 0, tokens) => Self {
                caches: caches.clone(),
                beside: state.clone().with_parts(Vec::new()),
            },
            _ => Self {
                caches: Snapshot::new(STACK, tokens),
                beside: state.clone(),
            },
        }
    }

    fn together(self) -> Snapshot {
        match self.caches.parts() {
            [] => self.beside,
            _ => self.beside.with_parts(vec![self.caches]),
        }
    }

    fn key(&self, model: &str, ahead: usize) -> Key {
        let both = vec![self.caches.clone(), self.beside.clone()];
        Key::of_drafter(model, &Snapshot::new("", 0).with_parts(both), ahead)
    }

    fn bytes(&self) -> usize {
        self.caches.bytes() + self.beside.bytes()
    }
}
