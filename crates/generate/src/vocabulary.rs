//! Which tokens are worth drafting.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};

/// Token ids that a draft model chooses from, in place of its whole vocabulary.
///
/// The head of a small model is a large share of its work: with fewer rows each draft costs less, and a token outside
/// is never guessed, which costs a little agreement. What the target writes never changes: it chooses from its whole
/// vocabulary as ever. The target's end tokens are added when the drafter meets it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DraftVocabulary {
    /// Ascending, so that among equal logits the lowest id is the lowest index too.
    ids: BTreeSet<u32>,
}

impl DraftVocabulary {
    /// These ids. Order and repetitions do not matter.
    pub fn from_ids(ids: impl IntoIterator<Item = u32>) -> Self {
        Self {
            ids: ids.into_iter().collect(),
        }
    }

    /// The ids below `n`. In vocabularies built by merging pairs, as those of the Qwen models, low ids are common tokens.
    pub fn first(n: u32) -> Self {
        Self::from_ids(0..n)
    }

    /// The `n` ids that occur most often in `tokens`, all texts laid end to end; the lower of two that occur as often. Fewer
    /// if there are not so many.
    pub fn most_frequent(tokens: impl IntoIterator<Item = u32>, n: usize) -> Self {
        let mut counts: HashMap<u32, u64> = HashMap::new();
        for id in tokens {
            *counts.entry(id).or_default() += 1;
        }
        let mut ids: Vec<(u32, u64)> = counts.into_iter().collect();
        ids.sort_unstable_by_key(|&(id, count)| (Reverse(count), id));
        Self::from_ids(ids.into_iter().take(n).map(|(id, _)| id))
    }

    /// These ids as well.
    #[must_use]
    pub fn with(mut self, ids: &[u32]) -> Self {
        self.ids.extend(ids);
        self
    }

    /// The ids, ascending.
    pub fn ids(&self) -> impl Iterator<Item = u32> + '_ {
        self.ids.iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_frequent_ids_are_kept_and_of_equals_the_lower() {
        let tokens = [7, 3, 3, 9, 9, 9, 5, 7, 1];
        let ids = |n| {
            DraftVocabulary::most_frequent(tokens, n)
                .ids()
                .collect::<Vec<_>>()
        };
        assert_eq!(ids(0), [0u32; 0]);
        assert_eq!(ids(2), [3, 9]);
        assert_eq!(ids(4), [1, 3, 7, 9]);
        assert_eq!(ids(100), [1, 3, 5, 7, 9]);
    }

    #[test]
    fn ids_are_ascending_and_come_once() {
        let ids: Vec<u32> = DraftVocabulary::from_ids([4, 1, 4]).with(&[2, 1]).ids().collect();
        assert_eq!(ids, [1, 2, 4]);
        assert_eq!(DraftVocabulary::first(3), DraftVocabulary::from_ids([2, 1, 0]));
    }
}
