//! Rounds a checkpoint's matrices to 4 or 8 bits and saves it, for this library and for mlx-lm.

use std::path::PathBuf;

use anyhow::Result;
use clap::{Parser, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use recant::candle::DType;
use recant::GroupFormat;

/// Saves a checkpoint with its matrices in groups of few bits.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// Checkpoint folder, or repository of the Hub.
    source: PathBuf,
    /// Folder to write, which does not exist yet.
    target: PathBuf,
    /// Bits of a weight: 4 or 8.
    #[arg(long, default_value_t = 4)]
    bits: usize,
    /// Weights that share a scale: 32, 64 or 128.
    #[arg(long, default_value_t = 64)]
    group: usize,
    /// Type of scales and biases.
    #[arg(long, value_enum, default_value_t = Scales::Bf16)]
    scales: Scales,
}

#[derive(Clone, Copy, ValueEnum)]
enum Scales {
    Bf16,
    F16,
    F32,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let format = GroupFormat {
        bits: args.bits,
        group: args.group,
        affine: true,
        scales: match args.scales {
            Scales::Bf16 => DType::BF16,
            Scales::F16 => DType::F16,
            Scales::F32 => DType::F32,
        },
    };
    let bar = ProgressBar::new(0).with_style(ProgressStyle::with_template(
        "{wide_bar} {bytes}/{total_bytes} {bytes_per_sec}",
    )?);
    recant::save(&args.source, &args.target, format, &mut |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    })?;
    bar.finish_and_clear();
    println!("{}", args.target.display());
    Ok(())
}
