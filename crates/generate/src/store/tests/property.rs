//! Random calls, against a store that keeps whole snapshots in a list.

use std::collections::{BTreeSet, HashMap};

use proptest::prelude::*;

use super::*;

/// What is stored: a text, and for a drafter's state how many of its tokens were told ahead.
type Name = (Vec<u32>, bool);

/// All entries, the one used last at the end, each with what it costs beside rows.
#[derive(Default)]
struct Naive {
    entries: Vec<Name>,
    evictions: u64,
}

impl Naive {
    /// Rows are paid once for each beginning that any entry has.
    fn bytes(&self) -> usize {
        let mut prefixes = BTreeSet::new();
        let mut last = 0;
        for (text, of_drafter) in &self.entries {
            last += if *of_drafter { LAST + 8 } else { LAST };
            prefixes.extend((1..=text.len()).map(|n| (&text[..n], of_drafter)));
        }
        // A drafter's first token has no row yet.
        let rows = prefixes
            .iter()
            .map(|(text, of_drafter)| if **of_drafter && text.len() == 1 { 4 } else { ROW });
        last + rows.sum::<usize>()
    }

    fn touch(&mut self, name: &Name) -> bool {
        let at = self.entries.iter().position(|entry| entry == name);
        if let Some(at) = at {
            let entry = self.entries.remove(at);
            self.entries.push(entry);
        }
        at.is_some()
    }

    fn put(&mut self, name: Name, budget: usize) {
        if !self.touch(&name) {
            self.entries.push(name);
            while self.bytes() > budget {
                let (_, of_drafter) = self.entries.remove(0);
                self.evictions += u64::from(!of_drafter);
            }
        }
    }

    fn contains(&self, text: &[u32], of_drafter: bool) -> bool {
        self.entries
            .iter()
            .any(|(held, drafter)| held == text && *drafter == of_drafter)
    }

    fn longest(&self, prompt: &[u32], most: usize) -> usize {
        let held = (1..=most.min(prompt.len())).filter(|n| self.contains(&prompt[..*n], false));
        held.max().unwrap_or(0)
    }
}

#[derive(Debug, Clone)]
enum Op {
    /// The first tokens of a text, perhaps with a drafter that was told this token more.
    Put(Vec<u32>, Option<u32>),
    /// A prompt, and how many of its tokens may be reused.
    Longest(Vec<u32>, usize),
    Clear,
}

/// Texts of few different tokens, so that many begin alike.
fn texts() -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(0u32..2, 1..12)
}

fn ops() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (texts(), prop::option::of(0u32..2)).prop_map(|(text, ahead)| Op::Put(text, ahead)),
        6 => (texts(), 0usize..14).prop_map(|(text, most)| Op::Longest(text, most)),
        1 => Just(Op::Clear),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn random_calls_are_those_of_a_store_that_keeps_everything_whole(
        budget in prop_oneof![Just(PLENTY), 0usize..2500],
        ops in prop::collection::vec(ops(), 1..60),
    ) {
        let store = store(budget);
        let mut naive = Naive::default();
        let mut snapshots: HashMap<Vec<u32>, Snapshot> = HashMap::new();
        for op in ops {
            match op {
                Op::Put(text, ahead) => {
                    let caches = snapshots.entry(text.clone()).or_insert_with(|| cold(&text)).clone();
                    let size = text.len() * ROW + LAST;
                    let drafter = ahead.map(|pending| drafter("head", &text, pending));
                    store.put(MODEL, &text, StoredState { caches, drafter }).unwrap();
                    if size <= budget {
                        if let Some(pending) = ahead {
                            if size + text.len() * ROW + 4 + LAST + 8 <= budget {
                                naive.put(([text.as_slice(), &[pending]].concat(), true), budget);
                            }
                        }
                        naive.put((text, false), budget);
                    }
                }
                Op::Longest(prompt, most) => {
                    let hit = longest(&store, &prompt, most);
                    let expected = naive.longest(&prompt, most);
                    prop_assert_eq!(hit.as_ref().map_or(0, |hit| hit.tokens), expected);
                    if let Some(hit) = hit {
                        assert_cold(&hit, &prompt);
                        let told = prompt.get(..expected + 1).filter(|told| naive.contains(told, true));
                        prop_assert_eq!(hit.state.drafter.is_some(), told.is_some());
                        if let Some(told) = told {
                            naive.touch(&(told.to_vec(), true));
                        }
                        naive.touch(&(prompt[..expected].to_vec(), false));
                    }
                }
                Op::Clear => {
                    store.clear();
                    naive.entries.clear();
                }
            }
            let stats = store.stats();
            prop_assert_eq!(audit(&store), naive.bytes());
            prop_assert!(stats.bytes <= budget);
            prop_assert_eq!(stats.entries, naive.entries.iter().filter(|(_, drafter)| !drafter).count());
            prop_assert_eq!(stats.evictions, naive.evictions);
            for (text, of_drafter) in &naive.entries {
                prop_assert!(*of_drafter || store.contains(MODEL, text));
            }
        }
    }

    /// Caches that cannot be cut are held whole, and are as those of a cold start all the same.
    #[test]
    fn rotating_caches_come_back_as_they_were(
        budget in prop_oneof![Just(PLENTY), 0usize..1500],
        texts in prop::collection::vec(texts(), 1..30),
    ) {
        let store = store(budget);
        for text in texts {
            let stack = fed(&windowed(), &text);
            if let Some(hit) = longest(&store, &text, text.len()) {
                let expected = fed(&windowed(), &text[..hit.tokens]).snapshot().unwrap();
                prop_assert_eq!(hit.state.caches.difference(&expected), None);
            }
            let caches = stack.snapshot().unwrap();
            store.put(MODEL, &text, StoredState { caches, drafter: None }).unwrap();
            prop_assert!(audit(&store) <= budget);
        }
    }

    /// A store that was saved and loaded again gives what it gave; saving again writes nothing; and what is saved over and
    /// over is what is held last.
    #[test]
    fn a_folder_holds_what_the_store_holds(
        budget in prop_oneof![Just(PLENTY), 0usize..2500],
        rounds in prop::collection::vec(prop::collection::vec((texts(), prop::option::of(0u32..2)), 0..8), 1..5),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let store = store(budget);
        for puts in rounds {
            for (text, ahead) in puts {
                let drafter = ahead.map(|pending| drafter("head", &text, pending));
                store.put(MODEL, &text, StoredState { caches: cold(&text), drafter }).unwrap();
            }
            store.save(folder.path()).unwrap();
            prop_assert_eq!(store.save(folder.path()).unwrap(), 0);
            let loaded = self::store(PLENTY);
            prop_assert_eq!(loaded.load(folder.path()).unwrap(), store.stats().entries);
            // A drafter's state that outlived the caches it goes with is of no use.
            prop_assert!(loaded.stats().bytes <= store.stats().bytes);
            audit(&loaded);
            let texts = |store: &PromptStore, of_model: bool| -> BTreeSet<Vec<u32>> {
                let nodes = store.lock().forest.export();
                let entries = nodes.iter().filter(|node| node.held.is_some() && node.key.ahead.is_none() == of_model);
                entries.map(|node| node.text.clone()).collect()
            };
            prop_assert_eq!(texts(&loaded, true), texts(&store, true));
            prop_assert!(texts(&loaded, false).is_subset(&texts(&store, false)));
            for text in texts(&store, true).iter().chain(&texts(&loaded, false)) {
                let hit = longest(&loaded, text, text.len());
                if let Some(hit) = hit {
                    assert_cold(&hit, text);
                }
            }
        }
    }
}
