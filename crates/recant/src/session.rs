//! One sequence from prompt to text, streamed.

use std::collections::VecDeque;
use std::time::Duration;

use recant_core::{Cache, CacheOptions, CacheStack, Footprint};
use recant_generate::{
    CombinedDrafter, Decoder, Depth, DraftVocabulary, Drafter, Error, Finish, Generation, Limits,
    ModelDrafter, NgramDrafter, Phases, Round,
};

use crate::text::TextStream;
use crate::{Loaded, Result, Text, Threads};

/// Tokens drafted in a round unless told otherwise.
const DRAFT_TOKENS: usize = 4;

/// Prepares a [`Session`]. Everything that cannot work is refused by [`build`](SessionBuilder::build).
#[must_use]
pub struct SessionBuilder {
    target: Loaded,
    drafter: Source,
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
    Own(Box<dyn Drafter>),
}

impl SessionBuilder {
    pub(crate) fn new(target: Loaded) -> Self {
        Self {
            target,
            drafter: Source::None,
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
    /// Vocabularies that differ, caches of another model, caches that cannot take back the tokens drafted in a round, a depth
    /// to be chosen or a draft vocabulary without anything that drafts, a draft vocabulary for a drafter that is no
    /// draft model, or threads that cannot be started.
    pub fn build(self) -> Result<Session> {
        let most = self.depth.most();
        let mut options = self.options;
        options.record_limit = options.record_limit.max(most.saturating_add(1));
        let model = self.target.model();
        let caches = match self.caches {
            Some(caches) => caches,
            None => model.new_caches(&options)?,
        };
        let mut decoder = Decoder::new(model.clone(), caches, self.target.text().assigned())?;
        let lacks = |asked: String, needs| Err(Error::Lacks { asked, needs }.into());
        if self.vocabulary.is_some() && !matches!(self.drafter, Source::Model(_)) {
            return lacks(
                String::from("a draft vocabulary"),
                "a draft model to choose from it",
            );
        }
        let drafter: Option<Box<dyn Drafter>> = match self.drafter {
            Source::None => None,
            Source::Model(draft) => {
                self.target.text().check_draft(draft.text())?;
                let drafter = ModelDrafter::new(draft.model().clone(), &options)?;
                Some(Box::new(match self.vocabulary {
                    Some(vocabulary) => drafter.with_vocabulary(vocabulary.with(self.target.eos())),
                    None => drafter,
                }))
            }
            Source::Own(drafter) => Some(drafter),
        };
        let drafter: Option<Box<dyn Drafter>> = match (drafter, self.ngram) {
            (Some(other), true) => {
                let ngram = NgramDrafter::new().with_least(CombinedDrafter::LEAST);
                Some(Box::new(CombinedDrafter::new(ngram, other)))
            }
            (None, true) => Some(Box::new(NgramDrafter::new())),
            (drafter, false) => drafter,
        };
        match (drafter, self.depth) {
            (Some(drafter), _) => decoder = decoder.with_drafter(drafter, most)?,
            (None, Depth::Auto { most }) => {
                return lacks(format!("auto_depth({most})"), "something to draft with")
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
            threads: match self.threads {
                Some(threads) => threads,
                None => Threads::new(0)?,
            },
            depth: self.depth,
            target: self.target,
            decoder,
        })
    }
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
