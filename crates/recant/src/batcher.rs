//! Many sessions, one call of their model a round.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use recant_generate::{step, Error, Step};

use crate::session::{Turn, CHUNK};
use crate::{Event, Result, Session, Threads};

/// How much a [`Batcher`] takes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatcherOptions {
    /// Most sessions that generate at the same time, at least one. The others wait, and come in order.
    pub running: usize,
    /// Most sessions that wait.
    pub waiting: usize,
    /// Most tokens of a prompt that are read in a round in which others generate: the fewer, the less these are held up.
    pub prefill_tokens: usize,
}

impl Default for BatcherOptions {
    /// 8 that generate, 64 that wait, 64 tokens of a prompt a round.
    fn default() -> Self {
        Self {
            running: 8,
            waiting: 64,
            prefill_tokens: 64,
        }
    }
}

/// Names a session of a [`Batcher`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(u64);

/// Runs many sessions, each with its own drafter, depth, sampling and caches, through one call of their model a round.
///
/// Sessions join and leave at any round. Each session's text is, bit for bit, what it would be alone: rows of several
/// sequences share a call, and by the law that changes nothing. One prompt at a time is read between, in pieces, in
/// turn with the other prompts.
///
/// ```no_run
/// # fn main() -> recant::Result<()> {
/// use recant::{Batcher, BatcherOptions, Threads};
///
/// let target = recant::load("Qwen3.5-0.8B")?;
/// let threads = Threads::new(0)?;
/// let mut batcher = Batcher::new(&threads, BatcherOptions::default());
/// for prompt in ["def fibonacci(n):", "SELECT name FROM"] {
///     let session = target.session().threads(&threads).auto().build()?;
///     batcher.submit(session, &target.text().encode(prompt)?, 64).map_err(|refused| refused.error)?;
/// }
/// while !batcher.is_idle() {
///     for (ticket, event) in batcher.step() {
///         println!("{ticket:?} {}", event?.text());
///     }
/// }
/// # Ok(())
/// # }
/// ```
pub struct Batcher {
    threads: Threads,
    options: BatcherOptions,
    waiting: VecDeque<(Slot, Vec<u32>)>,
    running: Vec<Slot>,
    /// Sessions whose generation is over, until they are asked for.
    done: BTreeMap<Ticket, Session>,
    next: u64,
    /// Which prompt was read last.
    read_last: Option<Ticket>,
}

struct Slot {
    ticket: Ticket,
    session: Session,
    turn: Turn,
}

/// A session that a [`Batcher`] did not take.
#[derive(Debug)]
pub struct Refused {
    /// The session, as it was.
    pub session: Session,
    /// Why.
    pub error: crate::Error,
}

impl Batcher {
    /// A batcher that runs on `threads`, whatever threads its sessions have.
    pub fn new(threads: &Threads, options: BatcherOptions) -> Self {
        Self {
            threads: threads.clone(),
            options,
            waiting: VecDeque::new(),
            running: Vec::new(),
            done: BTreeMap::new(),
            next: 0,
            read_last: None,
        }
    }

    /// Takes in a session, to read a prompt and to generate up to `max_tokens` tokens after it. It begins in one of the next
    /// rounds.
    ///
    /// # Errors
    /// As many wait as may.
    pub fn submit(
        &mut self,
        session: Session,
        prompt: &[u32],
        max_tokens: usize,
    ) -> std::result::Result<Ticket, Box<Refused>> {
        if self.waiting.len() >= self.options.waiting {
            let error = Error::Busy {
                waiting: self.waiting.len(),
            };
            return Err(Box::new(Refused {
                session,
                error: error.into(),
            }));
        }
        let ticket = Ticket(self.next);
        self.next += 1;
        let turn = Turn::new(&session, max_tokens);
        let slot = Slot {
            ticket,
            session,
            turn,
        };
        self.waiting.push_back((slot, prompt.to_vec()));
        Ok(ticket)
    }

    /// One round: what each session said in it. A session that failed says so, and is over.
    pub fn step(&mut self) -> Vec<(Ticket, Result<Event>)> {
        let threads = self.threads.clone();
        threads.run(|| self.round())
    }

    /// Takes out a session, whether it is over or not: its text and caches are in step, and it can be gone on with
    /// alone. One that is over is kept until then.
    pub fn leave(&mut self, ticket: Ticket) -> Option<Session> {
        if let Some(at) = self.running.iter().position(|slot| slot.ticket == ticket) {
            return Some(self.running.remove(at).session);
        }
        if let Some(at) = self.waiting.iter().position(|(slot, _)| slot.ticket == ticket) {
            return self.waiting.remove(at).map(|(slot, _)| slot.session);
        }
        self.done.remove(&ticket)
    }

