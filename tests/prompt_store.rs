//! Stored prompts of real models: bit for bit the caches and the logits of a cold start.

mod common;

use std::sync::Arc;

use common::{assert_same, bits, load, seeded, text_ids, tiny_of, Result, Rng};
use recant::core::{Cache, CacheStack, KvType, LanguageModel, Rows, Segment, Window};
use recant::generate::{Hit, PromptStore, StoredState};
use recant::{CacheOptions, StoreOptions};

const PLENTY: usize = 1 << 30;

fn store(budget: usize) -> PromptStore {
    let every = StoreOptions::default().every;
    PromptStore::new(StoreOptions { budget, every })
}

/// A model, and the caches it is run with.
struct Lab {
    model: Arc<dyn LanguageModel>,
    options: CacheOptions,
}

impl Lab {
    fn fingerprint(&self) -> &str {
        &self.model.spec().layout.fingerprint
    }

    fn feed(&self, stack: &mut CacheStack, tokens: &[u32]) -> Result<Vec<u32>> {
        let output = self
            .model
            .forward(&mut [Segment::new(tokens, stack, Rows::Last)])?;
        bits(output.segments[0].logits()?)
    }

    fn cold(&self, prompt: &[u32]) -> Result<(CacheStack, Vec<u32>)> {
        let mut stack = self.model.new_caches(&self.options)?;
        let logits = self.feed(&mut stack, prompt)?;
        Ok((stack, logits))
    }

    /// Reads a prompt from its longest stored beginning on, in pieces, and stores the state after each.
    fn warm(
        &self,
        store: &PromptStore,
        prompt: &[u32],
        pieces: &[usize],
    ) -> Result<(CacheStack, Vec<u32>, usize)> {
        let mut stack = self.model.new_caches(&self.options)?;
        let mut fits = |hit: &Hit| stack.fits(&hit.state.caches).is_ok();
        let hit = store.longest(self.fingerprint(), prompt, prompt.len() - 1, &mut fits)?;
        if let Some(hit) = &hit {
            stack.load(&hit.state.caches)?;
            assert_eq!(stack.len(), hit.tokens);
        }
        let reused = stack.len();
        let mut logits = Vec::new();
        let mut ends: Vec<usize> = pieces
            .iter()
            .scan(0, |end, piece| {
                *end += piece;
                Some(*end)
            })
            .filter(|end| (reused + 1..prompt.len()).contains(end))
            .collect();
        ends.push(prompt.len());
        for end in ends {
            let start = stack.len();
            logits = self.feed(&mut stack, &prompt[start..end])?;
            let state = StoredState {
                caches: stack.snapshot()?,
                drafter: None,
            };
            store.put(self.fingerprint(), &prompt[..end], state)?;
        }
        Ok((stack, logits, reused))
    }

    /// Warm and cold, compared; and how many tokens were reused.
    fn compare(&self, store: &PromptStore, prompt: &[u32], pieces: &[usize]) -> Result<usize> {
        let (warm, warm_logits, reused) = self.warm(store, prompt, pieces)?;
        let (cold, cold_logits) = self.cold(prompt)?;
        assert_same(&format!("{} tokens, {reused} reused", prompt.len()), &warm, &cold)?;
        assert_eq!(warm_logits, cold_logits);
        Ok(reused)
    }
}

fn caches() -> [CacheOptions; 3] {
    let plain = CacheOptions::default();
    [
        plain,
        CacheOptions {
            kv: KvType::F16,
            ..plain
        },
        CacheOptions {
            window: Some(Window { window: 9, sink: 2 }),
            ..plain
        },
    ]
}

fn models() -> Result<Vec<(&'static str, Arc<dyn LanguageModel>)>> {
    Ok(vec![
        ("dense", tiny_of(&seeded::dense(|_| {}))?),
        ("moe", tiny_of(&seeded::moe(|_| {}))?),
        ("next", tiny_of(&seeded::next(|_| {}))?),
        ("demo", Arc::clone(load("demo-target")?.model())),
    ])
}

/// A beginning of something read before, and something new.
fn next_prompt(rng: &mut Rng, read: &[Vec<u32>]) -> Vec<u32> {
    let base = &read[rng.below(read.len())];
    let mut prompt = match rng.below(4) {
        0 => Vec::new(),
        1 => base[..rng.below(base.len() + 1)].to_vec(),
        _ => base.clone(),
    };
    prompt.extend((0..1 + rng.below(25)).map(|_| rng.below(250) as u32));
    prompt.truncate(200);
    prompt
}

