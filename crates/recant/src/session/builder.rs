//! Preparing a session.

use std::path::{Path, PathBuf};

use recant_core::{CacheOptions, CacheStack, Cancel, Hidden};
use recant_generate::{
    CombinedDrafter, Decoder, Depth, DraftVocabulary, Drafter, Error, LogitsProcessor, LogprobsOptions,
    ModelDrafter, NgramDrafter, PromptStore, Sampler, Sampling,
};
use recant_mtp::{HeadCheck, MtpDrafter};

use super::{Session, Stats};
use crate::heads::CheckedHead;
use crate::stop::TextOutput;
use crate::{Loaded, Result, Threads};

/// Tokens drafted in a round unless told otherwise.
const DRAFT_TOKENS: usize = 4;

/// Most tokens drafted in a round by [`SessionBuilder::auto`].
const AUTO_TOKENS: usize = 8;

/// Prepares a [`Session`]. Everything that cannot work is refused by [`build`](SessionBuilder::build).
#[must_use]
pub struct SessionBuilder {
    target: Loaded,
    drafter: Source,
    hidden: Hidden,
    vocabulary: Option<DraftVocabulary>,
    ngram: bool,
    depth: Depth,
    options: CacheOptions,
    caches: Option<CacheStack>,
    threads: Option<Threads>,
    ignore_eos: bool,
    sampling: Sampling,
    processors: Vec<Box<dyn LogitsProcessor>>,
    logprobs: Option<LogprobsOptions>,
    stops: Vec<String>,
    store: Option<PromptStore>,
    cancel: Cancel,
}

enum Source {
    None,
    Model(Loaded),
    /// The head in a folder; that of the target's own if none is named.
    Mtp(Option<PathBuf>),
    /// The head of the target's own folder, if it has one.
    Any,
    Own(Box<dyn Drafter>),
}

impl SessionBuilder {
    pub(crate) fn new(target: Loaded) -> Self {
        Self {
            target,
            drafter: Source::None,
            hidden: Hidden::PostNorm,
            vocabulary: None,
            ngram: false,
            depth: Depth::Fixed(DRAFT_TOKENS),
            options: CacheOptions::default(),
            caches: None,
            threads: None,
            ignore_eos: false,
            sampling: Sampling::default(),
            processors: Vec::new(),
            logprobs: None,
            stops: Vec::new(),
            store: None,
            cancel: Cancel::new(),
        }
    }

    /// Chooses tokens so: greedily unless set.
    pub fn sampling(mut self, sampling: Sampling) -> Self {
        self.sampling = sampling;
        self
    }

    /// Lets a processor change the logits before tokens are chosen, after those added before it.
    pub fn processor(mut self, processor: Box<dyn LogitsProcessor>) -> Self {
        self.processors.push(processor);
        self
    }

    /// Gives log-probabilities with the tokens.
    pub fn logprobs(mut self, logprobs: LogprobsOptions) -> Self {
        self.logprobs = Some(logprobs);
        self
    }

    /// Ends generation where one of these strings is complete. Nothing of it is shown, and the text ends with the token
    /// that completes it.
    pub fn stop<S: Into<String>>(mut self, stops: impl IntoIterator<Item = S>) -> Self {
        self.stops = stops.into_iter().map(Into::into).collect();
        self
    }

    /// Begins prompts where the store holds a beginning of theirs, and leaves checkpoints there: of prompts as they are read,
    /// and of each turn's end.
    pub fn prompt_store(mut self, store: &PromptStore) -> Self {
        self.store = Some(store.clone());
        self
    }

    /// Stops reading and generating when this is raised: between rounds, and between layers.
    pub fn cancel(mut self, cancel: &Cancel) -> Self {
        self.cancel = cancel.clone();
        self
    }

    /// Drafts with a smaller model of the same tokenizer. It may be a hybrid.
    pub fn draft(mut self, model: &Loaded) -> Self {
        self.drafter = Source::Model(model.clone());
        self
    }

