//! One generation, step by step, alone or among others.

use std::collections::VecDeque;

use recant_generate::{Decoder, Depth, Done, Finish, Round, Step};

use super::{Event, Session};
use crate::stop::TextOutput;
use crate::{Cancel, Result, Text};

/// What one generation of a session has left to do, and to say.
pub(crate) struct Turn {
    /// Tokens that may still come.
    left: usize,
    output: TextOutput,
    events: VecDeque<Event>,
    over: bool,
}

/// Looks at the tokens of a step as they come.
pub(crate) struct Watch<'a> {
    text: &'a Text,
    eos: &'a [u32],
    seen: Seen,
}

/// What was seen of a step, which counts only if the step succeeds.
pub(crate) struct Seen {
    output: TextOutput,
    /// The text of each token.
    said: Vec<String>,
    ends: Option<Finish>,
}

/// What else a step takes of a session.
pub(crate) struct Parts<'a> {
    decoder: &'a mut Decoder,
    depth: Depth,
    room: usize,
    cancel: &'a Cancel,
}

impl<'a> Parts<'a> {
    pub(crate) fn step<'b>(
        self,
        chunk: usize,
        ends: &'b mut dyn FnMut(u32) -> recant_generate::Result<bool>,
    ) -> Step<'b>
    where
        'a: 'b,
    {
        Step {
            decoder: self.decoder,
            depth: self.depth,
            room: self.room,
            chunk,
            ends,
            cancel: Some(self.cancel),
        }
    }
}

impl Watch<'_> {
    /// Whether nothing is to come after a token.
    pub(crate) fn take(&mut self, id: u32) -> recant_generate::Result<bool> {
        let seen = &mut self.seen;
        let piece = seen
            .output
            .push(self.text, id)
            .map_err(recant_core::Error::other)?;
        seen.said.push(piece.text);
        if self.eos.contains(&id) {
            seen.ends = Some(Finish::Eos);
        } else if piece.stopped {
            seen.ends = Some(Finish::Stop);
        }
        Ok(seen.ends.is_some())
    }

    pub(crate) fn seen(self) -> Seen {
        self.seen
    }
}

impl Turn {
    pub(crate) fn new(session: &Session, max_tokens: usize) -> Self {
        Self {
            left: max_tokens,
            output: session.output.clone(),
            events: VecDeque::new(),
            over: false,
        }
    }

    /// Why nothing more is to be done, if a limit is met already.
    pub(crate) fn limit(&self, session: &Session) -> Option<Finish> {
        if session.cancel.is_cancelled() {
            Some(Finish::Cancelled)
        } else if session.decoder.unread() > 0 {
            None
        } else if self.left == 0 {
            Some(Finish::Length)
        } else if session.decoder.is_full() {
            Some(Finish::Context)
        } else {
            None
        }
    }

    /// What a step of the session needs.
    pub(crate) fn watch<'a>(&self, session: &'a mut Session) -> (Watch<'a>, Parts<'a>) {
        let watch = Watch {
            text: session.target.text(),
            eos: &session.eos,
            seen: Seen {
                output: self.output.clone(),
                said: Vec::new(),
                ends: None,
            },
        };
        let parts = Parts {
            decoder: &mut session.decoder,
            depth: session.depth,
            room: self.left,
            cancel: &session.cancel,
        };
        (watch, parts)
    }

    /// Takes in what a step did.
    pub(crate) fn take_in(
        &mut self,
        session: &mut Session,
        seen: Seen,
        done: recant_generate::Result<Done>,
    ) -> Result<()> {
        match done? {
            Done::Read { time, .. } => {
                session.stats.time.prefill += time;
                Ok(())
            }
            Done::Round(round) => self.take_round(session, seen, round),
        }
    }

    fn take_round(&mut self, session: &mut Session, seen: Seen, round: Round) -> Result<()> {
        self.output = seen.output;
        self.left = self.left.saturating_sub(round.tokens.len());
        session.stats.add(&round);
        for (token, text) in round.tokens.iter().zip(seen.said) {
            self.events.push_back(Event::Token {
                id: token.id,
                text,
                drafted: token.drafted,
                logprobs: token.logprobs.clone(),
            });
        }
        self.events.push_back(Event::Round(round));
        match seen.ends {
            Some(finish) => self.end(session, finish),
            None => Ok(()),
        }
    }

    /// Ends the turn.
    pub(crate) fn end(&mut self, session: &mut Session, finish: Finish) -> Result<()> {
        self.over = true;
        let text = match finish {
            // What was held back belongs to the stop string, or comes after it.
            Finish::Stop => String::new(),
            _ => self.output.finish(session.target.text())?,
        };
        self.events.push_back(Event::End { finish, text });
        Ok(session.decoder.remember()?)
    }

    /// Says nothing more.
    pub(crate) fn stop(&mut self) {
        self.over = true;
        self.events.clear();
    }

    pub(crate) fn is_over(&self) -> bool {
        self.over
    }

    pub(crate) fn event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }
}
