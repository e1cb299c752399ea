//! Many sessions in one call a round: each gives what it gives alone, whoever joins and leaves meanwhile.

mod common;

use std::collections::BTreeMap;

use common::{assert_same, folder_or_skip, load, text_ids, Result, Rng};
use recant::generate::PromptStore;
use recant::{
    Batcher, BatcherOptions, Cancel, Event, Finish, Loaded, LogprobsOf, LogprobsOptions, Rule, Sampling,
    Session, StoreOptions, Threads, Ticket,
};

/// A session of some kind, the same for the same numbers.
fn session(kind: u64, target: &Loaded, draft: &Loaded, threads: &Threads) -> Result<Session> {
    let mut rng = Rng(kind);
    let builder = target.session().threads(threads).ignore_eos(rng.below(2) == 0);
    let builder = match rng.below(5) {
        0 => builder,
        1 => builder.draft(draft).draft_tokens(1 + rng.below(6)),
        2 => builder.mtp().draft_tokens(1 + rng.below(4)),
        3 => builder.ngram().draft_tokens(1 + rng.below(8)),
        _ => builder.draft(draft).ngram().draft_tokens(3),
    };
    let sampling = Sampling {
        temperature: [0.0, 0.0, 0.7, 1.2][rng.below(4)],
        top_k: [0, 20][rng.below(2)],
        repetition_penalty: [1.0, 1.1][rng.below(2)],
        seed: rng.next(),
        rule: [Rule::Coupled, Rule::Token, Rule::Block][rng.below(3)],
        ..Sampling::default()
    };
    let logprobs = LogprobsOptions {
        top: 2,
        of: LogprobsOf::Raw,
    };
    let builder = builder.sampling(sampling).stop(["zq", "}\n\n}"]);
    Ok(match rng.below(3) {
        0 => builder.logprobs(logprobs).build()?,
        _ => builder.build()?,
    })
}

fn prompt(kind: u64) -> Result<Vec<u32>> {
    let mut rng = Rng(kind ^ 0x55);
    let text = text_ids(300)?;
    let start = rng.below(60);
    let len = [1, 2, 5, 40, 150, 230][rng.below(6)];
    Ok(text[start..(start + len).min(text.len())].to_vec())
}

/// What a session said, rounds left out: their times differ.
#[derive(Debug, Default, PartialEq)]
struct Said {
    tokens: Vec<(u32, String, bool)>,
    logprobs: Vec<Option<recant::Logprobs>>,
    end: Option<(Finish, String)>,
}

impl Said {
    fn hear(&mut self, event: Event) {
        match event {
            Event::Token {
                id,
                text,
                drafted,
                logprobs,
            } => {
                self.tokens.push((id, text, drafted));
                self.logprobs.push(logprobs);
            }
            Event::Round(_) => {}
            Event::End { finish, text } => self.end = Some((finish, text)),
        }
    }
}

fn alone(session: &mut Session, prompt: &[u32], tokens: usize) -> Result<Said> {
    session.start_tokens(prompt, &mut |_, _| {})?;
    let mut said = Said::default();
    for event in session.generate(tokens) {
        said.hear(event?);
    }
    Ok(said)
}

#[test]
fn sixteen_sessions_that_join_at_random_rounds_give_what_they_give_alone() -> Result<()> {
    let (target, draft) = (load("demo-target")?, load("demo-draft")?);
    for (seed, threads, running, prefill_tokens) in [(1, 2, 16, 32), (2, 1, 5, 7), (3, 3, 3, 300)] {
        let threads = Threads::new(threads)?;
        let options = BatcherOptions {
            running,
            prefill_tokens,
            ..BatcherOptions::default()
        };
        let mut batcher = Batcher::new(&threads, options);
        let mut rng = Rng(seed);
        let mut heard: BTreeMap<Ticket, (u64, usize, Said)> = BTreeMap::new();
        let mut left = 16;
        while left > 0 || !batcher.is_idle() {
            while left > 0 && rng.below(3) > 0 {
                left -= 1;
                let (kind, tokens) = (rng.next(), rng.below(70));
                let session = session(kind, &target, &draft, &threads)?;
                let ticket = batcher
                    .submit(session, &prompt(kind)?, tokens)
                    .map_err(|refused| refused.error)?;
                heard.insert(ticket, (kind, tokens, Said::default()));
            }
            for (ticket, event) in batcher.step() {
                heard.get_mut(&ticket).ok_or("an unknown session")?.2.hear(event?);
            }
            assert!(batcher.running() <= running);
        }
        let mut drafted = 0;
        for (ticket, (kind, tokens, said)) in heard {
            let batched = batcher.leave(ticket).ok_or("a session that is over is kept")?;
            assert!(batcher.leave(ticket).is_none());
            let mut own = session(kind, &target, &draft, &threads)?;
            let expected = alone(&mut own, &prompt(kind)?, tokens)?;
            assert_eq!(said, expected, "session {kind} of {tokens} tokens");
            assert_eq!(batched.tokens(), own.tokens());
            assert_same("the target's caches", batched.caches(), own.caches())?;
            assert_eq!(batched.stats().accepted, own.stats().accepted);
            assert_eq!(batched.stats().depths, own.stats().depths);
            drafted += own.stats().accepted;
        }
        assert!(drafted > 100, "only {drafted} drafts were accepted");
    }
    Ok(())
}

