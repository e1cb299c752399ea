//! Cases, one by one.

use std::sync::Arc;

use recant_core::{Error as CoreError, KvType};

use super::*;
use crate::store::bytes_of_tokens;
use crate::Error;

/// Reads a prompt as a session does: from the longest stored beginning on, with a checkpoint at each multiple of `every`
/// and one at the end. Gives the caches, the last logits and the number of tokens that were not read.
fn read(store: &PromptStore, prompt: &[u32]) -> (CacheStack, Option<Vec<f32>>, usize) {
    let model = ScriptedModel::new(1, 64);
    let mut stack = model.new_caches(&CacheOptions::default()).expect("caches");
    let hit = store
        .longest(MODEL, prompt, prompt.len().saturating_sub(1), &mut |hit| {
            stack.fits(&hit.state.caches).is_ok()
        })
        .expect("a search");
    if let Some(hit) = &hit {
        stack.load(&hit.state.caches).expect("a load");
    }
    let reused = stack.len();
    let mut logits = None;
    while stack.len() < prompt.len() {
        let every = store.options().every;
        let next = (stack.len() / every + 1) * every;
        let (start, end) = (stack.len(), next.min(prompt.len()));
        logits = feed(&model, &mut stack, &prompt[start..end]);
        if !store.contains(MODEL, &prompt[..end]) {
            let state = StoredState {
                caches: stack.snapshot().expect("a snapshot"),
                drafter: None,
            };
            store.put(MODEL, &prompt[..end], state).expect("a put");
        }
    }
    (stack, logits, reused)
}

/// Reads a prompt warm and cold, compares them in every bit, and gives the number of tokens that were reused.
fn warm_and_cold(store: &PromptStore, prompt: &[u32]) -> usize {
    let (warm, logits, reused) = read(store, prompt);
    let (cold, expected, _) = read(&self::store(0), prompt);
    let [warm, cold] = [warm, cold].map(|stack| stack.snapshot().expect("a snapshot"));
    assert_eq!(warm.difference(&cold), None);
    assert_eq!(logits, expected);
    audit(store);
    reused
}

#[test]
fn c016_a_second_turn_that_shares_less_than_the_first_one_left_is_as_a_cold_one() {
    let store = store(PLENTY);
    let first = [text(0, 10), text(5, 8)].concat();
    warm_and_cold(&store, &first);
    let second = [text(0, 10), text(9, 5)].concat();
    // Nothing is held at or before the tenth token, so all is read again; and then, from the sixteenth on, less.
    assert_eq!(warm_and_cold(&store, &second), 0);
    let third = [first[..17].to_vec(), text(9, 5)].concat();
    assert_eq!(warm_and_cold(&store, &third), 16);
}

#[test]
fn c017_prompts_around_a_boundary_are_as_cold_ones() {
    let store = PromptStore::new(StoreOptions {
        budget: PLENTY,
        every: 4,
    });
    warm_and_cold(&store, &text(0, 18));
    for (same, reused) in [(15, 12), (16, 16), (17, 16), (18, 18)] {
        let prompt = [text(0, same), text(3, 4)].concat();
        assert_eq!(
            warm_and_cold(&store, &prompt),
            reused,
            "{same} tokens are the same"
        );
    }
}

