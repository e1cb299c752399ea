//! Prompts that begin with what is held already: bit for bit the result of a cold start.

mod common;

use common::{assert_same, load, text_ids, Result, Rng};
use recant::core::{Cache, KvType};
use recant::generate::PromptStore;
use recant::{CacheOptions, Cancel, Event, Loaded, Sampling, Session, SessionBuilder, StoreOptions, Threads};

/// A way of drafting, by name.
type Way<'a> = (&'static str, Box<dyn Fn() -> SessionBuilder + 'a>);

/// Ways of drafting whose drafters keep a state of their own, and some that keep none.
fn ways<'a>(target: &'a Loaded, draft: &'a Loaded, threads: &'a Threads) -> Vec<Way<'a>> {
    let plain = move || target.session().threads(threads).ignore_eos(true);
    vec![
        ("plain", Box::new(plain)),
        (
            "draft model",
            Box::new(move || plain().draft(draft).draft_tokens(3)),
        ),
        ("head", Box::new(move || plain().mtp().draft_tokens(2))),
        ("n-gram", Box::new(move || plain().ngram())),
        (
            "all",
            Box::new(move || plain().draft(draft).ngram().draft_tokens(4)),
        ),
    ]
}

fn go(session: &mut Session, prompt: &[u32], tokens: usize) -> Result<()> {
    session.start_tokens(prompt, &mut |_, _| {})?;
    session.generate(tokens).try_for_each(|event| event.map(drop))?;
    Ok(())
}

/// Both wrote the same, hold the same, and drafted the same.
fn same(what: &str, warm: &Session, cold: &Session) -> Result<()> {
    assert_eq!(warm.tokens(), cold.tokens(), "{what}");
    assert_same(what, warm.caches(), cold.caches())?;
    assert_eq!(warm.caches().len(), warm.tokens().len() - 1, "{what}");
    assert_eq!(
        warm.stats().accepted_by_position,
        cold.stats().accepted_by_position,
        "{what}"
    );
    assert_eq!(warm.stats().depths, cold.stats().depths, "{what}");
    Ok(())
}

fn store(budget: usize, every: usize) -> PromptStore {
    PromptStore::new(StoreOptions { budget, every })
}

const PLENTY: usize = 1 << 30;

#[test]
fn random_conversations_with_a_store_under_pressure_equal_cold_ones() -> Result<()> {
    let (target, draft) = (load("demo-target")?, load("demo-draft")?);
    let threads = Threads::new(2)?;
    let text = text_ids(300)?;
    for (index, (way, new)) in ways(&target, &draft, &threads).into_iter().enumerate() {
        let mut rng = Rng(40 + index as u64);
        let mut reused = 0;
        for budget in [PLENTY, 3_000_000] {
            let store = store(budget, 48);
            let mut told: Vec<Vec<u32>> = vec![text.clone()];
            for turn in 0..14 {
                // A beginning of something said before, and something new after it.
                let base = &told[rng.below(told.len())];
                let mut prompt = base[..1 + rng.below(base.len().min(400))].to_vec();
                prompt.extend((0..rng.below(40)).map(|_| 3 + rng.below(900) as u32));
                let tokens = rng.below(30);
                let sampling = Sampling {
                    temperature: [0.0, 0.9][rng.below(2)],
                    seed: rng.next(),
                    ..Sampling::default()
                };
                let mut warm = new().sampling(sampling.clone()).prompt_store(&store).build()?;
                let mut cold = new().sampling(sampling).build()?;
                go(&mut warm, &prompt, tokens)?;
                go(&mut cold, &prompt, tokens)?;
                same(&format!("{way}, turn {turn}"), &warm, &cold)?;
                assert_eq!(cold.stats().cached_tokens, 0);
                reused += warm.stats().cached_tokens;
                assert!(store.stats().bytes <= budget, "{:?}", store.stats());
                told.push(warm.tokens().to_vec());
            }
        }
        assert!(reused > 250, "{way}: {reused} tokens were reused");
    }
    Ok(())
}

#[test]
fn c016_c022_turns_that_only_add_reuse_everything_with_and_without_a_store() -> Result<()> {
    let (target, draft) = (load("demo-target")?, load("demo-draft")?);
    let threads = Threads::new(2)?;
    for (way, new) in ways(&target, &draft, &threads) {
        let store = store(PLENTY, 16);
        let mut going_on = new().build()?;
        let mut text = text_ids(20)?;
        for turn in 0..4 {
            let mut stored = new().prompt_store(&store).build()?;
            let mut cold = new().build()?;
            go(&mut stored, &text, 9)?;
            go(&mut going_on, &text, 9)?;
            go(&mut cold, &text, 9)?;
            same(&format!("{way}, stored, turn {turn}"), &stored, &cold)?;
            same(&format!("{way}, going on, turn {turn}"), &going_on, &cold)?;
            if turn > 0 {
                // All that the caches of the last turn held.
                let held = text.len() - 5 - 1;
                assert_eq!(stored.stats().cached_tokens, held, "{way}, turn {turn}");
                assert_eq!(going_on.stats().cached_tokens, held, "{way}, turn {turn}");
            }
            text = cold.tokens().to_vec();
            text.extend([7 + turn, 8, 9, 10, 11]);
        }
    }
    Ok(())
}