    /// Drafts with the checkpoint's own multi-token-prediction head. Building the session measures once how often the head
    /// agrees with the target, over a short text: see [`Session::head_check`].
    pub fn mtp(mut self) -> Self {
        self.drafter = Source::Mtp(None);
        self
    }

    /// Drafts with a multi-token-prediction head from another folder, such as one that holds a head alone.
    pub fn mtp_from(mut self, path: impl AsRef<Path>) -> Self {
        self.drafter = Source::Mtp(Some(path.as_ref().to_owned()));
        self
    }

    /// Which hidden rows a multi-token-prediction head is fed: those after the final norm unless set.
    pub fn mtp_hidden(mut self, hidden: Hidden) -> Self {
        self.hidden = hidden;
        self
    }

    /// Drafts with what there is, as far as it pays: the text's own repetitions, and a draft model if one was given, else
    /// the checkpoint's multi-token-prediction head if it has one. Up to 8 tokens a round, as measured.
    pub fn auto(mut self) -> Self {
        if matches!(self.drafter, Source::None) {
            self.drafter = Source::Any;
        }
        self.ngram().auto_depth(AUTO_TOKENS)
    }

    /// Drafts with a drafter of one's own.
    pub fn drafter(mut self, drafter: Box<dyn Drafter>) -> Self {
        self.drafter = Source::Own(drafter);
        self
    }

    /// Lets the draft model choose from these tokens only, which makes it faster. The target's end tokens are always among
    /// them.
    pub fn draft_vocabulary(mut self, vocabulary: DraftVocabulary) -> Self {
        self.vocabulary = Some(vocabulary);
        self
    }

    /// Drafts from the text itself where it repeats itself: with a draft model or a drafter of one's own as well, if the
    /// repetition is long, and else alone.
    pub fn ngram(mut self) -> Self {
        self.ngram = true;
        self
    }

    /// Drafts as many tokens each round, unless an end is near; 4 unless set. 0: plain decoding.
    pub fn draft_tokens(mut self, tokens: usize) -> Self {
        self.depth = Depth::Fixed(tokens);
        self
    }

    /// Drafts as many tokens, from none to `most`, as pay best by what was measured: see [`Depth::Auto`].
    pub fn auto_depth(mut self, most: usize) -> Self {
        self.depth = Depth::Auto { most };
        self
    }

    /// How the standard caches are made, for the target and for a draft model.
    pub fn cache_options(mut self, options: CacheOptions) -> Self {
        self.options = options;
        self
    }

    /// Caches of one's own for the target, made with its [`ModelSpec::layout`](recant_core::ModelSpec).
    pub fn caches(mut self, caches: CacheStack) -> Self {
        self.caches = Some(caches);
        self
    }

    /// Threads to run on. Without this the session starts as many as the system can run at once.
    pub fn threads(mut self, threads: &Threads) -> Self {
        self.threads = Some(threads.clone());
        self
    }

    /// Goes on after a token that ends a text.
    pub fn ignore_eos(mut self, ignore: bool) -> Self {
        self.ignore_eos = ignore;
        self
    }