#[test]
fn c019_a_key_that_is_not_what_the_caches_hold_is_refused() {
    let store = store(PLENTY);
    for claimed in [0, 8, 10] {
        let refused = store.put(MODEL, &text(0, claimed), plain(&text(0, 9)));
        assert!(
            matches!(refused, Err(Error::Core(CoreError::Mismatch { .. }))),
            "{claimed}: {refused:?}"
        );
    }
    let whole = cold(&text(0, 9));
    let piece = StoredState {
        caches: whole.after(3).expect("a piece"),
        drafter: None,
    };
    assert!(store.put(MODEL, &text(0, 9), piece).is_err());
    // A layer that holds fewer, and rows that are fewer than they should be.
    let fewer = cold(&text(0, 8)).parts()[1].clone();
    let uneven = Snapshot::new("stack", 9).with_parts(vec![whole.parts()[0].clone(), fewer]);
    let rows = Tensor::zeros((8, 2), DType::F32, &Device::Cpu).expect("rows");
    let short = Snapshot::new("stack", 9).with_parts(vec![Snapshot::new("kv", 9).with_rows("keys", rows)]);
    for caches in [uneven, short] {
        let state = StoredState {
            caches,
            drafter: None,
        };
        assert!(store.put(MODEL, &text(0, 9), state).is_err());
    }
    let rows = Tensor::zeros((8, 2), DType::F32, &Device::Cpu).expect("rows");
    let state = StoredState {
        caches: whole,
        drafter: Some(DrafterState {
            snapshot: Snapshot::new("drafter", 9).with_rows("rows", rows),
            ahead: Vec::new(),
        }),
    };
    assert!(store.put(MODEL, &text(0, 9), state).is_err());
    assert_eq!(store.stats(), Default::default());
    // A conversation, and another one that shares its first 11 tokens.
    let a = text(0, 32);
    warm_and_cold(&store, &a);
    warm_and_cold(&store, &[&a[..11], &text(4, 9)].concat());
    assert_eq!(warm_and_cold(&store, &[&a[..11], &text(6, 9)].concat()), 0);
}

#[test]
fn c022_what_is_reused_is_the_last_checkpoint_in_the_common_beginning() {
    for (prompt, reused) in [
        (text(0, 64), 48),
        (text(0, 65), 64),
        (text(0, 63), 48),
        (text(0, 30), 16),
        (text(0, 16), 0),
        (text(0, 1), 0),
        (text(1, 64), 0),
    ] {
        let store = store(PLENTY);
        read(&store, &text(0, 64));
        assert_eq!(warm_and_cold(&store, &prompt), reused, "{} tokens", prompt.len());
        let stats = store.stats();
        assert_eq!(stats.tokens_reused, reused as u64);
        assert_eq!(
            (stats.hits, stats.misses),
            (u64::from(reused > 0), 1 + u64::from(reused == 0))
        );
    }
}

#[test]
fn the_edges_of_a_search() {
    let store = store(PLENTY);
    assert!(longest(&store, &[], 0).is_none());
    store.put(MODEL, &[], plain(&[])).expect("a put");
    assert_eq!(store.stats().entries, 0);
    for tokens in [4, 9, 12] {
        store
            .put(MODEL, &text(0, tokens), plain(&text(0, tokens)))
            .expect("a put");
    }
    for (prompt, most, expected) in [
        (text(0, 12), usize::MAX, 12),
        (text(0, 12), 12, 12),
        (text(0, 12), 11, 9),
        (text(0, 12), 9, 9),
        (text(0, 12), 4, 4),
        (text(0, 12), 3, 0),
        (text(0, 12), 0, 0),
        (text(0, 11), 11, 9),
        (text(0, 30), 30, 12),
        // Another end, in the middle of what is held, and right after a checkpoint.
        ([text(0, 7), text(1, 7)].concat(), 14, 4),
        ([text(0, 9), vec![63]].concat(), 10, 9),
        (text(1, 12), 12, 0),
    ] {
        let hit = longest(&store, &prompt, most);
        assert_eq!(
            hit.as_ref().map_or(0, |hit| hit.tokens),
            expected,
            "{prompt:?} {most}"
        );
        if let Some(hit) = hit {
            assert_cold(&hit, &prompt);
        }
    }
    assert!(store.contains(MODEL, &text(0, 9)));
    for tokens in [0, 3, 5, 13] {
        assert!(!store.contains(MODEL, &text(0, tokens)));
    }
    assert!(!store.contains("another", &text(0, 9)));
    store.clear();
    assert_eq!((store.stats().entries, store.stats().bytes), (0, 0));
    assert!(longest(&store, &text(0, 12), 12).is_none());
    audit(&store);
}

