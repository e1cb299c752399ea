//! Sampled text through sessions: the same for a seed whatever drafts, and in step with what was asked.

mod common;

use std::sync::{Arc, Mutex};

use common::{assert_same, load, text_ids, Result, Rng};
use recant::{
    DraftVocabulary, Event, Finish, Loaded, LogitsProcessor, Logprobs, LogprobsOf, LogprobsOptions, Rule,
    Sampling, Session, SessionBuilder, Threads,
};

/// Every way of drafting, at several depths.
fn ways(target: &Loaded, draft: &Loaded, threads: &Threads) -> Vec<(&'static str, SessionBuilder)> {
    let plain = || target.session().threads(threads);
    let few = || DraftVocabulary::first(1500);
    vec![
        ("draft model, 1", plain().draft(draft).draft_tokens(1)),
        ("draft model, 5", plain().draft(draft).draft_tokens(5)),
        (
            "few ids",
            plain().draft(draft).draft_vocabulary(few()).draft_tokens(3),
        ),
        ("head", plain().mtp().draft_tokens(3)),
        ("n-gram", plain().ngram().draft_tokens(8)),
        ("both", plain().draft(draft).ngram().draft_tokens(4)),
        ("auto", plain().auto()),
    ]
}

fn settings() -> Vec<Sampling> {
    let plain = Sampling::default();
    vec![
        Sampling {
            temperature: 1.0,
            ..plain.clone()
        },
        Sampling {
            temperature: 0.7,
            top_k: 20,
            top_p: 0.8,
            ..plain.clone()
        },
        Sampling {
            temperature: 1.3,
            min_p: 0.05,
            presence_penalty: 0.5,
            ..plain.clone()
        },
        Sampling {
            repetition_penalty: 1.2,
            frequency_penalty: 0.3,
            penalty_window: Some(24),
            ..plain.clone()
        },
        Sampling {
            logit_bias: vec![(199, f32::NEG_INFINITY), (12, 2.0)],
            ..plain
        },
    ]
}

/// What a session said but for the rounds.
#[derive(Debug, PartialEq)]
struct Told {
    ids: Vec<u32>,
    text: String,
    logprobs: Vec<Option<Logprobs>>,
    finish: Option<Finish>,
}

fn tell(session: &mut Session, prompt: &[u32], tokens: usize) -> Result<Told> {
    session.start_tokens(prompt, &mut |_, _| {})?;
    let mut told = Told {
        ids: Vec::new(),
        text: String::new(),
        logprobs: Vec::new(),
        finish: None,
    };
    for event in session.generate(tokens) {
        let event = event?;
        told.text.push_str(event.text());
        match event {
            Event::Token { id, logprobs, .. } => {
                told.ids.push(id);
                told.logprobs.push(logprobs);
            }
            Event::Round(_) => {}
            Event::End { finish, .. } => told.finish = Some(finish),
        }
    }
    Ok(told)
}

#[test]
fn c082_a_seed_gives_the_text_and_log_probabilities_of_plain_decoding_whatever_drafts() -> Result<()> {
    let (target, draft) = (load("demo-target")?, load("demo-draft")?);
    let threads = Threads::new(2)?;
    let prompt = text_ids(40)?;
    let mut accepted = 0;
    for (index, sampling) in settings().into_iter().enumerate() {
        let mut texts = Vec::new();
        for seed in [1, 2, 3] {
            let sampling = Sampling {
                seed,
                ..sampling.clone()
            };
            let logprobs = LogprobsOptions {
                top: 3,
                of: [LogprobsOf::Raw, LogprobsOf::Processed][index % 2],
            };
            let prepare = |builder: SessionBuilder| {
                builder
                    .sampling(sampling.clone())
                    .logprobs(logprobs)
                    .stop(["\n\n\n"])
            };
            let mut plain = prepare(target.session().threads(&threads)).build()?;
            let expected = tell(&mut plain, &prompt, 60)?;
            for (way, builder) in ways(&target, &draft, &threads) {
                let mut session = prepare(builder).build()?;
                let told = tell(&mut session, &prompt, 60)?;
                assert_eq!(told, expected, "{way}, {sampling:?}");
                assert_same(way, session.caches(), plain.caches())?;
                accepted += session.stats().accepted;
            }
            texts.push(expected.ids);
        }
        if sampling.temperature > 0.0 {
            assert!(
                texts.iter().any(|text| *text != texts[0]),
                "seeds make no difference"
            );
        }
    }
    assert!(accepted > 1000, "{accepted} drafts were accepted");
    Ok(())
}