    /// The session.
    ///
    /// # Errors
    /// Vocabularies that differ, a multi-token-prediction head that is absent, incomplete or another model's, caches of
    /// another model, caches that cannot take back the tokens drafted in a round, a depth to be chosen or a draft vocabulary
    /// without anything that drafts, a sampling parameter out of its range, an empty stop string, or threads that cannot be
    /// started.
    pub fn build(mut self) -> Result<Session> {
        let most = self.depth.most();
        self.options.record_limit = self.options.record_limit.max(most.saturating_add(1));
        let threads = match self.threads.take() {
            Some(threads) => threads,
            None => Threads::new(0)?,
        };
        let model = self.target.model();
        let caches = match self.caches.take() {
            Some(caches) => caches,
            None => model.new_caches(&self.options)?,
        };
        let output = TextOutput::new(std::mem::take(&mut self.stops))?;
        let mut decoder = Decoder::new(model.clone(), caches, self.target.text().assigned())?;
        let processors = std::mem::take(&mut self.processors);
        let sampler = Sampler::new(self.sampling.clone(), processors, self.logprobs, decoder.vocab())?;
        decoder = decoder.with_sampler(sampler)?;
        if let Some(store) = self.store.take() {
            decoder = decoder.with_store(store);
        }
        let Drafting {
            drafter,
            check,
            warnings,
        } = self.drafting(&threads)?;
        match (drafter, self.depth) {
            (Some(drafter), _) => decoder = decoder.with_drafter(drafter, most)?,
            (None, Depth::Auto { most }) => {
                return Err(lacks(format!("auto_depth({most})"), "something to draft with"))
            }
            (None, Depth::Fixed(_)) => {}
        }
        Ok(Session {
            eos: if self.ignore_eos {
                Vec::new()
            } else {
                self.target.eos().to_vec()
            },
            stats: Stats::default(),
            check,
            warnings,
            threads,
            output,
            cancel: self.cancel,
            depth: self.depth,
            target: self.target,
            decoder,
        })
    }

    /// Makes what drafts, if anything does.
    fn drafting(&mut self, threads: &Threads) -> Result<Drafting> {
        let mut drafting = Drafting::default();
        let vocabulary = self.vocabulary.take();
        if vocabulary.is_some() && matches!(self.drafter, Source::None | Source::Own(_)) {
            return Err(lacks(
                "a draft vocabulary",
                "a draft model or a multi-token-prediction head to choose from it",
            ));
        }
        let vocabulary = vocabulary.map(|vocabulary| vocabulary.with(self.target.eos()));
        match std::mem::replace(&mut self.drafter, Source::None) {
            Source::None => {}
            Source::Own(drafter) => drafting.drafter = Some(drafter),
            Source::Model(draft) => {
                self.target.text().check_draft(draft.text())?;
                let drafter = ModelDrafter::new(draft.model().clone(), &self.options)?;
                drafting.drafter = Some(Box::new(match vocabulary {
                    Some(vocabulary) => drafter.with_vocabulary(vocabulary),
                    None => drafter,
                }));
            }
            Source::Mtp(path) => {
                let head = self.target.checked_head(path.as_deref(), self.hidden, threads)?;
                drafting.attach(head, self.hidden, vocabulary)?;
            }
            Source::Any if self.target.has_mtp() => {
                match self.target.checked_head(None, self.hidden, threads) {
                    Ok(head) => drafting.attach(head, self.hidden, vocabulary)?,
                    // Nobody asked for the head by name: drafting goes on without it.
                    Err(error) => drafting.warnings.push(error.to_string()),
                }
            }
            Source::Any => {}
        }
        if self.ngram {
            drafting.drafter = Some(match drafting.drafter.take() {
                Some(other) => {
                    let ngram = NgramDrafter::new().with_least(CombinedDrafter::LEAST);
                    Box::new(CombinedDrafter::new(ngram, other))
                }
                None => Box::new(NgramDrafter::new()),
            });
        }
        Ok(drafting)
    }
}

/// What drafts for a session, and what is to be said of it.
#[derive(Default)]
struct Drafting {
    drafter: Option<Box<dyn Drafter>>,
    check: Option<HeadCheck>,
    warnings: Vec<String>,
}

impl Drafting {
    fn attach(
        &mut self,
        checked: CheckedHead,
        hidden: Hidden,
        vocabulary: Option<DraftVocabulary>,
    ) -> Result<()> {
        self.warnings.extend(checked.check.complaint());
        self.check = Some(checked.check);
        let drafter = MtpDrafter::new(checked.head, hidden)?;
        self.drafter = Some(Box::new(match vocabulary {
            Some(vocabulary) => drafter.with_vocabulary(vocabulary),
            None => drafter,
        }));
        Ok(())
    }
}

fn lacks(asked: impl Into<String>, needs: &'static str) -> crate::Error {
    let asked = asked.into();
    Error::Lacks { asked, needs }.into()
}