#[test]
fn a_shorter_entry_is_given_where_a_longer_one_does_not_fit() {
    let store = store(PLENTY);
    for tokens in [4, 9, 12] {
        store
            .put(MODEL, &text(0, tokens), plain(&text(0, tokens)))
            .expect("a put");
    }
    let mut asked = Vec::new();
    let hit = store
        .longest(MODEL, &text(0, 20), 20, &mut |hit| {
            // The store is not locked meanwhile.
            assert!(store.contains(MODEL, &text(0, hit.tokens)));
            asked.push(hit.tokens);
            hit.tokens < 9
        })
        .expect("a search");
    assert_eq!(hit.map(|hit| hit.tokens), Some(4));
    assert_eq!(asked, [12, 9, 4]);
    let none = store
        .longest(MODEL, &text(0, 20), 20, &mut |_| false)
        .expect("a search");
    assert!(none.is_none());
    assert_eq!(
        (
            store.stats().hits,
            store.stats().misses,
            store.stats().tokens_reused
        ),
        (1, 1, 4)
    );
}

#[test]
fn entries_of_another_model_or_of_other_caches_are_kept_apart() {
    let store = store(PLENTY);
    let tokens = text(0, 12);
    let options = [
        CacheOptions::default(),
        windowed(),
        CacheOptions {
            window: Some(Window { window: 6, sink: 1 }),
            ..CacheOptions::default()
        },
    ];
    let snapshots = options.map(|options| fed(&options, &tokens).snapshot().expect("a snapshot"));
    for (index, caches) in snapshots.iter().enumerate() {
        let state = StoredState {
            caches: caches.clone(),
            drafter: None,
        };
        store.put(MODEL, &tokens, state).expect("a put");
        assert_eq!(store.stats().entries, index + 1);
        audit(&store);
    }
    for (options, caches) in options.iter().zip(&snapshots) {
        let empty = fed(options, &[]);
        let hit = store
            .longest(MODEL, &tokens, 12, &mut |hit| {
                empty.fits(&hit.state.caches).is_ok()
            })
            .expect("a search")
            .expect("a hit");
        assert_eq!(hit.state.caches.difference(caches), None);
    }
    let mut asked = 0;
    let mut count = |_: &Hit| {
        asked += 1;
        true
    };
    assert!(store
        .longest("another", &tokens, 12, &mut count)
        .expect("a search")
        .is_none());
    assert_eq!(asked, 0);
    // The same tokens under another fingerprint share nothing.
    let before = store.stats().bytes;
    store.put("another", &tokens, plain(&tokens)).expect("a put");
    assert_eq!(store.stats().bytes, before + 12 * ROW + LAST);
}

#[test]
fn rows_of_another_type_are_kept_apart() {
    use recant_core::{AttentionLayout, LayerLayout, StackLayout};
    let store = store(PLENTY);
    let layout = Arc::new(StackLayout {
        fingerprint: MODEL.to_owned(),
        layers: vec![LayerLayout::Attention(AttentionLayout {
            kv_heads: 1,
            head_dim: 2,
            dtype: DType::F32,
        })],
        device: Device::Cpu,
    });
    let rows = Tensor::rand(0f32, 1.0, (9, 1, 2), &Device::Cpu).expect("rows");
    for kv in [KvType::Native, KvType::F16] {
        let options = CacheOptions {
            kv,
            ..CacheOptions::default()
        };
        for tokens in [9, 4] {
            let mut stack = CacheStack::standard(Arc::clone(&layout), &options).expect("caches");
            let rows = rows.narrow(0, 0, tokens).expect("rows");
            stack
                .attention(0)
                .expect("a layer")
                .append(&rows, &rows)
                .expect("an append");
            let state = StoredState {
                caches: stack.snapshot().expect("a snapshot"),
                drafter: None,
            };
            store.put(MODEL, &text(0, tokens), state.clone()).expect("a put");
            let hit = store
                .longest(MODEL, &text(0, tokens), tokens, &mut |hit| {
                    stack.fits(&hit.state.caches).is_ok()
                })
                .expect("a search")
                .expect("a hit");
            assert_eq!(hit.state.caches.difference(&state.caches), None);
        }
    }
    // Nine rows of 16 bytes and nine of 8, each with their ids: the shorter entries took none of their own.
    assert_eq!(store.stats().bytes, 9 * (16 + 4) + 9 * (8 + 4));
}