#[test]
fn rules_that_reject_are_the_same_each_time_and_accept_drafts() -> Result<()> {
    let (target, draft) = (load("demo-target")?, load("demo-draft")?);
    let threads = Threads::new(2)?;
    let prompt = text_ids(40)?;
    for rule in [Rule::Token, Rule::Block] {
        for (way, _) in ways(&target, &draft, &threads) {
            if way == "auto" {
                // Its depth follows the clock, and with these rules the text follows the depth.
                continue;
            }
            let run = || -> Result<(Told, usize)> {
                let (_, builder) = ways(&target, &draft, &threads)
                    .into_iter()
                    .find(|(other, _)| *other == way)
                    .ok_or("a way")?;
                let sampling = Sampling {
                    temperature: 0.8,
                    seed: 9,
                    rule,
                    ..Sampling::default()
                };
                let mut session = builder.sampling(sampling).ignore_eos(true).build()?;
                let told = tell(&mut session, &prompt, 120)?;
                Ok((told, session.stats().accepted))
            };
            let (first, accepted) = run()?;
            assert_eq!(first, run()?.0, "{way}, {rule:?}");
            assert_eq!(first.ids.len(), 120);
            assert!(accepted > 0, "{way}, {rule:?}");
        }
    }
    Ok(())
}

/// Bans the last token, and notes what it was shown.
#[derive(Clone, Default)]
struct NoRepeat {
    kept: Arc<Mutex<Vec<u32>>>,
    wrong: Arc<Mutex<usize>>,
}

impl LogitsProcessor for NoRepeat {
    fn begin(&mut self, text: &[u32]) {
        if let Ok(mut kept) = self.kept.lock() {
            *kept = text.to_vec();
        }
    }

    fn accept(&mut self, token: u32) {
        if let Ok(mut kept) = self.kept.lock() {
            kept.push(token);
        }
    }

    fn process(&mut self, text: &[u32], logits: &mut [f32]) -> recant::generate::Result<()> {
        let told = self.kept.lock().is_ok_and(|kept| *kept == text);
        if let Ok(mut wrong) = self.wrong.lock() {
            *wrong += usize::from(!told);
        }
        if let Some(last) = text.last() {
            logits[*last as usize] = f32::NEG_INFINITY;
        }
        Ok(())
    }
}

#[test]
fn c083_a_processor_sees_only_tokens_that_stay_and_nothing_it_bans_comes() -> Result<()> {
    let (target, draft) = (load("demo-target")?, load("demo-draft")?);
    let threads = Threads::new(2)?;
    let prompt = text_ids(60)?;
    for (temperature, rule) in [
        (0.0, Rule::Coupled),
        (0.9, Rule::Coupled),
        (0.9, Rule::Token),
        (0.9, Rule::Block),
    ] {
        let sampling = Sampling {
            temperature,
            rule,
            seed: 4,
            ..Sampling::default()
        };
        let mut plain = target
            .session()
            .threads(&threads)
            .sampling(sampling.clone())
            .processor(Box::new(NoRepeat::default()))
            .build()?;
        let expected = tell(&mut plain, &prompt, 60)?;
        for (way, builder) in ways(&target, &draft, &threads) {
            let processor = NoRepeat::default();
            let mut session = builder
                .sampling(sampling.clone())
                .processor(Box::new(processor.clone()))
                .build()?;
            let told = tell(&mut session, &prompt, 60)?;
            assert_eq!(*processor.wrong.lock().map_err(|e| e.to_string())?, 0, "{way}");
            assert_eq!(
                *processor.kept.lock().map_err(|e| e.to_string())?,
                session.tokens(),
                "{way}"
            );
            assert!(
                session.tokens()[59..].windows(2).all(|pair| pair[0] != pair[1]),
                "{way}"
            );
            if rule == Rule::Coupled {
                assert_eq!(told, expected, "{way}");
            }
        }
    }
    Ok(())
}