#[test]
fn random_prompts_with_checkpoints_anywhere_under_eviction_and_from_a_folder_are_as_cold_ones() -> Result<()>
{
    // Under either budget.
    let (mut reused, mut evicted) = ([0; 2], [0; 2]);
    for (name, model) in models()? {
        for (index, options) in caches().into_iter().enumerate() {
            let lab = Lab {
                model: Arc::clone(&model),
                options,
            };
            let mut rng = Rng(90 + index as u64);
            let one = lab.cold(&[1; 60])?.0.snapshot()?.bytes();
            for (which, budget) in [PLENTY, 12 * one].into_iter().enumerate() {
                let folder = tempfile::tempdir()?;
                let mut store = store(budget);
                let mut read = vec![(0..120).collect::<Vec<u32>>()];
                for turn in 0..24 {
                    let prompt = next_prompt(&mut rng, &read);
                    let pieces = rng.partition(prompt.len(), 30);
                    reused[which] += lab
                        .compare(&store, &prompt, &pieces)
                        .map_err(|e| format!("{name}, {options:?}: {e}"))?;
                    assert!(store.stats().bytes <= budget, "{:?}", store.stats());
                    if turn % 8 == 7 {
                        evicted[which] += store.stats().evictions;
                        store.save(folder.path())?;
                        let loaded = self::store(budget);
                        assert_eq!(loaded.load(folder.path())?, store.stats().entries);
                        assert_eq!(loaded.stats().bytes, store.stats().bytes);
                        store = loaded;
                    }
                    read.push(prompt);
                }
            }
        }
    }
    assert!(
        reused[0] > 4000 && reused[1] > 800,
        "{reused:?} tokens were reused"
    );
    assert!(
        evicted[0] == 0 && evicted[1] > 100,
        "{evicted:?} entries were evicted"
    );
    Ok(())
}

#[test]
fn checkpoints_of_one_text_hold_its_rows_once() -> Result<()> {
    let lab = Lab {
        model: Arc::clone(load("demo-target")?.model()),
        options: CacheOptions::default(),
    };
    let ids = text_ids(300)?;
    let store = store(PLENTY);
    // The longest first, so that those before it have to be cut out of its rows.
    for end in [300, 40, 256, 257, 1, 299] {
        let (stack, _) = lab.cold(&ids[..end])?;
        let state = StoredState {
            caches: stack.snapshot()?,
            drafter: None,
        };
        store.put(lab.fingerprint(), &ids[..end], state)?;
    }
    let whole = lab.cold(&ids)?.0.snapshot()?;
    let last = whole.after(300)?.bytes();
    assert_eq!(store.stats().entries, 6);
    assert_eq!(store.stats().bytes, whole.bytes() + 5 * last + 4 * 300);
    for most in [300, 299, 298, 256, 255, 39] {
        let hit = store
            .longest(lab.fingerprint(), &ids, most, &mut |_| true)?
            .ok_or("no hit")?;
        let cold = lab.cold(&ids[..hit.tokens])?.0.snapshot()?;
        assert_eq!(hit.state.caches.difference(&cold), None);
    }
    Ok(())
}

#[test]
fn c115_two_threads_on_one_store_read_as_cold_ones() -> Result<()> {
    let lab = Lab {
        model: tiny_of(&seeded::dense(|_| {}))?,
        options: CacheOptions::default(),
    };
    let one = lab.cold(&[1; 60])?.0.snapshot()?.bytes();
    for (budget, least) in [(PLENTY, 300), (4 * one, 50)] {
        let store = store(budget);
        let read = |seed: u64| -> std::result::Result<usize, String> {
            let mut rng = Rng(seed);
            // Both threads read the same texts, so that they meet in the same entries.
            let texts: Vec<Vec<u32>> = (0..3)
                .map(|salt| (0..120).map(|i| (7 * i + salt) % 250).collect())
                .collect();
            let mut reused = 0;
            for _ in 0..40 {
                let prompt = next_prompt(&mut rng, &texts);
                let pieces = rng.partition(prompt.len(), 40);
                reused += lab.compare(&store, &prompt, &pieces).map_err(|e| e.to_string())?;
            }
            Ok(reused)
        };
        let (a, b) = std::thread::scope(|scope| {
            let (a, b) = (scope.spawn(|| read(1)), scope.spawn(|| read(2)));
            (a.join(), b.join())
        });
        for reused in [a, b] {
            let reused = reused.map_err(|_| "a thread panicked")??;
            assert!(reused > least, "{reused} tokens were reused");
        }
        assert!(store.stats().bytes <= budget);
    }
    Ok(())
}
