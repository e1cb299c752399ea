//! What a step did, and why generation ended.

use std::time::Duration;

use crate::Logprobs;

/// Seconds by phase.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Phases {
    /// Reading the prompt, the drafter's reading included.
    pub prefill: Duration,
    /// The drafter's proposals.
    pub draft: Duration,
    /// The target's forward over the pending token and the proposals; of a call for several sequences, the share of its
    /// rows.
    pub verify: Duration,
    /// Opening the checkpoint, taking rejected tokens out of the target's and the drafter's caches, and committing.
    pub rollback: Duration,
    /// Choosing tokens from logits.
    pub sample: Duration,
}

impl Phases {
    /// Adds another's seconds.
    pub fn add(&mut self, other: &Self) {
        self.prefill += other.prefill;
        self.draft += other.draft;
        self.verify += other.verify;
        self.rollback += other.rollback;
        self.sample += other.sample;
    }
}

/// A token of the output.
#[derive(Debug, Clone, PartialEq)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// Whether the drafter guessed it. Otherwise the target chose it itself.
    pub drafted: bool,
    /// Its log-probability and the alternatives, if they were asked for.
    pub logprobs: Option<Logprobs>,
}

/// Why generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// The last token is one that ends a text.
    Eos,
    /// A stop string is complete.
    Stop,
    /// As many tokens as asked for were generated.
    Length,
    /// The sequence is as long as the model takes.
    Context,
    /// It was cancelled.
    Cancelled,
}

/// What one round did.
#[derive(Debug, Clone, PartialEq)]
pub struct Round {
    /// Tokens generated: those accepted, then one that the target chose. At least one.
    pub tokens: Vec<Token>,
    /// Tokens asked of the drafter: as many as were to be drafted, but near a limit no more than it leaves room for; 0
    /// without a drafter.
    pub asked: usize,
    /// Tokens proposed.
    pub drafted: usize,
    /// Proposals that stayed in the text.
    pub accepted: usize,
    /// The last token is one after which nothing was to come.
    pub ended: bool,
    /// Seconds by phase.
    pub time: Phases,
}

/// What a step did.
#[derive(Debug, Clone, PartialEq)]
pub enum Done {
    /// Tokens of the prompt were read, in so much time.
    Read {
        /// How many.
        tokens: usize,
        /// How long it took.
        time: Duration,
    },
    /// Tokens were generated.
    Round(Round),
}
