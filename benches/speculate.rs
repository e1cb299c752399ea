//! Plain against speculative decoding, the two in turn, two threads: a draft model and the target's own
//! multi-token-prediction head at fixed depths and at one that adapts, on held-out text; look-up in the text itself, on
//! held-out text and on text that repeats itself.
//!
//! Uses the larger trained pair beside the repository where it is, else the demo pair, whose weights fit in the
//! processor's cache: there T rows cost nearly T times one, and little can be gained.

#[allow(dead_code, unreachable_pub)]
#[path = "alternate.rs"]
mod alternate;

use std::path::{Path, PathBuf};
use std::time::Duration;

use criterion::{criterion_group, criterion_main, Criterion};
use recant::generate::DraftVocabulary;
use recant::{Loaded, Rule, Sampling, Session, SessionBuilder, Stats, Threads};

/// Texts of most rows, and of the row that stands for all.
const TEXTS: usize = 4;
const ALL: usize = 20;
const PROMPT: usize = 100;
const TOKENS: usize = 96;
/// Tokens of the beginning of a text that comes again and again.
const PHRASE: usize = 40;

fn pair() -> (PathBuf, PathBuf) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let shared = root.join("../shared/models");
    let own = root.join("examples/models");
    match shared.join("target").is_dir() {
        true => (shared.join("target"), shared.join("draft")),
        false => (own.join("demo-target"), own.join("demo-draft")),
    }
}

/// Whether most lines of a text end as lines of code do.
fn is_code(text: &str) -> bool {
    let lines = || text.lines().map(str::trim_end).filter(|line| !line.is_empty());
    let code = lines().filter(|line| line.ends_with([';', '{', '}', ',', '(', ')', ':']));
    2 * code.count() > lines().count()
}

/// Prompts of [`PROMPT`] tokens, from texts that are wanted.
fn prompts(target: &Loaded, wanted: fn(&str) -> bool) -> Vec<Vec<u32>> {
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
        .filter(|text| wanted(text))
        .take(ALL)
        .map(|text| {
            let mut ids = target.text().encode(text).expect("ids");
            ids.truncate(PROMPT);
            ids
        })
        .collect()
}

fn run(session: &mut Session, prompt: &[u32]) -> (Duration, Vec<u32>, Stats) {
    session.start_tokens(prompt, &mut |_, _| {}).expect("a prompt");
    session
        .generate(TOKENS)
        .for_each(|event| drop(event.expect("an event")));
    (
        session.stats().decode_time(),
        session.tokens().to_vec(),
        session.stats().clone(),
    )
}

/// A way of decoding, by name, on texts of one kind.
type Row<'a> = (&'static str, SessionBuilder, &'a [Vec<u32>]);

fn speculate(criterion: &mut Criterion) {
    let (target, draft) = pair();
    println!("target {}, draft {}", target.display(), draft.display());
    let target = recant::load(target).expect("a target");
    let draft = recant::load(draft).expect("a draft");
    let threads = Threads::new(2).expect("threads");
    let plain = || target.session().threads(&threads);
    let model = || plain().draft(&draft);
    let all = prompts(&target, |_| true);
    let code = prompts(&target, is_code);
    let heldout = &all[..TEXTS.min(all.len())];
    let repeating: Vec<Vec<u32>> = heldout
        .iter()
        .map(|text| text[..PHRASE.min(text.len())].repeat(3)[..PHRASE * 5 / 2].to_vec())
        .collect();

    let head = || plain().mtp();
    let few = || DraftVocabulary::first(2048);
    let rows: Vec<Row<'_>> = vec![
        ("draft model, 4, 20 texts", model().draft_tokens(4), &all),
        ("draft model, 4, code", model().draft_tokens(4), &code),
        ("head, 3, code", head().draft_tokens(3), &code),
        ("draft model, 1", model().draft_tokens(1), heldout),
        ("draft model, 2", model().draft_tokens(2), heldout),
        ("draft model, 3", model().draft_tokens(3), heldout),
        ("draft model, 4", model().draft_tokens(4), heldout),
        ("draft model, 6", model().draft_tokens(6), heldout),
        ("draft model, up to 8", model().auto_depth(8), heldout),
        ("both, up to 8", model().ngram().auto_depth(8), heldout),
        ("head, 1", head().draft_tokens(1), heldout),
        ("head, 2", head().draft_tokens(2), heldout),
        ("head, 3", head().draft_tokens(3), heldout),
        ("head, 4", head().draft_tokens(4), heldout),
        ("head, up to 8", head().auto_depth(8), heldout),
        (
            "head of 2,048 tokens, 3",
            head().draft_vocabulary(few()).draft_tokens(3),
            heldout,
        ),
        ("auto", plain().auto(), heldout),
        ("n-gram, 4", plain().ngram().draft_tokens(4), heldout),
        ("n-gram, up to 8", plain().ngram().auto_depth(8), heldout),
        (
            "n-gram, 8, repeating",
            plain().ngram().draft_tokens(8),
            &repeating,
        ),
        (
            "n-gram, up to 8, repeating",
            plain().ngram().auto_depth(8),
            &repeating,
        ),
    ];
    println!(
        "{:<27} tokens/s  plain  ratio: median  lowest  highest  draft / verify / rollback / sample, %  \
         accepted by position, %; rounds by depth",
        "drafts"
    );
    for (name, session, prompts) in rows {
        let mut slow = plain().draft_tokens(0).build().expect("a session");
        compare(name, &mut slow, &mut session.build().expect("a session"), prompts);
    }

    demo(&threads);
    sampled(&plain, &model, &all);

    let mut group = criterion.benchmark_group("speculate");
    group.sample_size(10).measurement_time(Duration::from_secs(3));
    for (name, session) in [("depth 0", plain()), ("depth 4", model().draft_tokens(4))] {
        let mut session = session.build().expect("a session");
        group.bench_function(format!("{TOKENS} tokens, {name}"), |bench| {
            bench.iter_custom(|n| {
                (0..n)
                    .map(|i| run(&mut session, &heldout[i as usize % heldout.len()]).0)
                    .sum()
            });
        });
    }
    group.finish();
}

