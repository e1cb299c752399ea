//! What a user of the facade sees: events, text, figures, notes.

mod common;

use common::{folder, load, Result};
use recant::{DraftVocabulary, Event, Finish, Session, SessionBuilder, Threads};

fn sessions() -> Result<(Session, Session)> {
    let (target, draft) = (load("demo-target")?, load("demo-draft")?);
    let threads = Threads::new(2)?;
    Ok((
        target.session().threads(&threads).build()?,
        target
            .session()
            .threads(&threads)
            .draft(&draft)
            .draft_tokens(3)
            .build()?,
    ))
}

const PROMPTS: [&str; 4] = [
    "def read_lines(path):\n    ",
    "<|im_start|>user\nWhat does this function do?<|im_end|>\n<|im_start|>assistant\n",
    "use std::collections::HashMap;\n\nfn main() {",
    "é 漢字 🦀 e\u{301}",
];

#[test]
fn events_tell_the_same_story_as_the_figures() -> Result<()> {
    let (_, mut session) = sessions()?;
    session.start(PROMPTS[0])?;
    let (mut text, mut ids, mut drafted, mut rounds, mut end) =
        (String::new(), Vec::new(), 0, Vec::new(), None);
    for event in session.generate(60) {
        let event = event?;
        text.push_str(event.text());
        match event {
            Event::Token {
                id, drafted: guessed, ..
            } => {
                ids.push(id);
                drafted += usize::from(guessed);
            }
            Event::Round(round) => rounds.push(round),
            Event::End { finish, .. } => end = Some(finish),
        }
    }
    let stats = session.stats();
    assert!(end.is_some());
    assert_eq!(stats.generated_tokens, ids.len());
    assert_eq!(stats.rounds, rounds.len());
    assert_eq!(stats.accepted, drafted);
    assert_eq!(stats.drafted, rounds.iter().map(|r| r.drafted).sum::<usize>());
    assert_eq!(stats.accepted_by_position.iter().sum::<usize>(), stats.accepted);
    assert_eq!(stats.drafted_by_position.iter().sum::<usize>(), stats.drafted);
    assert!(stats.accepted > 0 && stats.accepted < stats.drafted);
    assert_eq!(
        rounds
            .iter()
            .flat_map(|r| &r.tokens)
            .map(|t| t.id)
            .collect::<Vec<_>>(),
        ids
    );
    assert_eq!(&session.tokens()[stats.prompt_tokens..], ids);
    assert_eq!(text, load("demo-target")?.text().decode(&ids)?);
    Ok(())
}

#[test]
fn plain_and_speculative_sessions_give_the_same_text() -> Result<()> {
    let (mut plain, mut speculative) = sessions()?;
    for prompt in PROMPTS {
        let mut texts = Vec::new();
        for session in [&mut plain, &mut speculative] {
            session.start(prompt)?;
            let mut text = String::new();
            let mut finish = None;
            for event in session.generate(80) {
                let event = event?;
                text.push_str(event.text());
                if let Event::End { finish: why, .. } = event {
                    finish = Some(why);
                }
            }
            texts.push((text, finish, session.tokens().to_vec()));
        }
        assert_eq!(texts[0], texts[1]);
    }
    Ok(())
}

/// A prompt with much to look up.
const REPEATS: &str =
    "red = paint(\"red\", 1)\ngreen = paint(\"green\", 2)\nblue = paint(\"blue\", 3)\nwhite = paint(";

#[test]
fn every_way_of_drafting_gives_the_text_of_plain_decoding() -> Result<()> {
    let (target, draft) = (load("demo-target")?, load("demo-draft")?);
    let threads = Threads::new(2)?;
    let run = |session: SessionBuilder| -> Result<(Vec<u32>, recant::Stats)> {
        let mut session = session.threads(&threads).ignore_eos(true).build()?;
        session.start(REPEATS)?;
        session.generate(200).try_for_each(|event| event.map(drop))?;
        Ok((session.tokens().to_vec(), session.stats().clone()))
    };
    let (plain, stats) = run(target.session())?;
    assert_eq!(stats.depths, [200], "nothing to ask");
    let few = || DraftVocabulary::most_frequent(plain.iter().copied(), 40);
    type Way<'a> = (&'a str, SessionBuilder, std::ops::RangeInclusive<usize>);
    let ways: [Way<'_>; 6] = [
        ("n-gram", target.session().ngram(), 4..=4),
        ("n-gram, deeper", target.session().ngram().draft_tokens(9), 9..=9),
        (
            "both",
            target.session().draft(&draft).ngram().draft_tokens(3),
            3..=3,
        ),
        (
            "few ids",
            target.session().draft(&draft).draft_vocabulary(few()),
            4..=4,
        ),
        ("adaptive", target.session().draft(&draft).auto_depth(6), 0..=6),
        ("adaptive n-gram", target.session().ngram().auto_depth(8), 0..=8),
    ];
    for (way, session, depths) in ways {
        let (text, stats) = run(session)?;
        assert_eq!(text, plain, "{way}");
        assert_eq!(stats.depths.iter().sum::<usize>(), stats.rounds, "{way}");
        assert!(stats.accepted > 0, "{way}");
        // Rounds near the end ask for less.
        let early = stats.depths.len() - 1;
        assert!(depths.contains(&early), "{way}: {:?}", stats.depths);
        if depths.start() == depths.end() {
            assert!(
                stats.depths[early] > stats.rounds / 2,
                "{way}: {:?}",
                stats.depths
            );
        } else {
            assert!(stats.depths[0] > 0, "{way}: {:?}", stats.depths);
        }
    }
    Ok(())
}