#[test]
fn c111_a_session_that_leaves_in_the_middle_goes_on_alone_and_the_others_do_not_notice() -> Result<()> {
    let (target, draft) = (load("demo-target")?, load("demo-draft")?);
    let threads = Threads::new(2)?;
    let mut batcher = Batcher::new(&threads, BatcherOptions::default());
    let ids = text_ids(120)?;
    let mut tickets = Vec::new();
    for (len, tokens) in [(5, 60), (13, 60), (120, 60)] {
        let session = target
            .session()
            .threads(&threads)
            .draft(&draft)
            .ignore_eos(true)
            .build()?;
        tickets.push(
            batcher
                .submit(session, &ids[..len], tokens)
                .map_err(|r| r.error)?,
        );
    }
    for _ in 0..6 {
        batcher.step();
    }
    let mut gone = batcher.leave(tickets[0]).ok_or("a running session leaves")?;
    let made = gone.tokens().len();
    assert!(made > 5 && made < 65, "{made} tokens");
    while !batcher.is_idle() {
        for (_, event) in batcher.step() {
            event?;
        }
    }
    gone.generate(65 - made).try_for_each(|event| event.map(drop))?;
    let mut sessions = vec![gone];
    for ticket in &tickets[1..] {
        sessions.push(batcher.leave(*ticket).ok_or("kept")?);
    }
    for (session, len) in sessions.iter().zip([5, 13, 120]) {
        let mut own = target.session().threads(&threads).ignore_eos(true).build()?;
        alone(&mut own, &ids[..len], 60)?;
        assert_eq!(session.tokens(), own.tokens());
    }
    Ok(())
}

#[test]
fn others_keep_streaming_while_a_long_prompt_is_read() -> Result<()> {
    let target = load("demo-target")?;
    let threads = Threads::new(2)?;
    let mut batcher = Batcher::new(&threads, BatcherOptions::default());
    let ids = text_ids(300)?;
    let new = || target.session().threads(&threads).ignore_eos(true).build();
    let first = batcher.submit(new()?, &ids[..4], 200).map_err(|r| r.error)?;
    batcher.step();
    let readers = [(); 2].map(|()| new().map(|session| batcher.submit(session, &ids, 3)));
    let mut rounds = BTreeMap::<Ticket, usize>::new();
    for step in 0..12 {
        let said = batcher.step();
        assert!(
            said.iter().any(|(ticket, _)| *ticket == first),
            "the first session said nothing in step {step}"
        );
        for (ticket, _) in said {
            *rounds.entry(ticket).or_default() += 1;
        }
    }
    // Two prompts of 300 tokens, 64 a round in turn: ten rounds.
    assert_eq!(rounds.len(), 3, "{rounds:?}");
    for reader in readers {
        assert!(reader?.is_ok());
    }
    Ok(())
}

