//! How tokens are chosen from logits, and drafts accepted.
//!
//! # From logits to a distribution
//! In this order: logit bias; repetition, presence and frequency penalty; the caller's processors; temperature; top-k;
//! top-p of what top-k left; min-p. What is left, made to sum to one, is the *processed* distribution of a position. A NaN
//! is never chosen, nor is a logit of minus infinity, which is what bans a token. Plus infinity takes all; several share
//! it. Among equals the lowest ids go first everywhere: in greedy choices, at the border of top-k and of top-p.
//!
//! # Randomness
//! There is no generator to carry along: every random number is a hash of the seed, what it is for, the position in the text
//! and, where a rule has to, the token's id or the length of the text when the round began. So nothing depends on other
//! sequences, on threads or on rounds before. Sequences that shall differ need seeds that differ.
//!
//! # Three rules
//! See [`Rule`]. All of them give the processed distribution of the target exactly, whatever the drafter draws from.

mod distribution;
mod draws;
mod filters;
mod history;
mod left;
mod logprobs;
mod math;
mod noise;
mod options;
mod processor;
mod row;
mod rules;
mod sampler;
#[cfg(test)]
mod tests;

pub use distribution::{Distribution, Proposed};
pub use draws::Draws;
pub use logprobs::{Logprobs, LogprobsOf, LogprobsOptions};
pub use options::{Rule, Sampling};
pub use processor::LogitsProcessor;
pub use row::Row;
pub use sampler::{Sampler, Verdict};
