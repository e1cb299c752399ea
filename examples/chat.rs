//! A conversation in the terminal, streamed, with history.
//!
//! Without arguments it talks to the small model in `examples/models`, which was trained on code and says little of sense.
//! `/reset` forgets the conversation, `/stats` shows what the last answer took, an empty line or `/quit` ends.

use std::io::{BufRead, IsTerminal, Write};
use std::path::PathBuf;

use anstyle::{AnsiColor, Style};
use anyhow::Result;
use clap::Parser;
use recant::{ChatOptions, Event, Finish, Message, Sampling, Session, Threads};

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/models/demo-target");

/// Talks with a model.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// Checkpoint folder.
    #[arg(long, default_value = DEMO)]
    model: PathBuf,
    /// What the model is told first.
    #[arg(long)]
    system: Option<String>,
    /// Most tokens of an answer.
    #[arg(long, default_value_t = 512)]
    max_tokens: usize,
    /// 0: always the likeliest token.
    #[arg(long, default_value_t = 0.7)]
    temperature: f32,
    #[arg(long, default_value_t = 20)]
    top_k: usize,
    #[arg(long, default_value_t = 0.8)]
    top_p: f32,
    /// The same seed gives the same answers, whatever drafts.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Let the model think first, or not; else as its template has it.
    #[arg(long)]
    think: Option<bool>,
    /// Threads to compute on; 0: as many as can run at once.
    #[arg(long, default_value_t = 0)]
    threads: usize,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let model = recant::load(&args.model)?;
    let threads = Threads::new(args.threads)?;
    let mut session = model
        .session()
        .threads(&threads)
        .auto()
        .sampling(Sampling {
            temperature: args.temperature,
            top_k: args.top_k,
            top_p: args.top_p,
            seed: args.seed,
            ..Sampling::default()
        })
        .build()?;
    for warning in session.warnings() {
        eprintln!("warning: {warning}");
    }
    let options = ChatOptions {
        enable_thinking: args.think,
        ..ChatOptions::default()
    };
    let terminal = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    let beginning: Vec<Message> = args
        .system
        .iter()
        .map(|text| Message::system(text.as_str()))
        .collect();
    let mut messages = beginning.clone();
    let mut lines = std::io::stdin().lock().lines();
    loop {
        if terminal {
            let bold = Style::new().bold().fg_color(Some(AnsiColor::Cyan.into()));
            print!("{bold}> {bold:#}");
            std::io::stdout().flush()?;
        }
        let Some(line) = lines.next().transpose()? else {
            return Ok(());
        };
        match line.trim() {
            "" | "/quit" => return Ok(()),
            "/reset" => messages = beginning.clone(),
            "/stats" => stats(&session),
            said => {
                messages.push(Message::user(said));
                let answer = answer(&mut session, &messages, &options, args.max_tokens)?;
                messages.push(Message::assistant(answer));
            }
        }
    }
}

/// Streams an answer, and gives it whole.
fn answer(
    session: &mut Session,
    messages: &[Message],
    options: &ChatOptions,
    max_tokens: usize,
) -> Result<String> {
    let mut answer = String::new();
    // The whole conversation is given; what the session holds of it is not read again.
    session.start_chat(messages, options)?;
    for event in session.generate(max_tokens) {
        let event = event?;
        print!("{}", event.text());
        std::io::stdout().flush()?;
        answer.push_str(event.text());
        if let Event::End {
            finish: finish @ (Finish::Length | Finish::Context),
            ..
        } = event
        {
            print!(" [cut off: {finish:?}]");
        }
    }
    println!();
    Ok(answer)
}

fn stats(session: &Session) {
    let stats = session.stats();
    let percent = |part: usize, of: usize| 100.0 * part as f64 / of.max(1) as f64;
    println!(
        "prompt {} tokens, {} of them held already, read in {:.2} s",
        stats.prompt_tokens,
        stats.cached_tokens,
        stats.time.prefill.as_secs_f64()
    );
    println!(
        "answer {} tokens in {} rounds, {:.1} tokens/s; {} of {} drafts accepted ({:.0} %)",
        stats.generated_tokens,
        stats.rounds,
        stats.generated_tokens as f64 / stats.decode_time().as_secs_f64().max(1e-9),
        stats.accepted,
        stats.drafted,
        percent(stats.accepted, stats.drafted)
    );
    println!("caches {:.1} MB", session.footprint().total() as f64 / 1e6);
}
