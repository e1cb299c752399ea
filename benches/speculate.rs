//! Plain against speculative decoding on held-out text, the two in turn, two threads.
//!
//! Uses the larger trained pair beside the repository where it is, else the demo pair, whose weights fit in the
//! processor's cache: there T rows cost nearly T times one, and little can be gained.

#[allow(unreachable_pub)]
#[path = "alternate.rs"]
mod alternate;

use std::path::{Path, PathBuf};
use std::time::Duration;

use criterion::{criterion_group, criterion_main, Criterion};
use recant::{Loaded, Session, Stats, Threads};

const TEXTS: usize = 20;
const PROMPT: usize = 100;
const TOKENS: usize = 128;
const DEPTHS: [usize; 5] = [1, 2, 3, 4, 6];

fn pair() -> (PathBuf, PathBuf) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let shared = root.join("../shared/models");
    let own = root.join("examples/models");
    match shared.join("target").is_dir() {
        true => (shared.join("target"), shared.join("draft")),
        false => (own.join("demo-target"), own.join("demo-draft")),
    }
}

/// Prompts of [`PROMPT`] tokens.
fn prompts(target: &Loaded) -> Vec<Vec<u32>> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/models/heldout.jsonl");
    let texts: Vec<String> = match std::fs::read_to_string(file) {
        Ok(lines) => lines
            .lines()
            .filter_map(|line| {
                let line: serde_json::Value = serde_json::from_str(line).ok()?;
                Some(line["text"].as_str()?.to_owned())
            })
            .collect(),
        Err(_) => vec![include_str!("../README.md").to_owned()],
    };
    texts
        .iter()
        .take(TEXTS)
        .map(|text| {
            let mut ids = target.text().encode(text).expect("ids");
            ids.truncate(PROMPT);
            ids
        })
        .collect()
}

fn run(session: &mut Session, prompt: &[u32]) -> (Duration, Vec<u32>, Stats) {
    session.start_tokens(prompt, &mut |_, _| {}).expect("a prompt");
    session.generate(TOKENS).for_each(|event| drop(event.expect("an event")));
    (session.stats().decode_time(), session.tokens().to_vec(), session.stats().clone())
}

fn speculate(criterion: &mut Criterion) {
    let (target, draft) = pair();
    println!("target {}, draft {}", target.display(), draft.display());
    let (target, draft) = (recant::load(target).expect("a target"), recant::load(draft).expect("a draft"));
    let threads = Threads::new(2).expect("threads");
    let session = |k: usize| {
        let session = target.session().threads(&threads).draft_tokens(k);
        let session = if k > 0 { session.draft(&draft) } else { session };
        session.build().expect("a session")
    };
    let prompts = prompts(&target);

    println!("depth  tokens/s  plain  ratio: median  lowest  highest  accepted by position, %  draft / verify / rollback / sample, %");
    for depth in DEPTHS {
        let (mut plain, mut speculative) = (session(0), session(depth));
        let mut ratios = Vec::new();
        let mut total = Stats::default();
        let (mut slow, mut fast, mut tokens) = (Duration::ZERO, Duration::ZERO, 0);
        for prompt in &prompts {
            let mut texts = Vec::new();
            let times = alternate::medians(2, 3, |variant| {
                let (time, text, stats) = run(if variant == 0 { &mut plain } else { &mut speculative }, prompt);
                texts.push(text);
                if variant == 1 {
                    add(&mut total, &stats);
                }
                time
            });
            assert!(texts.windows(2).all(|w| w[0] == w[1]), "outputs differ");
            ratios.push(times[0].as_secs_f64() / times[1].as_secs_f64());
            slow += times[0];
            fast += times[1];
            tokens += texts[0].len() - prompt.len();
        }
        ratios.sort_by(f64::total_cmp);
        let accepted: Vec<String> = total
            .accepted_by_position
            .iter()
            .zip(&total.drafted_by_position)
            .map(|(a, d)| format!("{:.0}", 100.0 * *a as f64 / *d as f64))
            .collect();
        let all = total.decode_time().as_secs_f64();
        let share = |time: Duration| 100.0 * time.as_secs_f64() / all;
        println!(
            "{depth:>5}  {:>8.0}  {:>5.0}  {:>13.2}  {:>6.2}  {:>7.2}  {:>24}  {:.0} / {:.0} / {:.1} / {:.1}",
            tokens as f64 / fast.as_secs_f64(),
            tokens as f64 / slow.as_secs_f64(),
            ratios[ratios.len() / 2],
            ratios[0],
            ratios[ratios.len() - 1],
            accepted.join(" "),
            share(total.time.draft),
            share(total.time.verify),
            share(total.time.rollback),
            share(total.time.sample),
        );
    }

    let mut group = criterion.benchmark_group("speculate");
    group.sample_size(10).measurement_time(Duration::from_secs(3));
    for depth in [0, 4] {
        let mut session = session(depth);
        group.bench_function(format!("{TOKENS} tokens, depth {depth}"), |bench| {
            bench.iter_custom(|n| (0..n).map(|i| run(&mut session, &prompts[i as usize % prompts.len()]).0).sum());
        });
    }
    group.finish();
}

/// Adds the counts and seconds of a run.
fn add(total: &mut Stats, run: &Stats) {
    for (sum, counts) in [
        (&mut total.drafted_by_position, &run.drafted_by_position),
        (&mut total.accepted_by_position, &run.accepted_by_position),
    ] {
        sum.resize(sum.len().max(counts.len()), 0);
        sum.iter_mut().zip(counts).for_each(|(sum, n)| *sum += n);
    }
    total.time.add(&run.time);
}

criterion_group!(benches, speculate);
criterion_main!(benches);
