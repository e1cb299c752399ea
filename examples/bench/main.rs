//! What this machine can do at most, and what share of it is reached: by decoding, by checking several tokens at once, by
//! reading a prompt, by taking tokens back, and by each kernel alone.
//!
//! The models have the shape of Qwen3.5-0.8B and random weights in three widths: times do not depend on the values.
//! `--perplexity` measures with a trained checkpoint what rounding costs.

#[allow(dead_code, unreachable_pub)]
#[path = "../../benches/alternate.rs"]
mod alternate;
#[allow(dead_code, unreachable_pub)]
#[path = "../../benches/delta.rs"]
mod delta;
mod kernels;
mod model;
mod perplexity;
mod report;
#[allow(dead_code, unreachable_pub)]
#[path = "../../tests/common/seeded.rs"]
mod seeded;
mod width;

use std::io::IsTerminal;
use std::path::PathBuf;

use anyhow::Result;
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use recant::Threads;

use model::Model;
use report::Report;
use width::Width;

/// Measures what this machine can do, and what share of it decoding, verification, prefill and rollback reach.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// Measure less often, and leave out the longest prompt: less than a minute.
    #[arg(long)]
    quick: bool,
    /// Print one JSON object and nothing else.
    #[arg(long)]
    json: bool,
    /// Measure weights of this width alone.
    #[arg(long)]
    only: Option<Width>,
    /// Threads to compute on; 0: as many as can run at once.
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Measure as well what the checkpoint MODEL makes of the texts in TEXTS, a JSON object with a `text` a line, with
    /// weights and activations rounded and not.
    #[arg(long, num_args = 2, value_names = ["MODEL", "TEXTS"])]
    perplexity: Option<Vec<PathBuf>>,
}

/// How often each thing is measured.
struct Effort {
    /// Steps of one token.
    decode: usize,
    /// Calls of each number of rows.
    verify: usize,
    /// Lengths of prompts.
    prompts: &'static [usize],
    /// Calls of each length.
    prefill: usize,
    /// Texts, each with a round of every kind for ten tokens.
    rollback: usize,
    /// Calls of each kernel.
    kernels: usize,
}

impl Effort {
    const FULL: Self = Self {
        decode: 128,
        verify: 15,
        prompts: &[128, 512, 2048],
        prefill: 3,
        rollback: 4,
        kernels: 31,
    };
    const QUICK: Self = Self {
        decode: 40,
        verify: 5,
        prompts: &[128, 512],
        prefill: 1,
        rollback: 1,
        kernels: 15,
    };
}

fn main() -> Result<()> {
    let args = Args::parse();
    let threads = Threads::new(args.threads)?;
    let report = threads.run(|| measure(&args))?;
    if args.json {
        println!("{}", report.json());
    } else {
        report.print();
    }
    Ok(())
}

fn measure(args: &Args) -> Result<Report> {
    let effort = if args.quick { Effort::QUICK } else { Effort::FULL };
    let progress = Progress::new();
    progress.say("limits of this machine");
    let mut report = Report::new(recant_kernels::limits());
    let widths = args.only.map_or(Width::ALL.to_vec(), |width| vec![width]);
    for (done, width) in widths.iter().enumerate() {
        let say = |what: &str| progress.say(&format!("{}: {what}", width.name()));
        say("making a model");
        let model = Model::new(*width)?;
        report.widths.push(model.measure(&effort, &say)?);
        // A machine with other users may do better at another time.
        report.limits(recant_kernels::limits());
        if done + 1 == widths.len() {
            progress.say("kernels");
            report.kernels = kernels::measure(&model, effort.kernels)?;
        }
    }
    if let Some([model, texts]) = args.perplexity.as_deref() {
        report.perplexity = perplexity::measure(model, texts, &|what| progress.say(what))?;
    }
    progress.end();
    Ok(report)
}

/// Says on standard error what is going on: in place on a terminal, else a line each.
struct Progress(Option<ProgressBar>);

impl Progress {
    fn new() -> Self {
        let style = ProgressStyle::with_template("[{elapsed}] {msg}");
        let bar = ProgressBar::new_spinner();
        Self(match style {
            Ok(style) if std::io::stderr().is_terminal() => Some(bar.with_style(style)),
            _ => None,
        })
    }

    fn say(&self, what: &str) {
        match &self.0 {
            Some(bar) => {
                bar.set_message(what.to_owned());
                bar.tick();
            }
            None => eprintln!("{what}"),
        }
    }

    fn end(&self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}
