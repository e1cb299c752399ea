//! A prompt that is read once, saved, and taken up by another process.
//!
//! Run it twice with the same folder: the second run finds what the first one read.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Parser;
use recant::{PromptStore, StoreOptions, Threads};

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/models/demo-target");

/// Continues a text, and keeps what was read of it in a folder.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// Checkpoint folder.
    #[arg(long, default_value = DEMO)]
    model: PathBuf,
    /// Folder of saved prompts; made if it is absent.
    #[arg(long, default_value = "target/prompts")]
    store: PathBuf,
    /// File with the text to continue: by default the README.
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../../README.md"))]
    prompt_file: PathBuf,
    /// Most bytes that the store holds.
    #[arg(long, default_value_t = 1 << 30)]
    budget: usize,
    /// Most tokens to generate.
    #[arg(long, default_value_t = 48)]
    max_tokens: usize,
    /// Threads to compute on; 0: as many as can run at once.
    #[arg(long, default_value_t = 0)]
    threads: usize,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let prompt = std::fs::read_to_string(&args.prompt_file)
        .with_context(|| format!("cannot read {}", args.prompt_file.display()))?;
    let model = recant::load(&args.model)?;
    let threads = Threads::new(args.threads)?;
    let store = PromptStore::new(StoreOptions {
        budget: args.budget,
        ..StoreOptions::default()
    });
    if args.store.is_dir() {
        let found = store.load(&args.store)?;
        println!("{found} checkpoints in {}", args.store.display());
    }
    let mut session = model
        .session()
        .threads(&threads)
        .auto()
        .prompt_store(&store)
        .build()?;
    session.start(&prompt)?;
    let stats = session.stats();
    println!(
        "prompt of {} tokens, {} of them read before, {:.0} ms",
        stats.prompt_tokens,
        stats.cached_tokens,
        1e3 * stats.time.prefill.as_secs_f64()
    );
    for event in session.generate(args.max_tokens) {
        print!("{}", event?.text());
    }
    println!();
    store.save(&args.store)?;
    let stats = store.stats();
    println!(
        "{} checkpoints, {:.1} MB, saved in {}",
        stats.entries,
        stats.bytes as f64 / 1e6,
        args.store.display()
    );
    Ok(())
}