#[test]
fn c017_c022_the_same_prompt_one_more_token_one_less_and_another_end() -> Result<()> {
    let target = load("demo-target")?;
    let threads = Threads::new(2)?;
    let new = || target.session().threads(&threads).ignore_eos(true);
    let ids = text_ids(64)?;
    let other_end: Vec<u32> = ids[..50].iter().copied().chain([4, 5, 6]).collect();
    let cases: [(&[u32], usize); 5] = [
        (&ids, 63),
        (&text_ids(65)?, 63),
        (&ids[..63], 48),
        (&other_end, 48),
        (&[1, 2, 3], 0),
    ];
    for (prompt, cached) in cases {
        let store = store(PLENTY, 16);
        go(&mut new().prompt_store(&store).build()?, &ids, 6)?;
        let mut warm = new().prompt_store(&store).build()?;
        let mut cold = new().build()?;
        go(&mut warm, prompt, 6)?;
        go(&mut cold, prompt, 6)?;
        same(&format!("{} tokens", prompt.len()), &warm, &cold)?;
        assert_eq!(warm.stats().cached_tokens, cached, "{} tokens", prompt.len());
    }
    Ok(())
}

#[test]
fn a_store_that_was_saved_serves_another_process() -> Result<()> {
    let (target, draft) = (load("demo-target")?, load("demo-draft")?);
    let threads = Threads::new(2)?;
    let folder = tempfile::tempdir()?;
    let ids = text_ids(200)?;
    for (way, new) in ways(&target, &draft, &threads) {
        let folder = folder.path().join(way.replace(' ', "-"));
        let first = store(PLENTY, 64);
        go(&mut new().prompt_store(&first).build()?, &ids, 5)?;
        first.save(&folder)?;
        let second = store(PLENTY, 64);
        second.load(&folder)?;
        assert_eq!(second.stats().entries, first.stats().entries);
        let mut warm = new().prompt_store(&second).build()?;
        let mut cold = new().build()?;
        go(&mut warm, &ids, 20)?;
        go(&mut cold, &ids, 20)?;
        same(way, &warm, &cold)?;
        assert_eq!(warm.stats().cached_tokens, 199);
    }
    Ok(())
}

#[test]
fn c018_sessions_of_other_settings_and_models_do_not_take_each_others_entries() -> Result<()> {
    let (target, draft) = (load("demo-target")?, load("demo-draft")?);
    let threads = Threads::new(2)?;
    let store = store(PLENTY, 32);
    let ids = text_ids(100)?;
    let f16 = CacheOptions {
        kv: KvType::F16,
        ..CacheOptions::default()
    };
    go(
        &mut target.session().threads(&threads).prompt_store(&store).build()?,
        &ids,
        4,
    )?;
    for (what, new) in [
        ("f16", target.session().cache_options(f16)),
        ("another model", draft.session()),
    ] {
        let mut other = new.threads(&threads).prompt_store(&store).build()?;
        go(&mut other, &ids, 4)?;
        assert_eq!(other.stats().cached_tokens, 0, "{what}");
    }
    // A drafter whose state the entry lacks: a head cannot do without, a draft model reads for itself.
    let mut head = target
        .session()
        .threads(&threads)
        .mtp()
        .prompt_store(&store)
        .build()?;
    go(&mut head, &ids, 4)?;
    assert_eq!(head.stats().cached_tokens, 0);
    let mut again = target
        .session()
        .threads(&threads)
        .mtp()
        .prompt_store(&store)
        .build()?;
    go(&mut again, &ids, 4)?;
    assert_eq!(again.stats().cached_tokens, 99, "the head left its own state");
    let mut model = target
        .session()
        .threads(&threads)
        .draft(&draft)
        .prompt_store(&store)
        .build()?;
    go(&mut model, &ids, 4)?;
    assert_eq!(model.stats().cached_tokens, 99);
    Ok(())
}

#[test]
fn c020_a_generation_that_is_dropped_or_cancelled_leaves_entries_that_are_true() -> Result<()> {
    let (target, draft) = (load("demo-target")?, load("demo-draft")?);
    let threads = Threads::new(2)?;
    let ids = text_ids(150)?;
    let store = store(PLENTY, 40);
    let cancel = Cancel::new();
    let new = || {
        target
            .session()
            .threads(&threads)
            .draft(&draft)
            .ignore_eos(true)
            .prompt_store(&store)
    };
    let mut session = new().cancel(&cancel).build()?;
    // Cancelled while it reads.
    let stop = cancel.clone();
    let error = session.start_tokens(&ids, &mut move |read, _| {
        if read > 60 {
            stop.cancel();
        }
    });
    assert!(error.err().is_some_and(|e| e.to_string().contains("cancelled")));
    assert!(session.tokens().len() > 60 && ids.starts_with(session.tokens()));
    // And taken up again.
    cancel.clear();
    let read = session.tokens().len() - 1;
    session.start_tokens(&ids, &mut |_, _| {})?;
    assert_eq!(session.stats().cached_tokens, read);
    // Dropped in the middle, then cancelled in the middle.
    drop(session.generate(20).nth(6));
    for event in session.generate(20) {
        if matches!(event?, Event::Round(_)) {
            cancel.cancel();
        }
    }
    let text = session.tokens().to_vec();
    for end in [100, 150, text.len()] {
        let mut prompt = text[..end].to_vec();
        prompt.extend([9, 8]);
        let mut warm = new().build()?;
        let mut cold = target
            .session()
            .threads(&threads)
            .draft(&draft)
            .ignore_eos(true)
            .build()?;
        go(&mut warm, &prompt, 12)?;
        go(&mut cold, &prompt, 12)?;
        same(&format!("{end} tokens"), &warm, &cold)?;
        assert!(warm.stats().cached_tokens >= 80);
    }
    Ok(())
}
