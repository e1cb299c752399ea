//! What was measured, as a table and as JSON.

use std::io::IsTerminal;
use std::time::Duration;

use recant_kernels::Limits;
use serde_json::{json, Map, Value};

use crate::alternate::ms;
use crate::kernels::Kernels;
use crate::model::{millis, Measured, ACCEPTED};
use crate::perplexity::Perplexity;
use crate::width::Width;

/// All figures.
pub(crate) struct Report {
    limits: Limits,
    pub(crate) widths: Vec<Measured>,
    pub(crate) kernels: Kernels,
    pub(crate) perplexity: Vec<Perplexity>,
}

impl Report {
    pub(crate) fn new(limits: Limits) -> Self {
        Self {
            limits,
            widths: Vec::new(),
            kernels: Kernels::default(),
            perplexity: Vec::new(),
        }
    }

    /// Takes in limits that were measured once more: the best count.
    pub(crate) fn limits(&mut self, again: Limits) {
        let limits = &mut self.limits;
        limits.read_gb_s = limits.read_gb_s.max(again.read_gb_s);
        limits.f32_gflops = limits.f32_gflops.max(again.f32_gflops);
        limits.int8_gops = limits.int8_gops.max(again.int8_gops);
        limits.share_us = limits.share_us.min(again.share_us);
    }

    /// The time that a prompt's multiply-adds in linear layers take at least, as a share of what it took.
    fn of_arithmetic(&self, width: &Measured, tokens: usize, time: Duration) -> f64 {
        let limit = match width.width {
            Width::Bf16 => self.limits.f32_gflops,
            Width::Int8 | Width::Int4 => self.limits.int8_gops,
        };
        2.0 * (width.multiply_adds * tokens) as f64 / (limit * 1e9) / time.as_secs_f64()
    }

    /// What taking back costs, as a share of a round: bookkeeping, and what the next pass folds beyond one token.
    fn rollback(&self, width: &Measured) -> [f64; ACCEPTED.len()] {
        std::array::from_fn(|case| {
            let rounds = width.rounds[case];
            (rounds.bookkeeping + self.kernels.folding[case].max(0.0)) / rounds.whole
        })
    }

    /// The largest such shares of all widths.
    fn most_rollback(&self) -> [f64; ACCEPTED.len()] {
        self.widths.iter().fold([0.0; ACCEPTED.len()], |most, width| {
            let shares = self.rollback(width);
            std::array::from_fn(|case| most[case].max(shares[case]))
        })
    }

    /// One object for scripts.
    pub(crate) fn json(&self) -> Value {
        let limits = &self.limits;
        let by_width = |value: &dyn Fn(&Measured) -> Value| -> Value {
            let entries = self.widths.iter().map(|width| (width.width.name(), value(width)));
            object(entries)
        };
        let shares =
            |shares: [f64; ACCEPTED.len()]| object(ACCEPTED.iter().map(|(name, _)| *name).zip(shares));
        let mut rollback = shares(self.most_rollback());
        rollback["by_width"] = by_width(&|width| shares(self.rollback(width)));
        let attention = self.kernels.attention.iter();
        json!({
            "machine": {"instructions": limits.instructions, "threads": limits.threads},
            "limits": {
                "read_gb_s": limits.read_gb_s,
                "f32_gflops": limits.f32_gflops,
                "int8_gops": limits.int8_gops,
            },
            "decode": by_width(&|width| json!({
                "tokens_per_s": 1.0 / width.decode.as_secs_f64(),
                "share_of_limit": width.share_of_limit,
                "read_gb_s": width.read_gb_s,
                "ms": ms(width.decode),
                "bytes": {
                    "weights": width.bytes.weights,
                    "state": width.bytes.state,
                    "keys_values": width.bytes.keys_values,
                },
            })),
            "verify_ms": by_width(&|width| object(millis(&width.verify))),
            "prefill": by_width(&|width| object(
                width.prefill.iter().map(|(tokens, time)| (*tokens, *tokens as f64 / time.as_secs_f64())),
            )),
            "prefill_share_of_limit": by_width(&|width| object(
                width.prefill.iter().map(|(tokens, time)| (*tokens, self.of_arithmetic(width, *tokens, *time))),
            )),
            "rollback": rollback,
            "kernels": {
                "linear": by_width(&|width| json!(width.linear.share_of_limit())),
                "attention": object(attention.map(|(context, kernel)| (context, kernel.share_of_limit()))),
                "gated_delta": self.kernels.gated_delta.map(|kernel| kernel.share_of_limit()),
                "share_us": limits.share_us,
            },
            "perplexity": object(self.perplexity.iter().map(|found| {
                let figures = json!({"full": found.full, "int8": found.int8, "growth": found.growth()});
                (found.width.name(), figures)
            })),
        })
    }