    /// Whether no session has anything left to do.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Sessions that read or generate.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Sessions that wait.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    fn round(&mut self) -> Vec<(Ticket, Result<Event>)> {
        let mut said = Vec::new();
        while self.running.len() < self.options.running.max(1) {
            let Some((mut slot, prompt)) = self.waiting.pop_front() else {
                break;
            };
            match slot.session.begin(&prompt) {
                Ok(()) => self.running.push(slot),
                Err(error) => self.end(slot, Some(error), &mut said),
            }
        }
        let mut failed = BTreeMap::new();
        for slot in &mut self.running {
            if let Some(finish) = slot.turn.limit(&slot.session) {
                if let Err(error) = slot.turn.end(&mut slot.session, finish) {
                    failed.insert(slot.ticket, error);
                }
            }
        }
        let (reader, chunk) = self.reader();
        let takes_part = |slot: &Slot| {
            let reads = slot.session.decoder.unread() > 0;
            !slot.turn.is_over() && (!reads || Some(slot.ticket) == reader)
        };
        let mut part: Vec<&mut Slot> = self.running.iter_mut().filter(|slot| takes_part(slot)).collect();
        // Sessions of one model beside each other, in order.
        part.sort_by_key(|slot| (model(&slot.session), slot.ticket));
        for group in part.chunk_by_mut(|a, b| model(&a.session) == model(&b.session)) {
            failed.extend(advance(group, chunk));
        }
        self.read_last = reader.or(self.read_last);
        for mut slot in std::mem::take(&mut self.running) {
            while let Some(event) = slot.turn.event() {
                said.push((slot.ticket, Ok(event)));
            }
            let error = failed.remove(&slot.ticket);
            if slot.turn.is_over() || error.is_some() {
                self.end(slot, error, &mut said);
            } else {
                self.running.push(slot);
            }
        }
        said
    }

    /// Whose prompt is read on in this round, and by how much: in turn.
    fn reader(&self) -> (Option<Ticket>, usize) {
        let going = || self.running.iter().filter(|slot| !slot.turn.is_over());
        let readers = || {
            going()
                .filter(|slot| slot.session.decoder.unread() > 0)
                .map(|slot| slot.ticket)
        };
        let after = readers().filter(|ticket| Some(*ticket) > self.read_last).min();
        let chunk = match going().any(|slot| slot.session.decoder.unread() == 0) {
            true => self.options.prefill_tokens.max(1),
            false => CHUNK,
        };
        (after.or(readers().min()), chunk)
    }

    fn end(&mut self, slot: Slot, error: Option<crate::Error>, said: &mut Vec<(Ticket, Result<Event>)>) {
        if let Some(error) = error {
            said.push((slot.ticket, Err(error)));
        }
        self.done.insert(slot.ticket, slot.session);
    }
}

/// Tells models apart.
fn model(session: &Session) -> usize {
    Arc::as_ptr(session.decoder.model()).cast::<()>() as usize
}

/// A step of sessions of one model; the errors of those that failed.
fn advance(slots: &mut [&mut Slot], chunk: usize) -> Vec<(Ticket, crate::Error)> {
    let (mut watches, parts): (Vec<_>, Vec<_>) = slots
        .iter_mut()
        .map(|slot| {
            let Slot { session, turn, .. } = &mut **slot;
            turn.watch(session)
        })
        .unzip();
    let mut asked: Vec<_> = watches
        .iter_mut()
        .map(|watch| move |id: u32| watch.take(id))
        .collect();
    let mut steps: Vec<Step<'_>> = parts
        .into_iter()
        .zip(&mut asked)
        .map(|(parts, ends)| parts.step(chunk, ends))
        .collect();
    let done = step(&mut steps);
    drop(steps);
    drop(asked);
    let seen: Vec<_> = watches.into_iter().map(|watch| watch.seen()).collect();
    let mut failed = Vec::new();
    for ((slot, seen), done) in slots.iter_mut().zip(seen).zip(done) {
        let Slot {
            ticket,
            session,
            turn,
        } = &mut **slot;
        if let Err(error) = turn.take_in(session, seen, done) {
            failed.push((*ticket, error));
        }
    }
    failed
}
