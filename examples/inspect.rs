//! What a checkpoint folder or a GGUF file holds, and what keeps it from being loaded.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;

use anstyle::{AnsiColor, Style};
use anyhow::Result;
use clap::Parser;
use recant::{Mtp, Report};

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/models/demo-target");

/// Shows what a checkpoint holds. Exits with 1 where it would not be loaded.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// Checkpoint folder or GGUF file.
    #[arg(default_value = DEMO)]
    model: PathBuf,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

fn main() -> Result<ExitCode> {
    let args = Args::parse();
    let report = recant::inspect(&args.model);
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        Table::new().print(&report);
    }
    Ok(ExitCode::from(u8::from(!report.refusals.is_empty())))
}

/// Writes to the terminal, with colours if it is one.
struct Table {
    bold: Style,
    good: Style,
    bad: Style,
    dim: Style,
}

impl Table {
    fn new() -> Self {
        let colours = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
        let style = |style: Style| if colours { style } else { Style::new() };
        Self {
            bold: style(Style::new().bold()),
            good: style(AnsiColor::Green.on_default()),
            bad: style(AnsiColor::Red.on_default()),
            dim: style(Style::new().dimmed()),
        }
    }

    fn print(&self, report: &Report) {
        let Self { bold, good, bad, dim } = self;
        println!("{bold}{}{bold:#}", report.path.display());
        let family = match (&report.family, &report.model_type) {
            (Some(family), _) => family.clone(),
            (None, Some(model_type)) => format!("{bad}none{bad:#} of model_type {model_type}"),
            (None, None) => format!("{bad}none{bad:#}"),
        };
        line("family", &family);
        if let Some(layers) = report.layers {
            line(
                "layers",
                &format!(
                    "{} ({} linear, {} full attention)",
                    layers.total, layers.linear, layers.full
                ),
            );
        }
        line("parameters", &amount(report.parameters));
        line("size", &size(report.bytes));
        let mtp = match &report.mtp {
            Mtp::Absent => "none".to_owned(),
            Mtp::Complete => "complete".to_owned(),
            _ => format!("{bad}incomplete{bad:#}"),
        };
        line("mtp head", &mtp);
        line("tokenizer", if report.tokenizer { "yes" } else { "no" });
        line("template", if report.template { "yes" } else { "no" });
        if !report.modules.is_empty() {
            println!(
                "\n{bold}{:<18}{:>8}{:>12}{:>11}  stored as{bold:#}",
                "", "tensors", "parameters", "size"
            );
        }
        for module in &report.modules {
            let formats: Vec<&str> = module.formats.keys().map(String::as_str).collect();
            println!(
                "{:<18}{:>8}{:>12}{:>11}  {dim}{}{dim:#}",
                module.kind.name(),
                module.tensors,
                amount(module.parameters),
                size(module.bytes),
                formats.join(", ")
            );
        }
        println!();
        for note in &report.notes {
            println!("{dim}note: {note}{dim:#}");
        }
        for reason in &report.refusals {
            println!("{bad}refused{bad:#}: {reason}");
        }
        if report.refusals.is_empty() {
            println!("{good}headers show nothing that keeps it from being loaded{good:#}");
        }
    }
}

fn line(name: &str, value: &str) {
    println!("{name:<12}{value}");
}

fn amount(parameters: u64) -> String {
    let n = parameters as f64;
    match parameters {
        1_000_000_000.. => format!("{:.2} B", n / 1e9),
        1_000_000.. => format!("{:.1} M", n / 1e6),
        1_000.. => format!("{:.1} k", n / 1e3),
        _ => parameters.to_string(),
    }
}

fn size(bytes: u64) -> String {
    const MIB: f64 = 1_048_576.0;
    let mib = bytes as f64 / MIB;
    match mib {
        1024.0.. => format!("{:.2} GiB", mib / 1024.0),
        1.0.. => format!("{mib:.1} MiB"),
        _ => format!("{:.1} KiB", mib * 1024.0),
    }
}