    /// Tables for people.
    pub(crate) fn print(&self) {
        let limits = &self.limits;
        heading("this machine can");
        println!(
            "  {} instructions, {} threads",
            limits.instructions, limits.threads
        );
        println!("  read memory               {:>8.1} GB/s", limits.read_gb_s);
        println!("  multiply and add f32      {:>8.0} Gflop/s", limits.f32_gflops);
        println!("  multiply and add bytes    {:>8.0} Gop/s", limits.int8_gops);

        heading("decoding: a step of one token, its choice included");
        println!(
            "  width  tokens/s       ms  weights MB  state MB  KV MB  memory GB/s  share of the limit, %"
        );
        for width in &self.widths {
            let mb = |bytes: usize| bytes as f64 / 1e6;
            println!(
                "  {:<5}  {:>8.1}  {:>7.2}  {:>10.1}  {:>8.1}  {:>5.1}  {:>11.1}  {:>21.1}",
                width.width.name(),
                1.0 / width.decode.as_secs_f64(),
                ms(width.decode),
                mb(width.bytes.weights),
                mb(width.bytes.state),
                mb(width.bytes.keys_values),
                width.read_gb_s,
                100.0 * width.share_of_limit,
            );
        }
        println!("  The limit: weights and KV read once, state read and written once, all as fast as memory is read between the steps.");

        heading("checking T tokens in one call, drafts taken back: ms (times one row)");
        for width in &self.widths {
            let one = width.verify[0].1.as_secs_f64();
            let cells = width
                .verify
                .iter()
                .map(|(rows, time)| format!("{rows}: {:.2} ({:.2})", ms(*time), time.as_secs_f64() / one));
            println!(
                "  {:<5}  {}",
                width.width.name(),
                cells.collect::<Vec<_>>().join("  ")
            );
        }

        heading("reading a prompt in one call: tokens/s (% of the limit)");
        for width in &self.widths {
            let cells = width.prefill.iter().map(|(tokens, time)| {
                format!(
                    "{tokens}: {:.0} ({:.0})",
                    *tokens as f64 / time.as_secs_f64(),
                    100.0 * self.of_arithmetic(width, *tokens, *time)
                )
            });
            println!(
                "  {:<5}  {}",
                width.width.name(),
                cells.collect::<Vec<_>>().join("  ")
            );
        }
        println!("  The limit: the multiply-adds of linear layers, of f32 for bf16 weights and of bytes for the others.");

        heading("taking tokens back, of five drafts: % of a round (us of bookkeeping, us of folding)");
        for width in &self.widths {
            let cells = ACCEPTED.iter().zip(self.rollback(width)).zip(width.rounds);
            let cells = cells
                .zip(self.kernels.folding)
                .map(|(((case, share), rounds), fold)| {
                    format!(
                        "{} accepted: {:.2} ({:.1}, {:.0})",
                        case.0,
                        100.0 * share,
                        1e6 * rounds.bookkeeping,
                        1e6 * fold
                    )
                });
            println!(
                "  {:<5}  {}",
                width.width.name(),
                cells.collect::<Vec<_>>().join("  ")
            );
        }

        heading("kernels for one row, nothing cached: % of the speed at which memory is read");
        for width in &self.widths {
            let share = 100.0 * width.linear.share_of_limit();
            println!("  linear, {:<5}               {share:>6.0}", width.width.name());
        }
        for (context, kernel) in &self.kernels.attention {
            println!(
                "  attention, {context:>6} tokens    {:>6.0}",
                100.0 * kernel.share_of_limit()
            );
        }
        if let Some(kernel) = self.kernels.gated_delta {
            println!(
                "  gated delta, read + written {:>6.0}",
                100.0 * kernel.share_of_limit()
            );
        }
        println!("  sharing a job among threads takes {:.1} us", limits.share_us);

        if !self.perplexity.is_empty() {
            heading("perplexity");
            println!("  weights  activations full  in bytes  growth, %");
            for found in &self.perplexity {
                let cell = |x: Option<f64>| x.map_or(String::new(), |x| format!("{x:.4}"));
                println!(
                    "  {:<7}  {:>16.4}  {:>8}  {:>9}",
                    found.width.name(),
                    found.full,
                    cell(found.int8),
                    cell(found.growth().map(|growth| 100.0 * growth)),
                );
            }
        }
    }
}

/// An object of what has names or numbers for keys.
fn object<K: ToString, V: Into<Value>>(entries: impl IntoIterator<Item = (K, V)>) -> Value {
    let entries = entries.into_iter();
    entries
        .map(|(key, value)| (key.to_string(), value.into()))
        .collect::<Map<_, _>>()
        .into()
}

/// A title, set off if this is a terminal.
fn heading(title: &str) {
    let plain = std::env::var_os("NO_COLOR").is_some() || !std::io::stdout().is_terminal();
    let style = if plain {
        anstyle::Style::new()
    } else {
        anstyle::Style::new().bold()
    };
    println!("\n{style}{title}{style:#}");
}
