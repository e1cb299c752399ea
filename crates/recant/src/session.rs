//! One sequence from prompt to text, streamed.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::time::Duration;

use recant_core::{Cache, CacheOptions, CacheStack, Footprint, Hidden};
use recant_generate::{
    CombinedDrafter, Decoder, Depth, DraftVocabulary, Drafter, Error, Finish, Generation, Limits,
    ModelDrafter, NgramDrafter, Phases, Round,
};

use recant_mtp::{HeadCheck, MtpDrafter};

use crate::heads::CheckedHead;
use crate::text::TextStream;
use crate::{Loaded, Result, Text, Threads};

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
        }
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
    /// without anything that drafts, or threads that cannot be started.
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
        let mut decoder = Decoder::new(model.clone(), caches, self.target.text().assigned())?;
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

/// Figures of a session since its prompt was read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stats {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens generated.
    pub generated_tokens: usize,
    /// Forwards of the target after the prompt.
    pub rounds: usize,
    /// Tokens proposed.
    pub drafted: usize,
    /// Proposals that stayed in the text.
    pub accepted: usize,
    /// In how many rounds so many tokens were asked of the drafter: by number, from 0. A round near a limit asks for no more
    /// than it leaves room for.
    pub depths: Vec<usize>,
    /// For each place in a round's proposal, in how many rounds a token was proposed there.
    pub drafted_by_position: Vec<usize>,
    /// For each place in a round's proposal, in how many rounds the token there was accepted.
    pub accepted_by_position: Vec<usize>,
    /// Seconds by phase.
    pub time: Phases,
}

impl Stats {
    fn add(&mut self, round: &Round) {
        self.generated_tokens += round.tokens.len();
        self.rounds += 1;
        self.drafted += round.drafted;
        self.accepted += round.accepted;
        if self.depths.len() <= round.asked {
            self.depths.resize(round.asked + 1, 0);
        }
        self.depths[round.asked] += 1;
        count(&mut self.drafted_by_position, round.drafted);
        count(&mut self.accepted_by_position, round.accepted);
        self.accepted_by_position
            .resize(self.drafted_by_position.len(), 0);
        self.time.add(&round.time);
    }

    /// Seconds spent generating, the prompt left out.
    pub fn decode_time(&self) -> Duration {
        self.time.draft + self.time.verify + self.time.rollback + self.time.sample
    }
}

/// Adds one to each of the first `n` places.
fn count(places: &mut Vec<usize>, n: usize) {
    if places.len() < n {
        places.resize(n, 0);
    }
    places[..n].iter_mut().for_each(|place| *place += 1);
}

/// What a session says while it generates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A token, in order.
    Token {
        /// Its id.
        id: u32,
        /// The text it completes; empty while a character is incomplete, and for special tokens.
        text: String,
        /// Whether the drafter guessed it.
        drafted: bool,
    },
    /// A round is over; its tokens came before this.
    Round(Round),
    /// Generation is over.
    End {
        /// Why.
        finish: Finish,
        /// Text that was held back: an incomplete character.
        text: String,
    },
}

impl Event {
    /// The text that came with it, if any.
    pub fn text(&self) -> &str {
        match self {
            Self::Token { text, .. } | Self::End { text, .. } => text,
            Self::Round(_) => "",
        }
    }
}

/// One sequence: a prompt, and the text that a model continues it with, greedily.
///
/// The text does not depend on the drafter, on the number of tokens drafted or on the number of threads, bit for bit.
pub struct Session {
    target: Loaded,
    decoder: Decoder,
    depth: Depth,
    eos: Vec<u32>,
    threads: Threads,
    stats: Stats,
    check: Option<HeadCheck>,
    warnings: Vec<String>,
}

impl Session {
    /// Reads a prompt as plain text. What the session held before is forgotten.
    ///
    /// # Errors
    /// The prompt is empty or longer than the model takes; the session is then empty.
    pub fn start(&mut self, prompt: &str) -> Result<()> {
        let ids = self.target.text().encode(prompt)?;
        self.start_tokens(&ids, &mut |_, _| {})
    }

    /// Reads a prompt of ids. `progress` is told how many of how many are read.
    ///
    /// # Errors
    /// As [`start`](Session::start), or an id that the model does not know.
    pub fn start_tokens(
        &mut self,
        ids: &[u32],
        progress: &mut (dyn FnMut(usize, usize) + Send),
    ) -> Result<()> {
        self.decoder.reset();
        self.stats = Stats::default();
        let decoder = &mut self.decoder;
        self.stats.time.prefill = self.threads.run(|| decoder.prefill(ids, progress))?;
        self.stats.prompt_tokens = ids.len();
        Ok(())
    }

    /// Generates up to `max_tokens` tokens from where the text stands. Called again, it goes on.
    ///
    /// Dropping the run leaves the session whole: every token of the last round is part of the text, whether its event was
    /// seen or not.
    pub fn generate(&mut self, max_tokens: usize) -> Run<'_> {
        let limits = Limits {
            max_tokens,
            depth: self.depth,
            eos: self.eos.clone(),
        };
        Run {
            generation: self.decoder.generate(limits),
            text: self.target.text(),
            threads: &self.threads,
            stats: &mut self.stats,
            stream: TextStream::default(),
            events: VecDeque::new(),
            over: false,
        }
    }

    /// The text so far as ids, prompt included. The last one is pending: the caches do not hold it yet.
    pub fn tokens(&self) -> &[u32] {
        self.decoder.tokens()
    }

    /// The caches: they hold all tokens but the pending one.
    pub fn caches(&self) -> &CacheStack {
        self.decoder.caches()
    }

    /// Bytes of the target's caches.
    pub fn footprint(&self) -> Footprint {
        self.decoder.caches().footprint()
    }

    /// How often the multi-token-prediction head's first draft was what the target chooses, over the short text it was
    /// checked on; none without a head.
    pub fn head_check(&self) -> Option<&HeadCheck> {
        self.check.as_ref()
    }

    /// What a user should know of this session: a head that agrees with almost nothing, with the likely causes, since
    /// no output shows it; or a head that `auto` could not use.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Figures since the prompt.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }
}

/// The events of one generation: see [`Session::generate`].
pub struct Run<'a> {
    generation: Generation<'a>,
    text: &'a Text,
    threads: &'a Threads,
    stats: &'a mut Stats,
    stream: TextStream,
    events: VecDeque<Event>,
    over: bool,
}

impl Run<'_> {
    fn advance(&mut self) -> Result<()> {
        let generation = &mut self.generation;
        match self.threads.run(|| generation.next()) {
            Some(round) => {
                let round = round?;
                self.stats.add(&round);
                for token in &round.tokens {
                    self.events.push_back(Event::Token {
                        id: token.id,
                        text: self.stream.push(self.text, token.id)?,
                        drafted: token.drafted,
                    });
                }
                self.events.push_back(Event::Round(round));
            }
            None => {
                self.over = true;
                if let Some(finish) = self.generation.finish() {
                    let text = self.stream.finish(self.text)?;
                    self.events.push_back(Event::End { finish, text });
                }
            }
        }
        Ok(())
    }
}

impl Iterator for Run<'_> {
    type Item = Result<Event>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.events.is_empty() && !self.over {
            if let Err(error) = self.advance() {
                self.over = true;
                return Some(Err(error));
            }
        }
        self.events.pop_front().map(Ok)
    }
}
