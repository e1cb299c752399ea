//! Plain decoding against speculative decoding on the same prompt, with the same output.
//!
//! Without arguments it runs the small trained target in `examples/models`, drafting with its own multi-token-prediction head
//! and from the text itself, as far as that pays. `--target` takes any checkpoint folder; `--draft`, `--mtp`, `--mtp-path`,
//! `--ngram` and `--auto` say what drafts.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;

use anyhow::{Context, Result};
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use recant::{Event, Finish, LoadOptions, Loaded, Phases, SessionBuilder, Stats, Threads};
use serde_json::json;

const MODELS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/models");
const DEMO_DRAFT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/models/demo-draft");
const PROMPT: &str = "def read_config(path):\n    \"\"\"Read the configuration file and return a dictionary.\"\"\"\n    with open(path) as f:\n";
/// Most tokens that `--depth auto` drafts in a round.
const MOST: usize = 8;
/// Weights below this are likely to stay in the processor's last-level cache.
const CACHE_SIZED: u64 = 32 << 20;

/// Decodes a prompt plainly, then speculatively, and compares.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// Checkpoint folder of the target model.
    #[arg(long)]
    target: Option<PathBuf>,
    /// Draft with the model in this checkpoint folder; without a target, with the demo target's own draft model.
    #[arg(long, num_args = 0..=1, default_missing_value = DEMO_DRAFT, conflicts_with_all = ["mtp", "mtp_path"])]
    draft: Option<PathBuf>,
    /// Draft with the target's own multi-token-prediction head.
    #[arg(long, conflicts_with = "mtp_path")]
    mtp: bool,
    /// Draft with the multi-token-prediction head in this folder.
    #[arg(long)]
    mtp_path: Option<PathBuf>,
    /// Draft from repetitions in the text, alone or with what else drafts.
    #[arg(long)]
    ngram: bool,
    /// Draft with all there is, as far as it pays: the default where nothing else is asked for.
    #[arg(long)]
    auto: bool,
    /// Tokens to draft in a round, or `auto`: as many as pay.
    #[arg(long, alias = "num-draft-tokens")]
    depth: Option<Depth>,
    /// Text to continue.
    #[arg(long, conflicts_with = "prompt_file")]
    prompt: Option<String>,
    /// File with the text to continue.
    #[arg(long)]
    prompt_file: Option<PathBuf>,
    /// Most tokens to generate.
    #[arg(long, default_value_t = 200)]
    max_tokens: usize,
    /// Threads to compute on; 0: as many as can run at once.
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Print one JSON object and nothing else.
    #[arg(long)]
    json: bool,
}

/// How far to look ahead.
#[derive(Clone, Copy)]
enum Depth {
    Auto,
    Fixed(usize),
}

impl FromStr for Depth {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            number => number
                .parse()
                .map(Self::Fixed)
                .map_err(|_| format!("`{number}` is neither `auto` nor a number of tokens")),
        }
    }
}

impl Args {
    /// The session as asked for, with what drafts.
    fn drafting(&self, mut session: SessionBuilder, draft: Option<&Loaded>) -> SessionBuilder {
        if let Some(draft) = draft {
            session = session.draft(draft);
        }
        if self.mtp {
            session = session.mtp();
        }
        if let Some(path) = &self.mtp_path {
            session = session.mtp_from(path);
        }
        if self.ngram {
            session = session.ngram();
        }
        let asked = self.draft.is_some() || self.mtp || self.mtp_path.is_some() || self.ngram;
        if self.auto || !asked {
            session = session.auto();
        }
        match self.depth {
            Some(Depth::Auto) => session.auto_depth(MOST),
            Some(Depth::Fixed(tokens)) => session.draft_tokens(tokens),
            None => session,
        }
    }
}

/// One way of decoding, done.
struct Outcome {
    tokens: Vec<u32>,
    stats: Stats,
    warnings: Vec<String>,
    finish: Option<Finish>,
}