#[test]
fn what_needs_a_drafter_is_refused_without_one() -> Result<()> {
    let target = load("demo-target")?;
    let refused = |session: SessionBuilder| session.build().err().map_or_else(String::new, |e| e.to_string());
    let few = || DraftVocabulary::first(100);
    let no_depth = refused(target.session().auto_depth(4));
    assert!(
        no_depth.contains("auto_depth(4) needs something to draft with"),
        "{no_depth}"
    );
    for session in [target.session(), target.session().ngram()] {
        let no_model = refused(session.draft_vocabulary(few()));
        assert!(
            no_model.contains("a draft vocabulary needs a draft model or a multi-token-prediction head"),
            "{no_model}"
        );
    }
    let strange = DraftVocabulary::from_ids([1 << 20]);
    let end_tokens_are_left = target
        .session()
        .draft(&load("demo-draft")?)
        .draft_vocabulary(strange);
    assert_eq!(refused(end_tokens_are_left), "");
    Ok(())
}

#[test]
fn a_run_that_is_dropped_leaves_a_session_that_goes_on_as_though_it_were_not() -> Result<()> {
    let (mut plain, mut session) = sessions()?;
    plain.start(PROMPTS[2])?;
    plain.generate(60).try_for_each(|event| event.map(drop))?;
    for seen in 0..12 {
        session.start(PROMPTS[2])?;
        for event in session.generate(60).take(seen) {
            event?;
        }
        assert_eq!(
            recant::core::Cache::len(session.caches()),
            session.tokens().len() - 1
        );
        let left = 60 - session.stats().generated_tokens;
        session.generate(left).try_for_each(|event| event.map(drop))?;
        assert_eq!(session.tokens(), plain.tokens());
    }
    Ok(())
}

