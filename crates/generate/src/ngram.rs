//! Drafting from the text itself.

use std::collections::HashMap;

use recant_core::candle::Tensor;
use recant_core::ModelSpec;

use crate::{Drafter, Result};

/// Drafts what followed the last time: looks for the longest end of the text that occurred before, in the prompt or in the
/// output, and proposes what came after its most recent earlier occurrence. It runs no model.
///
/// An end of more than [`LONGEST`](Self::LONGEST) tokens is as good as one of that many; one of fewer than the least
/// length that counts is not taken for a repetition, and then nothing is proposed. Where the occurrence runs into the end of
/// the text, the proposal goes on with its own beginning: a text that repeats itself is expected to go on doing so. A
/// proposal ends before an id that may not be proposed.
///
/// # Cost
/// A token of the text costs at most [`LONGEST`](Self::LONGEST) comparisons and as many look-ups in a hash table, however
/// long the text is, and usually a handful. Memory is linear: below 150 bytes a token. A proposal costs a few steps a token.
#[derive(Debug, Clone)]
pub struct NgramDrafter {
    least: usize,
    vocab: usize,
    text: Vec<u32>,
    ends: Ends,
    found: Option<Found>,
}

/// Where the end of the text occurred before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Found {
    /// Tokens that agree.
    len: usize,
    /// Tokens of the text up to and with that occurrence: the one at this index followed it.
    end: usize,
}

impl NgramDrafter {
    /// Longest end of the text that is looked up, in tokens.
    pub const LONGEST: usize = 64;

    /// Least length that counts, in tokens, unless told otherwise.
    pub const LEAST: usize = 3;

    /// A drafter that takes ends of [`LEAST`](Self::LEAST) tokens or more for a repetition.
    pub fn new() -> Self {
        Self {
            least: Self::LEAST,
            vocab: usize::MAX,
            text: Vec::new(),
            ends: Ends::default(),
            found: None,
        }
    }

    /// Takes ends of `tokens` tokens or more for a repetition, of 1 to [`LONGEST`](Self::LONGEST); numbers outside
    /// are taken for the nearer of the two. Fewer propose more often and wrong more often.
    #[must_use]
    pub fn with_least(mut self, tokens: usize) -> Self {
        self.least = tokens.clamp(1, Self::LONGEST);
        self
    }

    fn push(&mut self, tokens: &[u32]) {
        for &token in tokens {
            self.text.push(token);
            self.found = self.ends.add(&self.text);
        }
    }
}

impl Default for NgramDrafter {
    fn default() -> Self {
        Self::new()
    }
}

impl Drafter for NgramDrafter {
    fn attach(&mut self, _target: &ModelSpec, vocab: usize) -> Result<()> {
        self.vocab = vocab;
        Ok(())
    }

    fn prefill(&mut self, tokens: &[u32], _hidden: Option<&Tensor>) -> Result<()> {
        self.push(tokens);
        Ok(())
    }

    fn propose(&mut self, k: usize) -> Result<Vec<u32>> {
        let mut proposed = Vec::new();
        let Some(found) = self.found.filter(|found| found.len >= self.least) else {
            return Ok(proposed);
        };
        for at in found.end..found.end + k {
            let id = match self.text.get(at) {
                Some(&id) => id,
                None => proposed[at - self.text.len()],
            };
            if id as usize >= self.vocab {
                break;
            }
            proposed.push(id);
        }
        Ok(proposed)
    }

    fn observe(&mut self, tokens: &[u32], _hidden: Option<&Tensor>) {
        self.push(tokens);
    }

    fn reset(&mut self) {
        self.text.clear();
        self.ends.clear();
        self.found = None;
    }
}

/// The ends of all beginnings of a text, read backwards from where they end, as a tree in which ends that agree share
/// their way from the root. Ways without a fork are one edge, so a token adds at most two nodes; an edge's tokens are
/// read from the text, at the node's last occurrence.
#[derive(Debug, Clone)]
struct Ends {
    nodes: Vec<Node>,
    /// Child by parent and first token of the edge.
    children: HashMap<(u32, u32), u32>,
}

#[derive(Debug, Clone, Copy)]
struct Node {
    /// Tokens from the root.
    depth: u32,
    /// Where those tokens ended most recently, as a number of tokens.
    last: u32,
}

const ROOT: u32 = 0;

impl Default for Ends {
    fn default() -> Self {
        Self {
            nodes: vec![Node { depth: 0, last: 0 }],
            children: HashMap::new(),
        }
    }
}

impl Ends {
    fn clear(&mut self) {
        self.nodes.truncate(1);
        self.children.clear();
    }

    fn node(&mut self, depth: usize, last: usize) -> u32 {
        let id = self.nodes.len() as u32;
        self.nodes.push(Node {
            depth: depth as u32,
            last: last as u32,
        });
        id
    }

    /// Adds the end of `text`, which is one token longer than last time, and finds where its longest part occurred
    /// before. Every node on the way is told of the new occurrence, so each knows its most recent one.
    fn add(&mut self, text: &[u32]) -> Option<Found> {
        let now = text.len();
        let longest = now.min(NgramDrafter::LONGEST);
        let back = |end: usize, depth: usize| text[end - 1 - depth];
        let (mut at, mut depth, mut found) = (ROOT, 0, None);
        while depth < longest {
            let edge = (at, back(now, depth));
            let Some(&child) = self.children.get(&edge) else {
                let leaf = self.node(longest, now);
                self.children.insert(edge, leaf);
                break;
            };
            let Node { depth: end, last } = self.nodes[child as usize];
            let (end, last) = (end as usize, last as usize);
            // An older end is never longer than the text before it, so both sides have `end` tokens to read.
            let agreed = (depth + 1..end)
                .find(|&d| back(now, d) != back(last, d))
                .unwrap_or(end);
            found = Some(Found {
                len: agreed,
                end: last,
            });
            if agreed < end {
                let fork = self.node(agreed, now);
                let leaf = self.node(longest, now);
                self.children.insert(edge, fork);
                self.children.insert((fork, back(last, agreed)), child);
                self.children.insert((fork, back(now, agreed)), leaf);
                break;
            }
            self.nodes[child as usize].last = now as u32;
            (at, depth) = (child, end);
        }
        found
    }
}

#[cfg(test)]
mod tests;
