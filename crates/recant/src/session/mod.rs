//! One sequence from prompt to text, streamed.

mod builder;
mod event;
mod stats;
mod turn;

use recant_core::{CacheStack, Footprint};
use recant_generate::{step, Decoder, Depth, Error};
use recant_mtp::HeadCheck;

pub use builder::SessionBuilder;
pub use event::Event;
pub use stats::Stats;
pub(crate) use turn::Turn;

use crate::stop::TextOutput;
use crate::{Cancel, ChatOptions, Loaded, Message, Result, Threads};

/// Most tokens of a prompt that are fed in one call.
pub(crate) const CHUNK: usize = 256;

/// One sequence: a prompt, and the text that a model continues it with.
///
/// Greedy text does not depend on the drafter, on the number of tokens drafted or on the number of threads, bit for bit; nor
/// does sampled text, unless another [`Rule`](crate::Rule) than the default was chosen.
pub struct Session {
    pub(crate) target: Loaded,
    pub(crate) decoder: Decoder,
    pub(crate) depth: Depth,
    pub(crate) eos: Vec<u32>,
    threads: Threads,
    pub(crate) stats: Stats,
    /// What each generation's text begins as.
    output: TextOutput,
    pub(crate) cancel: Cancel,
    check: Option<HeadCheck>,
    warnings: Vec<String>,
}

impl Session {
    /// Reads a prompt as plain text. See [`start_tokens`](Session::start_tokens).
    ///
    /// # Errors
    /// As there.
    pub fn start(&mut self, prompt: &str) -> Result<()> {
        let ids = self.target.text().encode(prompt)?;
        self.start_tokens(&ids, &mut |_, _| {})
    }

    /// Reads a conversation, written out by the checkpoint's template. The next turn's conversation is given whole again: what
    /// of it the caches hold is not read twice.
    ///
    /// # Errors
    /// The checkpoint has no template, or the template refuses the conversation; or as
    /// [`start_tokens`](Session::start_tokens).
    pub fn start_chat(&mut self, messages: &[Message], options: &ChatOptions) -> Result<()> {
        let ids = self
            .target
            .chat()?
            .encode(self.target.text(), messages, options)?;
        self.start_tokens(&ids, &mut |_, _| {})
    }

    /// Reads a prompt of ids. `progress` is told how many of how many are read.
    ///
    /// What the session held before is forgotten, unless the prompt begins with it: then it is gone on with. That and a
    /// prompt store save time and change nothing else; [`Stats::cached_tokens`] says how much they saved.
    ///
    /// # Errors
    /// The prompt is empty or longer than the model takes, or has an id that the model does not know: the session is then
    /// as it was. It was cancelled: what was read stays, and is not read again if the same prompt is given again. The model
    /// or the drafter fails: the session is then empty.
    pub fn start_tokens(
        &mut self,
        ids: &[u32],
        progress: &mut (dyn FnMut(usize, usize) + Send),
    ) -> Result<()> {
        self.begin(ids)?;
        progress(self.decoder.tokens().len(), ids.len());
        while self.decoder.unread() > 0 {
            let mut turn = Turn::new(self, 0);
            self.step(&mut turn)?;
            progress(self.decoder.tokens().len(), ids.len());
        }
        Ok(())
    }

    /// Takes up a prompt without reading it yet.
    pub(crate) fn begin(&mut self, ids: &[u32]) -> Result<()> {
        let decoder = &mut self.decoder;
        let start = std::time::Instant::now();
        let cached = self.threads.run(|| decoder.begin(ids))?;
        self.stats = Stats {
            prompt_tokens: ids.len(),
            cached_tokens: cached,
            ..Stats::default()
        };
        self.stats.time.prefill = start.elapsed();
        Ok(())
    }

    /// Generates up to `max_tokens` tokens from where the text stands. Called again, it goes on.
    ///
    /// Dropping the run leaves the session whole: every token of the last round is part of the text, whether its event was
    /// seen or not.
    pub fn generate(&mut self, max_tokens: usize) -> Run<'_> {
        let turn = Turn::new(self, max_tokens);
        Run { session: self, turn }
    }

    /// One step of a turn, alone.
    fn step(&mut self, turn: &mut Turn) -> Result<()> {
        let threads = self.threads.clone();
        threads.run(|| {
            let (mut watch, parts) = turn.watch(self);
            let done = step(&mut [parts.step(CHUNK, &mut |id| watch.take(id))]).pop();
            let seen = watch.seen();
            turn.take_in(self, seen, done.unwrap_or(Err(Error::EmptyPrompt)))
        })
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
        use recant_core::Cache;
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

    /// The model that it is a session of.
    pub fn target(&self) -> &Loaded {
        &self.target
    }
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session")
            .field("target", &self.target)
            .field("tokens", &self.tokens().len())
            .field("stats", &self.stats)
            .finish_non_exhaustive()
    }
}

/// The events of one generation: see [`Session::generate`].
pub struct Run<'a> {
    session: &'a mut Session,
    turn: Turn,
}

impl Iterator for Run<'_> {
    type Item = Result<Event>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(event) = self.turn.event() {
                return Some(Ok(event));
            }
            if self.turn.is_over() {
                return None;
            }
            let advanced = match self.turn.limit(self.session) {
                Some(finish) => {
                    let threads = self.session.threads.clone();
                    threads.run(|| self.turn.end(self.session, finish))
                }
                None => self.session.step(&mut self.turn),
            };
            if let Err(error) = advanced {
                self.turn.stop();
                return Some(Err(error));
            }
        }
    }
}