#[test]
fn c074_end_tokens_are_those_of_all_files_together() -> Result<()> {
    let target = load("demo-target")?;
    assert_eq!(target.eos(), [8187, 8189]);
    // Any id may be declared an end token by one file alone.
    let dir = tempfile::TempDir::new()?;
    let source = folder("demo-target").ok_or("no demo target")?;
    for file in ["model.safetensors", "tokenizer.json"] {
        std::fs::copy(source.join(file), dir.path().join(file))?;
    }
    let config = std::fs::read_to_string(source.join("config.json"))?;
    let eos_of = |config: &str, generation: Option<&str>, tokenizer: Option<&str>| -> Result<Vec<u32>> {
        std::fs::write(dir.path().join("config.json"), config)?;
        for (name, text) in [
            ("generation_config.json", generation),
            ("tokenizer_config.json", tokenizer),
        ] {
            match text {
                Some(text) => std::fs::write(dir.path().join(name), text)?,
                None => drop(std::fs::remove_file(dir.path().join(name))),
            }
        }
        Ok(recant::load(dir.path())?.eos().to_vec())
    };
    let none = config.replace("\"eos_token_id\": 8187", "\"eos_token_id\": null");
    assert_ne!(none, config);
    assert_eq!(eos_of(&none, None, None)?, [0u32; 0]);
    assert_eq!(eos_of(&config, None, None)?, [8187]);
    assert_eq!(
        eos_of(&none, Some(r#"{"eos_token_id": [10, 11]}"#), None)?,
        [10, 11]
    );
    assert_eq!(eos_of(&none, Some(r#"{"eos_token_id": 12}"#), None)?, [12]);
    assert_eq!(
        eos_of(&none, None, Some(r#"{"eos_token": "<|im_end|>"}"#))?,
        [8189]
    );
    assert_eq!(
        eos_of(&none, None, Some(r#"{"eos_token": {"content": "<|im_end|>"}}"#))?,
        [8189]
    );
    assert_eq!(
        eos_of(
            &config,
            Some(r#"{"eos_token_id": [10]}"#),
            Some(r#"{"eos_token": "<|im_end|>"}"#)
        )?,
        [10, 8187, 8189]
    );
    Ok(())
}

#[test]
fn an_end_token_ends_a_run_unless_it_is_to_be_ignored() -> Result<()> {
    let target = load("demo-target")?;
    let prompt = "<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n";
    let finish = |session: &mut Session| -> Result<Option<Finish>> {
        session.start(prompt)?;
        let mut finish = None;
        for event in session.generate(400) {
            if let Event::End { finish: why, .. } = event? {
                finish = Some(why);
            }
        }
        Ok(finish)
    };
    let mut session = target.session().build()?;
    assert_eq!(finish(&mut session)?, Some(Finish::Eos));
    assert!(session
        .tokens()
        .last()
        .is_some_and(|id| target.eos().contains(id)));
    assert!(session.stats().generated_tokens < 400);
    let mut session = target.session().ignore_eos(true).build()?;
    assert_eq!(finish(&mut session)?, Some(Finish::Length));
    assert_eq!(session.stats().generated_tokens, 400);
    Ok(())
}

#[test]
fn c028_a_draft_model_of_other_texts_is_refused_naming_the_first_id() -> Result<()> {
    let target = load("demo-target")?;
    let dir = tempfile::TempDir::new()?;
    let source = folder("demo-draft").ok_or("no demo draft")?;
    for entry in std::fs::read_dir(&source)? {
        let entry = entry?;
        std::fs::copy(entry.path(), dir.path().join(entry.file_name()))?;
    }
    let mut tokenizer: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(source.join("tokenizer.json"))?)?;
    let vocab = tokenizer["model"]["vocab"]
        .as_object_mut()
        .ok_or("no vocabulary")?;
    let of = |id: u64| {
        vocab
            .iter()
            .find(|(_, v)| v.as_u64() == Some(id))
            .map(|(k, _)| k.clone())
    };
    let (a, b) = (of(250).ok_or("no 250")?, of(251).ok_or("no 251")?);
    vocab.insert(a, serde_json::json!(251));
    vocab.insert(b, serde_json::json!(250));
    std::fs::write(dir.path().join("tokenizer.json"), tokenizer.to_string())?;
    let draft = recant::load(dir.path())?;
    let error = target
        .session()
        .draft(&draft)
        .build()
        .err()
        .ok_or("took another vocabulary")?
        .to_string();
    assert!(error.contains("id 250 is"), "{error}");
    // c030: other special ids in the configuration are no difference.
    let config = std::fs::read_to_string(source.join("config.json"))?;
    std::fs::copy(source.join("tokenizer.json"), dir.path().join("tokenizer.json"))?;
    std::fs::write(
        dir.path().join("config.json"),
        config.replace("\"pad_token_id\": null", "\"pad_token_id\": 7"),
    )?;
    target.session().draft(&recant::load(dir.path())?).build()?;
    Ok(())
}

#[test]
fn what_was_left_alone_is_said() -> Result<()> {
    let target = load("demo-target")?;
    assert!(target
        .notes()
        .iter()
        .any(|note| note.contains("15 tensors of the multi-token-prediction head")));
    assert!(load("demo-draft")?.notes().is_empty());
    Ok(())
}

#[test]
fn c116_memory_is_flat_over_many_sessions_of_one_decoder() -> Result<()> {
    let (_, mut session) = sessions()?;
    let mut footprints = Vec::new();
    for round in 0..40 {
        session.start(PROMPTS[round % PROMPTS.len()])?;
        session.generate(30).try_for_each(|event| event.map(drop))?;
        footprints.push(session.footprint().total());
    }
    assert_eq!(
        footprints[5..].iter().max(),
        footprints[..5].iter().max(),
        "{footprints:?}"
    );
    Ok(())
}

/// The text of 60 tokens after a prompt, and the share of drafts accepted.
fn text_of(mut session: Session, prompt: &str) -> Result<(Vec<u32>, Session)> {
    session.start(prompt)?;
    session.generate(60).try_for_each(|event| event.map(drop))?;
    Ok((session.tokens().to_vec(), session))
}

#[test]
fn c045_heads_of_every_family_draft_through_a_session_and_change_nothing() -> Result<()> {
    for name in ["demo-target", "target", "moe", "next"] {
        if common::folder_or_skip("sessions that draft with a head", name).is_none() {
            continue;
        }
        let target = load(name)?;
        assert!(target.has_mtp());
        let (plain, _) = text_of(target.session().build()?, PROMPTS[2])?;
        for depth in [1, 3] {
            let session = target.session().mtp().draft_tokens(depth).build()?;
            let check = session.head_check().ok_or("the head was not checked")?;
            assert!(check.agreement.share() > 0.4, "{name}: {}", check.agreement);
            assert!(session.warnings().is_empty(), "{name}: {:?}", session.warnings());
            let (text, session) = text_of(session, PROMPTS[2])?;
            assert_eq!(text, plain, "{name}");
            assert!(session.stats().accepted * 3 > session.stats().drafted, "{name}");
        }
        let vocabulary = recant::generate::DraftVocabulary::first(2048);
        let session = target
            .session()
            .mtp()
            .draft_vocabulary(vocabulary)
            .draft_tokens(3)
            .build()?;
        let (text, session) = text_of(session, PROMPTS[2])?;
        assert_eq!(text, plain, "{name}");
        assert!(session.stats().accepted > 0, "{name}");
    }
    Ok(())
}

#[test]
fn auto_drafts_with_what_there_is() -> Result<()> {
    let (target, draft) = (load("demo-target")?, load("demo-draft")?);
    let (plain, _) = text_of(target.session().build()?, PROMPTS[0])?;
    let (text, session) = text_of(target.session().auto().build()?, PROMPTS[0])?;
    assert_eq!(text, plain);
    assert!(session.head_check().is_some() && session.stats().accepted > 0);
    let (text, session) = text_of(target.session().draft(&draft).auto().build()?, PROMPTS[0])?;
    assert_eq!(text, plain);
    assert!(session.head_check().is_none() && session.stats().accepted > 0);
    // No head, no draft model: the text itself.
    let (plain, _) = text_of(draft.session().build()?, PROMPTS[0])?;
    let (text, _) = text_of(draft.session().auto().build()?, PROMPTS[0])?;
    assert_eq!(text, plain);
    let error = draft
        .session()
        .mtp()
        .build()
        .err()
        .ok_or("drafts with no head")?
        .to_string();
    assert!(error.contains("no multi-token-prediction head"), "{error}");
    Ok(())
}

#[test]
fn a_head_that_auto_cannot_use_is_said_and_left_out() -> Result<()> {
    let source = folder("demo-target").ok_or("no demo target")?;
    let dir = tempfile::TempDir::new()?;
    for file in [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    ] {
        std::fs::copy(source.join(file), dir.path().join(file))?;
    }
    let mut tensors =
        recant::candle::safetensors::load(source.join("model.safetensors"), &recant::candle::Device::Cpu)?;
    tensors.remove("mtp.fc.weight");
    safetensors::serialize_to_file(tensors.iter(), None, &dir.path().join("model.safetensors"))?;
    let target = recant::load(dir.path())?;
    let error = target
        .session()
        .mtp()
        .build()
        .err()
        .ok_or("drafts with part of a head")?
        .to_string();
    assert!(error.contains("fc.weight"), "{error}");
    let session = target.session().auto().build()?;
    assert!(
        session.warnings().iter().any(|w| w.contains("fc.weight")),
        "{:?}",
        session.warnings()
    );
    let (plain, _) = text_of(target.session().build()?, PROMPTS[0])?;
    assert_eq!(text_of(session, PROMPTS[0])?.0, plain);
    Ok(())
}

#[test]
fn windows_reach_the_caches_of_a_session_and_change_no_equality() -> Result<()> {
    let (target, draft) = (load("demo-target")?, load("demo-draft")?);
    let options = recant::CacheOptions {
        window: Some(recant::core::Window { window: 16, sink: 2 }),
        ..recant::CacheOptions::default()
    };
    let (plain, session) = text_of(target.session().cache_options(options).build()?, PROMPTS[2])?;
    let kinds: Vec<&str> = session.caches().layers().map(|cache| cache.kind()).collect();
    assert_eq!(
        kinds.iter().filter(|kind| **kind == "rotating-kv").count(),
        2,
        "{kinds:?}"
    );
    let drafting = target.session().cache_options(options).draft(&draft).build()?;
    let (text, session) = text_of(drafting, PROMPTS[2])?;
    assert_eq!(text, plain);
    assert!(session.stats().accepted > 0);
    Ok(())
}