/// The demo target with its own head, which look at so few tokens that both stay in the processor's cache.
fn demo(threads: &Threads) {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/models/demo-target");
    let demo = recant::load(demo).expect("the demo target");
    let plain = || demo.session().threads(threads);
    let all = prompts(&demo, |_| true);
    let few = || DraftVocabulary::first(2048);
    for (name, depth) in [
        ("demo, head of 2,048, 1", 1),
        ("demo, head of 2,048, 2", 2),
        ("demo, head of 2,048, 3", 3),
    ] {
        let session = plain().mtp().draft_vocabulary(few()).draft_tokens(depth);
        let mut slow = plain().draft_tokens(0).build().expect("a session");
        compare(name, &mut slow, &mut session.build().expect("a session"), &all);
    }
}

/// Drafts of a model where text is sampled, by each rule. Texts differ between rules, so tokens a second are compared, of all
/// prompts together.
fn sampled(plain: &dyn Fn() -> SessionBuilder, model: &dyn Fn() -> SessionBuilder, prompts: &[Vec<u32>]) {
    for temperature in [0.7, 1.0] {
        for rule in [Rule::Coupled, Rule::Token, Rule::Block] {
            let sampling = Sampling {
                temperature,
                rule,
                seed: 1,
                ..Sampling::default()
            };
            let build =
                |builder: SessionBuilder| builder.sampling(sampling.clone()).build().expect("a session");
            let mut sessions = [build(plain().draft_tokens(0)), build(model().draft_tokens(4))];
            let (mut seconds, mut tokens) = ([0.0; 2], [0; 2]);
            let mut total = Stats::default();
            for prompt in prompts {
                for (v, session) in sessions.iter_mut().enumerate() {
                    let (time, text, stats) = run(session, prompt);
                    seconds[v] += time.as_secs_f64();
                    tokens[v] += text.len() - prompt.len();
                    if v == 1 {
                        add(&mut total, &stats);
                    }
                }
            }
            let rate = |v: usize| tokens[v] as f64 / seconds[v];
            println!(
                "temperature {temperature}, {rule:?}, draft model, 4: {:.2} times plain, {:.2} tokens a round, {:.0} % accepted",
                rate(1) / rate(0),
                total.generated_tokens as f64 / total.rounds as f64,
                100.0 * total.accepted as f64 / total.drafted as f64
            );
        }
    }
}

/// Runs both on each prompt, checks that they write the same, and prints a row.
fn compare(name: &str, plain: &mut Session, speculative: &mut Session, prompts: &[Vec<u32>]) {
    let mut ratios = Vec::new();
    let mut total = Stats::default();
    let (mut slow, mut fast, mut tokens) = (Duration::ZERO, Duration::ZERO, 0);
    for prompt in prompts {
        let mut texts = Vec::new();
        let times = alternate::medians(2, 2, |variant| {
            let (time, text, stats) = run(if variant == 0 { plain } else { speculative }, prompt);
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
        "{name:<27} {:>8.0}  {:>5.0}  {:>13.2}  {:>6.2}  {:>7.2}  {:>12.0} / {:.0} / {:.1} / {:.1}  {}; {:?}",
        tokens as f64 / fast.as_secs_f64(),
        tokens as f64 / slow.as_secs_f64(),
        ratios[ratios.len() / 2],
        ratios[0],
        ratios[ratios.len() - 1],
        share(total.time.draft),
        share(total.time.verify),
        share(total.time.rollback),
        share(total.time.sample),
        accepted.join(" "),
        total.depths,
    );
}

/// Adds the counts and seconds of a run.
fn add(total: &mut Stats, run: &Stats) {
    for (sum, counts) in [
        (&mut total.depths, &run.depths),
        (&mut total.drafted_by_position, &run.drafted_by_position),
        (&mut total.accepted_by_position, &run.accepted_by_position),
    ] {
        sum.resize(sum.len().max(counts.len()), 0);
        sum.iter_mut().zip(counts).for_each(|(sum, n)| *sum += n);
    }
    total.rounds += run.rounds;
    total.drafted += run.drafted;
    total.accepted += run.accepted;
    total.generated_tokens += run.generated_tokens;
    total.time.add(&run.time);
}

criterion_group!(benches, speculate);
criterion_main!(benches);