#[test]
fn a_chat_of_growing_turns_stores_each_row_once() {
    let store = store(PLENTY);
    let turns = 50;
    for turn in 1..=turns {
        let tokens = text(0, 40 * turn);
        let state = StoredState {
            caches: cold(&tokens),
            drafter: Some(drafter("head", &tokens, text(0, 40 * turn + 1)[40 * turn])),
        };
        store.put(MODEL, &tokens, state).expect("a put");
        // The drafter's tree holds one id more, and beside its rows and hashes a row of two numbers.
        let model = 40 * turn * ROW + turn * LAST;
        let drafter = 40 * turn * ROW + 4 + turn * (LAST + 8);
        assert_eq!(store.stats().bytes, model + drafter, "turn {turn}");
    }
    audit(&store);
    let prompt = text(0, 2100);
    for most in [2000, 1999, 41, 40] {
        let hit = longest(&store, &prompt, most).expect("a hit");
        assert_eq!(hit.tokens, most / 40 * 40);
        assert!(hit.state.drafter.is_some());
        assert_cold(&hit, &prompt);
    }
}

#[test]
fn an_entry_that_is_put_again_is_only_freshened() {
    let [a, b, c] = [text(0, 10), text(1, 10), text(2, 10)];
    let store = store(2 * (10 * ROW + LAST));
    for tokens in [&a, &b, &a, &c] {
        store.put(MODEL, tokens, plain(tokens)).expect("a put");
        audit(&store);
    }
    let held = [&a, &b, &c].map(|tokens| store.contains(MODEL, tokens));
    assert_eq!(held, [true, false, true]);
    assert_eq!((store.stats().entries, store.stats().evictions), (2, 1));
    // A hit freshens too.
    longest(&store, &a, 10).expect("a hit");
    store.put(MODEL, &b, plain(&b)).expect("a put");
    let held = [&a, &b, &c].map(|tokens| store.contains(MODEL, tokens));
    assert_eq!(held, [true, true, false]);
}

#[test]
fn an_inner_entry_that_is_evicted_leaves_its_rows_to_those_below_and_a_leaf_leaves_nothing() {
    let store = store(30 * ROW + 2 * LAST);
    for tokens in [10, 20, 30] {
        store
            .put(MODEL, &text(0, tokens), plain(&text(0, tokens)))
            .expect("a put");
        audit(&store);
    }
    // The oldest gave up its hashes alone.
    assert_eq!(store.stats().bytes, 30 * ROW + 2 * LAST);
    let held = [10, 20, 30].map(|tokens| store.contains(MODEL, &text(0, tokens)));
    assert_eq!(held, [false, true, true]);
    assert_cold(&longest(&store, &text(0, 30), 30).expect("a hit"), &text(0, 30));
    // What was given up is taken again without rows, at the cost of the entry in the middle.
    store
        .put(MODEL, &text(0, 10), plain(&text(0, 10)))
        .expect("a put");
    let held = [10, 20, 30].map(|tokens| store.contains(MODEL, &text(0, tokens)));
    assert_eq!(held, [true, false, true]);
    assert_eq!(store.stats().bytes, 30 * ROW + 2 * LAST);
    audit(&store);
    // Room for another text takes the leaf, and with it the twenty rows that only it needed.
    store
        .put(MODEL, &text(0, 10), plain(&text(0, 10)))
        .expect("a put");
    store
        .put(MODEL, &text(1, 10), plain(&text(1, 10)))
        .expect("a put");
    let held = [10, 20, 30].map(|tokens| store.contains(MODEL, &text(0, tokens)));
    assert_eq!(held, [true, false, false]);
    assert_eq!(store.stats().bytes, 2 * (10 * ROW + LAST));
    audit(&store);
}