#[test]
fn c076_c090_a_stop_string_ends_text_ids_log_probabilities_and_caches_at_its_last_token() -> Result<()> {
    let (target, draft) = (load("demo-target")?, load("demo-draft")?);
    let threads = Threads::new(2)?;
    let prompt = text_ids(40)?;
    let mut rng = Rng(17);
    let mut plain = target.session().threads(&threads).ignore_eos(true).build()?;
    let whole = tell(&mut plain, &prompt, 80)?;
    let chars: Vec<(usize, char)> = whole.text.char_indices().collect();
    let mut inside = 0;
    for _ in 0..40 {
        // Any piece of the text, which tokens and rounds cut anywhere.
        let start = rng.below(chars.len() - 1);
        let end = (start + 1 + rng.below(9)).min(chars.len() - 1);
        let stop = &whole.text[chars[start].0..chars[end].0];
        let at = whole.text.find(stop).ok_or("it is in the text")?;
        let (_, builder) = ways(&target, &draft, &threads).swap_remove(rng.below(7));
        let mut session = builder
            .ignore_eos(true)
            .stop([stop, "never this"])
            .logprobs(LogprobsOptions {
                top: 1,
                of: LogprobsOf::Raw,
            })
            .build()?;
        let told = tell(&mut session, &prompt, 80)?;
        assert_eq!(told.text, whole.text[..at], "stop {stop:?}");
        assert_eq!(told.finish, Some(Finish::Stop));
        // The fewest tokens whose text has the stop in it.
        let complete = |n: usize| {
            target
                .text()
                .decode(&whole.ids[..n])
                .map(|text| text.contains(stop))
        };
        let mut fewest = told.ids.len();
        assert!(complete(fewest)?, "stop {stop:?} after {fewest} tokens");
        while fewest > 0 && complete(fewest - 1)? {
            fewest -= 1;
        }
        assert_eq!(told.ids, whole.ids[..fewest], "stop {stop:?}");
        assert_eq!(told.logprobs.len(), fewest);
        assert!(told.logprobs.iter().all(Option::is_some));
        assert_eq!(session.stats().generated_tokens, fewest);
        assert_eq!(
            recant::core::Cache::len(session.caches()),
            prompt.len() + fewest - 1
        );
        let mut alone = target.session().threads(&threads).ignore_eos(true).build()?;
        tell(&mut alone, &prompt, fewest)?;
        assert_same("at the stop", session.caches(), alone.caches())?;
        inside += usize::from(session.stats().drafted > session.stats().accepted);
    }
    assert!(inside > 5, "stops in the middle of a block: {inside}");
    Ok(())
}

#[test]
fn c085_c086_parameters_out_of_range_are_refused_when_the_session_is_built() -> Result<()> {
    let target = load("demo-target")?;
    let threads = Threads::new(1)?;
    let plain = Sampling::default;
    let cases: [(Sampling, &str); 8] = [
        (
            Sampling {
                temperature: -1.0,
                ..plain()
            },
            "temperature",
        ),
        (
            Sampling {
                temperature: f32::NAN,
                ..plain()
            },
            "temperature",
        ),
        (
            Sampling {
                top_p: 0.0,
                ..plain()
            },
            "top_p",
        ),
        (
            Sampling {
                top_p: 1.5,
                ..plain()
            },
            "top_p",
        ),
        (
            Sampling {
                min_p: 1.0,
                ..plain()
            },
            "min_p",
        ),
        (
            Sampling {
                repetition_penalty: 0.0,
                ..plain()
            },
            "repetition_penalty",
        ),
        (
            Sampling {
                presence_penalty: f32::INFINITY,
                ..plain()
            },
            "presence_penalty",
        ),
        (
            Sampling {
                logit_bias: vec![(1 << 20, 1.0)],
                ..plain()
            },
            "logit_bias",
        ),
    ];
    for (sampling, name) in cases {
        let error = target
            .session()
            .threads(&threads)
            .sampling(sampling)
            .build()
            .err();
        let error = error.ok_or("it was taken")?.to_string();
        assert!(error.contains(name), "{error}");
    }
    let error = target.session().threads(&threads).stop(["ok", ""]).build().err();
    assert!(error.is_some_and(|e| e.to_string().contains("stop")));
    Ok(())
}
