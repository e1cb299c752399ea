//! Figures of a session.

use std::time::Duration;

use recant_generate::{Phases, Round};

/// Figures of a session since its prompt was read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stats {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of these, tokens that the caches held already: of this session's own text, or from a prompt store.
    pub cached_tokens: usize,
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
    pub(crate) fn add(&mut self, round: &Round) {
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