#[test]
fn what_is_larger_than_the_budget_is_not_stored_and_evicts_nothing() {
    let size = 10 * ROW + LAST;
    for (budget, stored) in [(0, false), (size - 1, false), (size, true)] {
        let store = store(budget);
        store
            .put(MODEL, &text(0, 10), plain(&text(0, 10)))
            .expect("a put");
        assert_eq!(store.contains(MODEL, &text(0, 10)), stored, "{budget}");
        store
            .put(MODEL, &text(1, 11), plain(&text(1, 11)))
            .expect("a put");
        assert_eq!(store.contains(MODEL, &text(0, 10)), stored, "{budget}");
        assert_eq!(
            (store.stats().evictions, store.stats().entries),
            (0, usize::from(stored))
        );
        audit(&store);
    }
}

#[test]
fn a_drafters_state_goes_only_with_a_prompt_that_goes_on_as_it_was_told() {
    let store = store(PLENTY);
    let tokens = text(0, 10);
    let put = |drafter| {
        let caches = cold(&tokens);
        store
            .put(MODEL, &tokens, StoredState { caches, drafter })
            .expect("a put");
        audit(&store);
    };
    let kinds = |pending: u32| {
        let mut kinds = Vec::new();
        let prompt = [tokens.as_slice(), &[pending, 1]].concat();
        store
            .longest(MODEL, &prompt, 11, &mut |hit| {
                assert_cold(hit, &prompt);
                let drafter = hit.state.drafter.as_ref();
                kinds.push(drafter.map_or(String::new(), |state| state.snapshot.kind().to_owned()));
                false
            })
            .expect("a search");
        kinds
    };
    // It is added to an entry that lacks one, also when others are there.
    put(None);
    assert_eq!(kinds(5), [""]);
    put(Some(drafter("head", &tokens, 5)));
    assert_eq!(kinds(5), ["head", ""]);
    assert_eq!(kinds(6), [""]);
    put(Some(drafter("head", &tokens, 6)));
    put(Some(drafter("model", &tokens, 5)));
    assert_eq!(kinds(5), ["model", "head", ""]);
    assert_eq!(kinds(6), ["head", ""]);
    assert_eq!(store.stats().entries, 1);
    // The prompt ends where the entry does, so nobody knows whether it goes on as the drafter was told.
    let hit = longest(&store, &tokens, 10).expect("a hit");
    assert!(hit.state.drafter.is_none());
    // One that was told nothing more goes with any prompt.
    let DrafterState { snapshot, .. } = drafter("whole", &tokens, 5);
    put(Some(DrafterState {
        snapshot: snapshot.with_parts(Vec::new()),
        ahead: Vec::new(),
    }));
    let hit = longest(&store, &tokens, 10).expect("a hit");
    assert_eq!(
        hit.state.drafter.map(|state| state.snapshot.kind().to_owned()),
        Some("whole".to_owned())
    );
}

#[test]
fn a_drafters_state_of_any_form_comes_back_as_it_was() {
    let tokens = text(0, 10);
    let array = || Tensor::new(&[1f32, 2.0], &Device::Cpu).expect("an array");
    let stack = |n: usize| cold(&text(3, n));
    let forms = [
        Snapshot::new("nothing", 11),
        Snapshot::new("array", 11)
            .with_array("a", array())
            .with_setting("depth", 3),
        Snapshot::new("stack", 10).with_parts(stack(10).parts().to_vec()),
        Snapshot::new("one of the text", 11).with_parts(vec![stack(10)]),
        Snapshot::new("one of another length", 11).with_parts(vec![stack(11)]),
        Snapshot::new("two", 11).with_parts(vec![stack(10), stack(10)]),
        Snapshot::new("nested", 11)
            .with_array("a", array())
            .with_parts(vec![Snapshot::new("inner", 11).with_parts(vec![stack(10)])]),
    ];
    let folder = tempfile::tempdir().expect("a folder");
    for (index, snapshot) in forms.iter().enumerate() {
        let store = store(PLENTY);
        let state = StoredState {
            caches: cold(&tokens),
            drafter: Some(DrafterState {
                snapshot: snapshot.clone(),
                ahead: vec![5],
            }),
        };
        store.put(MODEL, &tokens, state).expect("a put");
        let folder = folder.path().join(index.to_string());
        store.save(&folder).expect("a save");
        let loaded = self::store(PLENTY);
        loaded.load(&folder).expect("a load");
        let prompt = [tokens.as_slice(), &[5]].concat();
        for store in [&store, &loaded] {
            let hit = longest(store, &prompt, 10).expect("a hit");
            let back = hit.state.drafter.expect("a drafter's state");
            assert_eq!(back.snapshot.difference(snapshot), None, "{}", snapshot.kind());
            assert_eq!(back.ahead, [5]);
        }
        assert_eq!(loaded.stats().bytes, store.stats().bytes, "{}", snapshot.kind());
    }
}

