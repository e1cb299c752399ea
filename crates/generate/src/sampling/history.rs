//! The text that penalties count, and what they and the bias do to logits.

use std::collections::BTreeMap;

use super::Sampling;

/// How often a token occurs among those that penalties look at.
#[derive(Debug, Clone, Copy, Default)]
struct Count {
    all: usize,
    output: usize,
}

/// A text and its counts, kept between rows so that each costs no more than its new tokens. What it gives depends on the
/// text it is told to follow, not on those before.
#[derive(Debug, Default)]
pub(super) struct History {
    tokens: Vec<u32>,
    prompt: usize,
    window: Option<usize>,
    counts: BTreeMap<u32, Count>,
}

impl History {
    /// Becomes the history of `text` and `more`, whose first `prompt` tokens are the prompt.
    pub(super) fn follow(&mut self, prompt: usize, window: Option<usize>, text: &[u32], more: &[u32]) {
        if (self.prompt, self.window) != (prompt, window) {
            *self = Self {
                prompt,
                window,
                ..Self::default()
            };
        }
        let mut same = shared(&self.tokens, text);
        if same == text.len() {
            same += shared(&self.tokens[same..], more);
        }
        while self.tokens.len() > same {
            self.pop();
        }
        let new = text.iter().chain(more).skip(same);
        new.for_each(|token| self.push(*token));
    }

    /// The whole text.
    pub(super) fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    fn push(&mut self, token: u32) {
        self.tokens.push(token);
        self.count(self.tokens.len() - 1);
        if let Some(place) = self.beside_window() {
            self.uncount(place);
        }
    }

    fn pop(&mut self) {
        if let Some(place) = self.beside_window() {
            self.count(place);
        }
        self.uncount(self.tokens.len() - 1);
        self.tokens.pop();
    }

    /// The last place that the window has left behind.
    fn beside_window(&self) -> Option<usize> {
        self.tokens.len().checked_sub(self.window?)?.checked_sub(1)
    }

    fn count(&mut self, place: usize) {
        let count = self.counts.entry(self.tokens[place]).or_default();
        count.all += 1;
        count.output += usize::from(place >= self.prompt);
    }

    fn uncount(&mut self, place: usize) {
        let token = self.tokens[place];
        if let Some(count) = self.counts.get_mut(&token) {
            count.all -= 1;
            count.output -= usize::from(place >= self.prompt);
            if count.all == 0 {
                self.counts.remove(&token);
            }
        }
    }
}

/// How many tokens two texts begin with alike.
fn shared(a: &[u32], b: &[u32]) -> usize {
    let shorter = a.len().min(b.len());
    if a[..shorter] == b[..shorter] {
        return shorter;
    }
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// Applies bias and penalties to the logits of the token after a text. They are of `ids`, if not each of its own place.
pub(super) fn adjust(sampling: &Sampling, history: &History, ids: Option<&[u32]>, logits: &mut [f32]) {
    let place = |id: u32| match ids {
        None => Some(id as usize),
        Some(ids) => ids.binary_search(&id).ok(),
    };
    for (id, bias) in &sampling.logit_bias {
        if let Some(logit) = place(*id).and_then(|place| logits.get_mut(place)) {
            *logit += bias;
        }
    }
    if !sampling.penalises() {
        return;
    }
    let repetition = sampling.repetition_penalty;
    for (id, count) in &history.counts {
        let Some(logit) = place(*id).and_then(|place| logits.get_mut(place)) else {
            continue;
        };
        *logit = if *logit > 0.0 {
            *logit / repetition
        } else {
            *logit * repetition
        };
        if count.output > 0 {
            *logit -= sampling.presence_penalty + sampling.frequency_penalty * count.output as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn counts(history: &History) -> Vec<(u32, usize, usize)> {
        let all = history.counts.iter();
        all.map(|(id, count)| (*id, count.all, count.output)).collect()
    }

    /// What the counts are, by their definition.
    fn counted(prompt: usize, window: Option<usize>, text: &[u32]) -> Vec<(u32, usize, usize)> {
        let first = text.len().saturating_sub(window.unwrap_or(usize::MAX));
        let mut counts: BTreeMap<u32, (usize, usize)> = BTreeMap::new();
        for (place, token) in text.iter().enumerate().skip(first) {
            let count = counts.entry(*token).or_default();
            count.0 += 1;
            count.1 += usize::from(place >= prompt);
        }
        counts
            .into_iter()
            .map(|(id, (all, output))| (id, all, output))
            .collect()
    }

    proptest! {
        #[test]
        fn counts_depend_on_the_text_followed_and_on_none_before(
            steps in prop::collection::vec((prop::collection::vec(0..4u32, 0..9), prop::collection::vec(0..4u32, 0..4)), 1..12),
            prompt in 0..6usize,
            window in prop::option::of(1..6usize),
        ) {
            let mut history = History::default();
            for (text, more) in steps {
                history.follow(prompt, window, &text, &more);
                let whole = [text, more].concat();
                prop_assert_eq!(history.tokens(), &whole);
                prop_assert_eq!(counts(&history), counted(prompt, window, &whole));
            }
        }
    }
}
