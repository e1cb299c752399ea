//! Several prompts at once through one call of the model a round: each gives what it would give alone.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{ensure, Result};
use clap::Parser;
use recant::{Batcher, BatcherOptions, Event, Session, Threads};

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/models/demo-target");

/// Continues several texts at once, and then one after the other, and compares.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// Checkpoint folder.
    #[arg(long, default_value = DEMO)]
    model: PathBuf,
    /// Most tokens of each continuation.
    #[arg(long, default_value_t = 64)]
    max_tokens: usize,
    /// Threads to compute on; 0: as many as can run at once.
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Texts to continue.
    #[arg(default_values = ["def fibonacci(n):\n", "fn main() {\n", "# Installation\n\n", "import os\nimport sys\n"])]
    prompts: Vec<String>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let model = recant::load(&args.model)?;
    let threads = Threads::new(args.threads)?;
    let session = || -> Result<Session> { Ok(model.session().threads(&threads).ngram().build()?) };

    let mut batcher = Batcher::new(&threads, BatcherOptions::default());
    let mut texts = BTreeMap::new();
    for prompt in &args.prompts {
        let ids = model.text().encode(prompt)?;
        let ticket = batcher
            .submit(session()?, &ids, args.max_tokens)
            .map_err(|refused| refused.error)?;
        texts.insert(ticket, (prompt, String::new()));
    }
    let start = Instant::now();
    while !batcher.is_idle() {
        for (ticket, event) in batcher.step() {
            let event = event?;
            if let Some((_, text)) = texts.get_mut(&ticket) {
                text.push_str(event.text());
            }
            if let Event::End { finish, .. } = event {
                eprintln!("{ticket:?} ended: {finish:?}");
            }
        }
    }
    let together = start.elapsed();
    let mut tokens = 0;
    let start = Instant::now();
    for (ticket, (prompt, text)) in &texts {
        println!("--- {prompt}{text}");
        let mut alone = session()?;
        alone.start(prompt)?;
        alone
            .generate(args.max_tokens)
            .try_for_each(|event| event.map(drop))?;
        let batched = batcher.leave(*ticket);
        ensure!(
            batched.is_some_and(|session| session.tokens() == alone.tokens()),
            "the batch gave another text than the session alone"
        );
        tokens += alone.stats().generated_tokens;
    }
    let alone = start.elapsed();
    println!(
        "--- {tokens} tokens: {:.0} tokens/s together, {:.0} one after the other; the same texts",
        tokens as f64 / together.as_secs_f64(),
        tokens as f64 / alone.as_secs_f64()
    );
    Ok(())
}