#[test]
fn a_drafters_state_that_has_no_room_beside_the_caches_is_left_out() {
    let tokens = text(0, 10);
    let state = StoredState {
        caches: cold(&tokens),
        drafter: Some(drafter("head", &tokens, 5)),
    };
    let alone = 10 * ROW + LAST;
    let both = alone + state.drafter.as_ref().map_or(0, |d| d.snapshot.bytes()) + bytes_of_tokens(11);
    for (budget, expected) in [
        (alone - 1, None),
        (alone, Some(false)),
        (both - 1, Some(false)),
        (both, Some(true)),
    ] {
        let store = store(budget);
        store.put(MODEL, &tokens, state.clone()).expect("a put");
        let hit = longest(&store, &[tokens.as_slice(), &[5]].concat(), 10);
        assert_eq!(hit.map(|hit| hit.state.drafter.is_some()), expected, "{budget}");
        audit(&store);
    }
}

#[test]
fn c116_memory_is_flat_over_many_prompts_that_share_nothing() {
    let budget = 4 * (64 * ROW + LAST) + 100;
    let store = store(budget);
    let mut seen = Vec::new();
    for round in 0..500u32 {
        let prompt: Vec<u32> = (0..64)
            .map(|i| (round * 31 + i * (round % 7 + 1) + i * i) % 64)
            .collect();
        read(&store, &prompt);
        // What is counted is all that is behind the arrays, and it stays within the budget.
        let bytes = audit(&store);
        assert!(bytes <= budget, "{bytes} in round {round}");
        seen.push(bytes);
    }
    let largest = |rounds: &[usize]| rounds.iter().copied().max();
    assert_eq!(largest(&seen[20..100]), largest(&seen[400..]));
    store.clear();
    assert_eq!(audit(&store), 0);
    assert!(store.lock().forest.export().is_empty());
}

#[test]
fn c116_a_snapshot_of_views_does_not_keep_what_they_were_cut_from() {
    let store = store(PLENTY);
    let large = Tensor::zeros((1000, 2), DType::F32, &Device::Cpu).expect("an array");
    let view = |from, rows| large.narrow(0, from, rows).expect("a view");
    let layer = Snapshot::new("views", 3)
        .with_rows("rows", view(7, 3))
        .with_array("last", view(999, 1));
    let state = StoredState {
        caches: Snapshot::new("stack", 3).with_parts(vec![layer.clone()]),
        drafter: Some(DrafterState {
            snapshot: Snapshot::new("drafter", 4)
                .with_array("newest", view(5, 1))
                .with_parts(vec![layer]),
            ahead: vec![1],
        }),
    };
    store.put(MODEL, &[1, 2, 3], state).expect("a put");
    assert_eq!(audit(&store), 2 * (3 * 8 + 8) + 8 + 4 * (3 + 4));
}

#[test]
fn an_interval_of_nothing_counts_as_one() {
    let every = |every| {
        let options = StoreOptions {
            every,
            ..StoreOptions::default()
        };
        PromptStore::new(options).options().every
    };
    assert_eq!([every(0), every(1), every(7)], [1, 1, 7]);
    assert_eq!(StoreOptions::default().every, 512);
}