impl Outcome {
    fn tokens_per_s(&self) -> f64 {
        let seconds = self.stats.decode_time().as_secs_f64();
        if seconds == 0.0 {
            return 0.0;
        }
        self.stats.generated_tokens as f64 / seconds
    }
}

fn main() -> Result<ExitCode> {
    let args = Args::parse();
    let prompt = match (&args.prompt, &args.prompt_file) {
        (Some(text), _) => text.clone(),
        (None, Some(file)) => {
            std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?
        }
        (None, None) => PROMPT.to_owned(),
    };
    let target = match &args.target {
        Some(path) => load(path)?,
        None => load(&Path::new(MODELS).join("demo-target"))?,
    };
    let draft = args.draft.as_deref().map(load).transpose()?;
    let threads = Threads::new(args.threads)?;
    let screen = Screen {
        on: !args.json,
        colour: !args.json && std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none(),
    };

    let decode = |drafting: bool, tokens: usize, screen: &Screen| -> Result<Outcome> {
        let session = target.session().threads(&threads);
        let mut session = match drafting {
            true => args.drafting(session, draft.as_ref()),
            false => session,
        }
        .build()?;
        session.start(&prompt)?;
        let mut finish = None;
        for event in session.generate(tokens) {
            match event? {
                Event::Token { text, drafted, .. } => screen.text(&text, drafted),
                Event::Round(_) => {}
                Event::End { text, finish: why } => {
                    screen.text(&text, false);
                    finish = Some(why);
                }
            }
        }
        Ok(Outcome {
            tokens: session.tokens().to_vec(),
            stats: session.stats().clone(),
            warnings: session.warnings().to_vec(),
            finish,
        })
    };

    // Touches all weights once, so that the first run is not slower for it.
    for warning in decode(true, 8, &Screen::OFF)?.warnings {
        eprintln!("note: {warning}");
    }
    screen.heading("prompt");
    screen.text(&prompt, false);
    screen.heading("plain decoding");
    let plain = decode(false, args.max_tokens, &screen)?;
    screen.heading("speculative decoding, accepted draft tokens in colour");
    let speculative = decode(true, args.max_tokens, &screen)?;
    let identical = plain.tokens == speculative.tokens && plain.finish == speculative.finish;

    if args.json {
        println!("{}", report(identical, &plain, &speculative));
    } else {
        table(&plain, &speculative);
        let bytes = weight_bytes(target.path());
        if bytes < CACHE_SIZED {
            println!(
                "\nThe target's weights are {:.0} MB and stay in most processors' cache. There a row costs arithmetic, not\n\
                 memory traffic, and checking T rows costs nearly T times one row: this run shows that the outputs are\n\
                 equal, not what speculation gains. It gains most where weights come from memory.",
                bytes as f64 / 1e6
            );
        }
        match identical {
            true => println!("\nThe two outputs are identical ({} tokens).", plain.tokens.len()),
            false => println!("\nTHE TWO OUTPUTS DIFFER. This is a fault of the library; please report it."),
        }
    }
    Ok(if identical {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn load(path: &Path) -> Result<Loaded> {
    let name = path
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    // Drawn on standard error, and only if that is a terminal.
    let bar = ProgressBar::new(0)
        .with_message(name)
        .with_style(ProgressStyle::with_template(
            "loading {msg} {bar:30} {bytes}/{total_bytes}",
        )?);
    let loaded = recant::load_with(path, &LoadOptions::default(), &mut |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    Ok(loaded?)
}

/// Where text goes, if anywhere.
struct Screen {
    on: bool,
    colour: bool,
}

impl Screen {
    const OFF: Self = Self {
        on: false,
        colour: false,
    };

    fn heading(&self, title: &str) {
        if self.on {
            let bold = self.style(anstyle::Style::new().bold());
            println!("\n\n{bold}--- {title}{bold:#}");
        }
    }

    fn text(&self, text: &str, drafted: bool) {
        if self.on && !text.is_empty() {
            let green = anstyle::AnsiColor::Green.on_default();
            let style = self.style(if drafted { green } else { anstyle::Style::new() });
            print!("{style}{text}{style:#}");
            // A text that cannot be shown is no reason to stop decoding.
            let _ = std::io::stdout().flush();
        }
    }

    fn style(&self, style: anstyle::Style) -> anstyle::Style {
        if self.colour {
            style
        } else {
            anstyle::Style::new()
        }
    }
}

fn table(plain: &Outcome, speculative: &Outcome) {
    let (p, s) = (&plain.stats, &speculative.stats);
    println!("\n\n{:<22}{:>12}{:>14}", "", "plain", "speculative");
    let row = |name: &str, a: String, b: String| println!("{name:<22}{a:>12}{b:>14}");
    row(
        "tokens",
        p.generated_tokens.to_string(),
        s.generated_tokens.to_string(),
    );
    row("rounds", p.rounds.to_string(), s.rounds.to_string());
    row(
        "tokens/s",
        format!("{:.1}", plain.tokens_per_s()),
        format!("{:.1}", speculative.tokens_per_s()),
    );
    for ((name, a), (_, b)) in phases(&p.time).into_iter().zip(phases(&s.time)) {
        row(
            &format!("{name}, ms"),
            format!("{:.1}", a * 1e3),
            format!("{:.1}", b * 1e3),
        );
    }
    println!(
        "\nspeculative / plain: {:.2}; accepted {} of {} drafted tokens",
        speculative.tokens_per_s() / plain.tokens_per_s().max(f64::MIN_POSITIVE),
        s.accepted,
        s.drafted
    );
    let depths: Vec<String> = s
        .depths
        .iter()
        .enumerate()
        .filter(|(_, n)| **n > 0)
        .map(|(k, n)| format!("{k} in {n}"))
        .collect();
    println!("  drafts asked for, in how many rounds: {}", depths.join(", "));
    for (place, (accepted, drafted)) in s
        .accepted_by_position
        .iter()
        .zip(&s.drafted_by_position)
        .enumerate()
    {
        let share = *accepted as f64 / (*drafted).max(1) as f64;
        let bar = "#".repeat((share * 30.0).round() as usize);
        println!("  draft {}: {:>5.1} % accepted  {bar}", place + 1, share * 100.0);
    }
}

fn report(identical: bool, plain: &Outcome, speculative: &Outcome) -> serde_json::Value {
    let seconds = |time: &Phases| -> serde_json::Value {
        phases(time)
            .into_iter()
            .map(|(name, seconds)| (name.to_owned(), json!(seconds)))
            .collect::<serde_json::Map<_, _>>()
            .into()
    };
    json!({
        "identical": identical,
        "tokens": speculative.stats.generated_tokens,
        "plain_tokens_per_s": plain.tokens_per_s(),
        "speculative_tokens_per_s": speculative.tokens_per_s(),
        "drafted": speculative.stats.drafted,
        "drafted_by_position": speculative.stats.drafted_by_position,
        "accepted": speculative.stats.accepted,
        "accepted_by_position": speculative.stats.accepted_by_position,
        "rounds": speculative.stats.rounds,
        "depths": speculative.stats.depths,
        "seconds": seconds(&speculative.stats.time),
        "plain_seconds": seconds(&plain.stats.time),
    })
}

fn phases(time: &Phases) -> [(&'static str, f64); 5] {
    [
        ("prefill", time.prefill),
        ("draft", time.draft),
        ("verify", time.verify),
        ("rollback", time.rollback),
        ("sample", time.sample),
    ]
    .map(|(name, time)| (name, time.as_secs_f64()))
}

/// Bytes of the weight files in a folder.
fn weight_bytes(folder: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return 0;
    };
    entries
        .flatten()
        .filter(|e| e.path().extension().is_some_and(|x| x == "safetensors"))
        .filter_map(|e| e.metadata().ok())
        .map(|m| m.len())
        .sum()
}