#[test]
fn a_full_queue_gives_the_session_back_and_one_bad_prompt_harms_nobody() -> Result<()> {
    let target = load("demo-target")?;
    let threads = Threads::new(1)?;
    let options = BatcherOptions {
        running: 1,
        waiting: 2,
        ..BatcherOptions::default()
    };
    let mut batcher = Batcher::new(&threads, options);
    let new = || target.session().threads(&threads).build();
    let good = batcher.submit(new()?, &[5, 6, 7], 4).map_err(|r| r.error)?;
    let bad = batcher.submit(new()?, &[u32::MAX], 4).map_err(|r| r.error)?;
    let refused = batcher.submit(new()?, &[5], 4).err().ok_or("the queue is full")?;
    assert!(
        refused.error.to_string().contains("2 sessions wait"),
        "{}",
        refused.error
    );
    assert!(refused.session.tokens().is_empty());
    let mut ends = BTreeMap::new();
    while !batcher.is_idle() {
        for (ticket, event) in batcher.step() {
            match event {
                Ok(Event::End { .. }) => drop(ends.insert(ticket, String::from("end"))),
                Ok(_) => {}
                Err(error) => drop(ends.insert(ticket, error.to_string())),
            }
        }
    }
    assert_eq!(ends[&good], "end");
    assert!(ends[&bad].contains(&u32::MAX.to_string()), "{}", ends[&bad]);
    Ok(())
}

#[test]
fn c113_a_cancelled_session_ends_within_a_round_and_the_next_begins() -> Result<()> {
    let target = load("demo-target")?;
    let threads = Threads::new(2)?;
    let options = BatcherOptions {
        running: 1,
        ..BatcherOptions::default()
    };
    let mut batcher = Batcher::new(&threads, options);
    let cancel = Cancel::new();
    let session = target
        .session()
        .threads(&threads)
        .ignore_eos(true)
        .cancel(&cancel)
        .build()?;
    let first = batcher.submit(session, &[5, 6, 7], 2000).map_err(|r| r.error)?;
    let second = target.session().threads(&threads).ignore_eos(true).build()?;
    let second = batcher.submit(second, &[5, 6, 7], 3).map_err(|r| r.error)?;
    for _ in 0..4 {
        batcher.step();
    }
    cancel.cancel();
    let ended = batcher.step();
    assert!(
        matches!(&ended[..], [(ticket, Ok(Event::End { finish: Finish::Cancelled, .. }))] if *ticket == first),
        "{ended:?}"
    );
    batcher.step();
    let heard = batcher.step();
    assert!(heard.iter().all(|(ticket, _)| *ticket == second) && !heard.is_empty());
    // What the cancelled one made is whole.
    let mut gone = batcher.leave(first).ok_or("kept")?;
    cancel.clear();
    let made = gone.tokens().len();
    gone.generate(10).try_for_each(|event| event.map(drop))?;
    let mut own = target.session().threads(&threads).ignore_eos(true).build()?;
    alone(&mut own, &[5, 6, 7], made - 3 + 10)?;
    assert_eq!(gone.tokens(), own.tokens());
    Ok(())
}

#[test]
fn c115_two_sessions_on_one_stored_prompt_at_once_do_not_meet() -> Result<()> {
    let Some(path) = folder_or_skip("c115", "target") else {
        return Ok(());
    };
    let target = recant::load(path)?;
    let threads = Threads::new(2)?;
    let store = PromptStore::new(StoreOptions {
        every: 32,
        ..StoreOptions::default()
    });
    let ids = text_ids(150)?;
    let new = |stored: bool| {
        let builder = target.session().threads(&threads).mtp().ignore_eos(true);
        match stored {
            true => builder.prompt_store(&store).build(),
            false => builder.build(),
        }
    };
    alone(&mut new(true)?, &ids, 5)?;
    let mut batcher = Batcher::new(&threads, BatcherOptions::default());
    let mut prompts = Vec::new();
    for tail in 0..6 {
        // The same prompt twice, and others that leave it at some place.
        let mut prompt = ids[..[150, 150, 149, 100, 64, 33][tail]].to_vec();
        prompt.extend((0..tail as u32).map(|i| 11 + i));
        let ticket = batcher.submit(new(true)?, &prompt, 20).map_err(|r| r.error)?;
        prompts.push((ticket, prompt));
    }
    while !batcher.is_idle() {
        for (_, event) in batcher.step() {
            event?;
        }
    }
    for (ticket, prompt) in prompts {
        let warm = batcher.leave(ticket).ok_or("kept")?;
        let mut cold = new(false)?;
        alone(&mut cold, &prompt, 20)?;
        assert_eq!(warm.tokens(), cold.tokens());
        assert_same("caches", warm.caches(), cold.caches())?;
        assert!(warm.stats().cached_tokens >= 32, "{}", warm.stats().cached_tokens);
        assert_eq!(cold.stats().cached_tokens, 0);
    }
    Ok(())
}
