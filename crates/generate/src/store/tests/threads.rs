//! Several threads at once.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use super::*;
use crate::store::tree::{Held, Outcome, Room};
use crate::store::{cut, Key};

#[test]
fn c115_threads_that_read_and_put_at_once_get_what_a_cold_start_gives() {
    for budget in [PLENTY, 9_000, 700] {
        let store = store(budget);
        std::thread::scope(|scope| {
            for thread in 0..4u32 {
                let store = store.clone();
                scope.spawn(move || {
                    for round in 0..150u32 {
                        let mix = round.wrapping_mul(2_654_435_761).wrapping_add(thread * 77);
                        // Few first tokens and few places where texts part, so that threads meet in the same nodes.
                        let (shared, rest) = ((mix >> 8) as usize % 20, (mix >> 16) as usize % 12 + 1);
                        let prompt = [text(0, shared), text(mix % 3, rest)].concat();
                        if let Some(hit) = longest(&store, &prompt, prompt.len()) {
                            assert_cold(&hit, &prompt);
                        }
                        let drafter = (mix % 2 == 0).then(|| drafter("head", &prompt, mix % 5));
                        let state = StoredState {
                            caches: cold(&prompt),
                            drafter,
                        };
                        store.put(MODEL, &prompt, state).expect("a put");
                        assert!(store.stats().bytes <= budget);
                        if round % 50 == 49 {
                            store.clear();
                        }
                    }
                });
            }
        });
        audit(&store);
    }
}

#[test]
fn a_plan_that_another_thread_overtook_is_not_carried_out() {
    let whole = text(0, 12);
    let parting_at = |n: usize| [&whole[..n], &[60, 61, 62]].concat();
    // What is stored when the plan is made, and what is put meanwhile; nothing: all is cleared.
    for (before, meanwhile) in [
        (vec![], Some(parting_at(5))),
        (vec![text(1, 4)], Some(parting_at(5))),
        (vec![parting_at(5)], Some(parting_at(8))),
        (vec![parting_at(5)], Some(parting_at(2))),
        (vec![parting_at(5)], Some(whole[..5].to_vec())),
        (vec![parting_at(5)], Some(whole[..3].to_vec())),
        (vec![whole[..5].to_vec()], Some(parting_at(9))),
        (vec![whole[..5].to_vec()], Some(whole[..9].to_vec())),
        (vec![whole[..5].to_vec()], None),
        (vec![parting_at(5)], None),
    ] {
        let store = store(PLENTY);
        for text in &before {
            store.put(MODEL, text, plain(text)).expect("a put");
        }
        let caches = cold(&whole);
        let key = Key::of_model(MODEL, &caches);
        let plan = store.lock().forest.plan(&key, &whole);
        let cut = cut(&key, &caches, &plan).expect("a cut");
        match &meanwhile {
            Some(text) => store.put(MODEL, text, plain(text)).expect("a put"),
            None => store.clear(),
        }
        let held = Held {
            caches: Arc::new(caches.after(12).expect("what is no rows")),
            beside: None,
        };
        let mut room = Room {
            budget: PLENTY,
            evict: true,
            evicted: 0,
        };
        let outcome = store.lock().forest.put(&key, &whole, &plan, cut, held, &mut room);
        assert_eq!(outcome, Outcome::Stale, "{before:?}, {meanwhile:?}");
        audit(&store);
        store.put(MODEL, &whole, plain(&whole)).expect("a put");
        assert_cold(&longest(&store, &whole, 12).expect("a hit"), &whole);
        audit(&store);
    }
}

#[test]
fn c115_two_sessions_on_one_entry_go_on_apart_and_an_entry_in_use_may_be_evicted() {
    let store = store(20 * ROW + LAST);
    let shared = text(0, 20);
    store.put(MODEL, &shared, plain(&shared)).expect("a put");
    let hits = [0; 2].map(|_| longest(&store, &shared, 20).expect("a hit"));
    store
        .put(MODEL, &text(1, 20), plain(&text(1, 20)))
        .expect("a put");
    assert!(!store.contains(MODEL, &shared));
    std::thread::scope(|scope| {
        for (index, hit) in (1..).zip(hits) {
            let shared = &shared;
            scope.spawn(move || {
                let model = ScriptedModel::new(1, 64);
                let mut stack = fed(&CacheOptions::default(), &[9]);
                stack.load(&hit.state.caches).expect("a load");
                let rest = text(index, 30);
                for token in &rest {
                    feed(&model, &mut stack, &[*token]);
                }
                let whole = [shared.as_slice(), &rest].concat();
                assert_eq!(
                    stack.snapshot().expect("a snapshot").difference(&cold(&whole)),
                    None
                );
                assert_cold(&hit, shared);
            });
        }
    });
}

#[test]
fn saving_while_others_put_leaves_a_folder_that_loads() {
    let store = store(PLENTY);
    let folder = tempfile::tempdir().expect("a folder");
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let (store, folder) = (&store, folder.path());
            scope.spawn(move || {
                for n in 1..25 {
                    let tokens = [text(0, n), text(thread, n)].concat();
                    store.put(MODEL, &tokens, plain(&tokens)).expect("a put");
                    store.save(folder).expect("a save");
                }
            });
        }
    });
    let loaded = self::store(PLENTY);
    assert_eq!(loaded.load(folder.path()).expect("a load"), store.stats().entries);
    assert_eq!(loaded.stats().bytes, store.stats().bytes);
}

#[test]
fn a_panic_in_the_callers_question_leaves_the_store_usable() {
    let store = store(PLENTY);
    store.put(MODEL, &text(0, 9), plain(&text(0, 9))).expect("a put");
    let panicked = std::panic::catch_unwind(AssertUnwindSafe(|| {
        let _ = store.longest(MODEL, &text(0, 9), 9, &mut |_| panic!("asked"));
    }));
    assert!(panicked.is_err());
    assert!(longest(&store, &text(0, 9), 9).is_some());
    // Even a lock that somebody died with is no reason to die.
    let poisoner = store.clone();
    let died = std::thread::spawn(move || {
        let _guard = poisoner.shared.inner.lock().expect("a lock");
        panic!("dies with the lock");
    });
    assert!(died.join().is_err());
    assert!(store.shared.inner.is_poisoned());
    assert!(longest(&store, &text(0, 9), 9).is_some());
    store.put(MODEL, &text(1, 9), plain(&text(1, 9))).expect("a put");
    assert_eq!(store.stats().entries, 2);
}
