//! A model of random weights, and what is measured of it.

use std::cmp::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{anyhow, ensure, Result};
use recant::candle::{DType, Tensor};
use recant::core::{Cache, CacheOptions, LanguageModel, Rows, Segment};
use recant::generate::Decoder;
use recant::{ActivationPrecision, Round};
use recant_kernels::Reader;
use recant_layers::HybridModel;
use recant_testkit::{Draft, ScriptedDrafter};
use recant_weights::Source;

use crate::alternate::{ms, try_medians};
use crate::kernels::{self, Kernel};
use crate::seeded::{self, Seeded};
use crate::width::Width;
use crate::Effort;

/// Tokens held when measuring begins.
const HELD: u32 = 64;

/// Rows that are checked in one call.
const ROWS: [usize; 7] = [1, 2, 4, 5, 6, 8, 16];

/// Drafts of a round whose rejected ones are taken back.
pub(crate) const DRAFTS: usize = 5;

/// Accepted ones, by name.
pub(crate) const ACCEPTED: [(&str, usize); 3] = [("none", 0), ("half", 2), ("all", DRAFTS)];

/// A model in the shape of Qwen3.5-0.8B.
pub(crate) struct Model {
    width: Width,
    model: Arc<HybridModel>,
    counted: Counted,
    /// A row for the head.
    hidden: Tensor,
}

/// What was measured of a model.
pub(crate) struct Measured {
    pub(crate) width: Width,
    /// A step of one token.
    pub(crate) decode: Duration,
    /// How fast memory was read between the steps, in 10^9 bytes a second.
    pub(crate) read_gb_s: f64,
    /// The share of a step that moving its bytes takes at the speed with which memory is read right before and after it,
    /// whichever is higher.
    pub(crate) share_of_limit: f64,
    /// What such a step moves.
    pub(crate) bytes: Bytes,
    /// A round of so many rows, all logits looked at, all drafts taken back.
    pub(crate) verify: Vec<(usize, Duration)>,
    /// A call of so many tokens into empty caches.
    pub(crate) prefill: Vec<(usize, Duration)>,
    /// Multiply-adds of a token in the layers.
    pub(crate) multiply_adds: usize,
    /// Rounds of [`DRAFTS`] drafts, for each of [`ACCEPTED`].
    pub(crate) rounds: [Rounds; ACCEPTED.len()],
    /// The head alone, one row.
    pub(crate) linear: Kernel,
}

/// Bytes that a step of one token moves.
#[derive(Clone, Copy)]
pub(crate) struct Bytes {
    /// All weights, read. The embedding is the head, and is read once.
    pub(crate) weights: usize,
    /// Recurrent state, read and written.
    pub(crate) state: usize,
    /// Keys and values of the tokens held, read.
    pub(crate) keys_values: usize,
}

impl Bytes {
    pub(crate) fn total(self) -> usize {
        self.weights + self.state + self.keys_values
    }
}

/// Rounds of one outcome.
#[derive(Clone, Copy)]
pub(crate) struct Rounds {
    /// Seconds of checkpoint, trim and commit.
    pub(crate) bookkeeping: f64,
    /// Seconds of a whole round.
    pub(crate) whole: f64,
}

impl Model {
    pub(crate) fn new(width: Width) -> Result<Self> {
        let source = Seeded {
            seed: 1,
            dtype: DType::BF16,
        };
        let hidden = source.tensor("hidden", &[1, 1024])?.to_dtype(DType::F32)?;
        let mut counted = Counted {
            source,
            width,
            bytes: 0,
            weights: 0,
            head: 0,
        };
        let options = width.options(ActivationPrecision::default());
        let model = seeded::model_of(&seeded::qwen3_5_0_8b(), width.name(), &mut counted, &options);
        Ok(Self {
            width,
            model: Arc::new(model.map_err(|e| anyhow!("no model of random weights: {e}"))?),
            counted,
            hidden,
        })
    }

    pub(crate) fn measure(&self, effort: &Effort, say: &dyn Fn(&str)) -> Result<Measured> {
        say("decoding");
        let mut decoder = self.decoder()?;
        let reader = Reader::new();
        let (mut times, mut speeds) = (Vec::new(), vec![reader.gb_s()]);
        for _ in 0..effort.decode {
            times.push(time(&decoder.round(0, usize::MAX, &[])?));
            speeds.push(reader.gb_s());
        }
        drop(reader);
        let bytes = self.bytes(&decoder);
        let shares = times.iter().zip(speeds.windows(2)).map(|(time, speeds)| {
            let speed = speeds[0].max(speeds[1]);
            bytes.total() as f64 / (speed * 1e9) / time.as_secs_f64()
        });
        let share_of_limit = median(shares.collect(), f64::total_cmp);
        let decode = median(times, Duration::cmp);
        let text = decoder.tokens().to_vec();
        say("checking several tokens");
        let verify = self.verify(&text, effort.verify)?;
        say("reading prompts");
        let prefill = self.prefill(effort.prompts, effort.prefill)?;
        say("taking tokens back");
        let rounds = self.rounds(&text, effort.rollback)?;
        let linear = kernels::linear(self, effort.kernels, self.width.bytes(self.counted.head))?;
        Ok(Measured {
            width: self.width,
            decode,
            read_gb_s: median(speeds, f64::total_cmp),
            share_of_limit,
            bytes,
            verify,
            prefill,
            multiply_adds: self.counted.weights - self.counted.head,
            rounds,
            linear,
        })
    }

    /// The time of the head for one row: more bytes than most processors' caches hold.
    pub(crate) fn head(&self) -> Result<Duration> {
        let start = Instant::now();
        self.model.project(&self.hidden)?;
        Ok(start.elapsed())
    }

    fn bytes(&self, decoder: &Decoder) -> Bytes {
        let live = |kind: &str| -> usize {
            let layers = decoder.caches().layers().filter(|layer| layer.kind() == kind);
            layers.map(|layer| layer.footprint().live).sum()
        };
        Bytes {
            weights: self.counted.bytes,
            state: 2 * live("arrays"),
            keys_values: live("kv"),
        }
    }

    /// A decoder that has read a prompt.
    fn decoder(&self) -> Result<Decoder> {
        let mut decoder = self.empty()?;
        read(&mut decoder)?;
        Ok(decoder)
    }

    fn empty(&self) -> Result<Decoder> {
        let caches = self.model.new_caches(&CacheOptions::default())?;
        let vocab = self.model.spec().vocab_size;
        Ok(Decoder::new(self.model.clone(), caches, vocab)?)
    }

    /// Rounds in which every draft is wrong, so that the text is that of plain decoding, a token a round.
    fn verify(&self, text: &[u32], rounds: usize) -> Result<Vec<(usize, Duration)>> {
        let drafter = ScriptedDrafter::along(text, [Draft::WRONG]);
        let most = ROWS[ROWS.len() - 1] - 1;
        let mut decoder = self.empty()?.with_drafter(Box::new(drafter), most)?;
        read(&mut decoder)?;
        let times = try_medians(ROWS.len(), rounds, |v| {
            let round = decoder.round(ROWS[v] - 1, usize::MAX, &[])?;
            ensure!(
                (round.drafted, round.accepted) == (ROWS[v] - 1, 0),
                "a round of {} rows drafted {} tokens and accepted {}",
                ROWS[v],
                round.drafted,
                round.accepted
            );
            Ok(time(&round))
        })?;
        Ok(ROWS.into_iter().zip(times).collect())
    }

    fn prefill(&self, prompts: &[usize], rounds: usize) -> Result<Vec<(usize, Duration)>> {
        let mut caches = self.model.new_caches(&CacheOptions::default())?;
        let tokens: Vec<u32> = (0..2048).collect();
        let times = try_medians(prompts.len(), rounds, |v| {
            caches.reset();
            let start = Instant::now();
            let segment = Segment::new(&tokens[..prompts[v]], &mut caches, Rows::Last);
            self.model.forward(&mut [segment])?;
            anyhow::Ok(start.elapsed())
        })?;
        Ok(prompts.iter().copied().zip(times).collect())
    }

    /// Rounds that accept none, half and all drafts in turn.
    fn rounds(&self, text: &[u32], texts: usize) -> Result<[Rounds; ACCEPTED.len()]> {
        let schedule = ACCEPTED.map(|(_, accepted)| Draft::accept(accepted));
        let drafter = ScriptedDrafter::along(text, schedule);
        let mut decoder = self.empty()?.with_drafter(Box::new(drafter), DRAFTS)?;
        let mut bookkeeping = [const { Vec::new() }; ACCEPTED.len()];
        let mut whole = [const { Vec::new() }; ACCEPTED.len()];
        for _ in 0..texts {
            read(&mut decoder)?;
            let mut cases = (0..ACCEPTED.len()).cycle();
            while decoder.tokens().len() + DRAFTS < text.len() {
                let Some(case) = cases.next() else { break };
                let round = decoder.round(DRAFTS, usize::MAX, &[])?;
                let expected = ACCEPTED[case].1;
                ensure!(
                    round.accepted == expected,
                    "a round was to accept {expected} drafts and accepted {}",
                    round.accepted
                );
                bookkeeping[case].push(round.time.rollback);
                whole[case].push(time(&round));
            }
            decoder.reset();
        }
        let mut cases = bookkeeping.into_iter().zip(whole);
        let rounds = ACCEPTED.map(|_| cases.next().unwrap_or_default());
        Ok(rounds.map(|(bookkeeping, whole)| Rounds {
            bookkeeping: median(bookkeeping, Duration::cmp).as_secs_f64(),
            whole: median(whole, Duration::cmp).as_secs_f64(),
        }))
    }
}

/// Feeds the prompt.
fn read(decoder: &mut Decoder) -> Result<()> {
    let prompt: Vec<u32> = (0..=HELD).collect();
    decoder.prefill(&prompt, &mut |_, _| {})?;
    Ok(())
}

/// The time of a round, its drafter's excepted.
fn time(round: &Round) -> Duration {
    round.time.verify + round.time.sample + round.time.rollback
}

fn median<T: Copy + Default>(mut values: Vec<T>, order: fn(&T, &T) -> Ordering) -> T {
    values.sort_unstable_by(order);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

/// Random weights, and how many there are.
struct Counted {
    source: Seeded,
    width: Width,
    /// Bytes of all tensors, as they are held.
    bytes: usize,
    /// Weights of all matrices.
    weights: usize,
    /// Those of the embedding, which is the head.
    head: usize,
}

impl Source for Counted {
    fn has(&self, name: &str) -> bool {
        self.source.has(name)
    }

    fn take(&mut self, name: &str, shape: &[usize]) -> recant_weights::Result<Tensor> {
        let count: usize = shape.iter().product();
        let small = ["in_proj_a.weight", "in_proj_b.weight"];
        self.bytes += match shape.len() {
            2 if small.iter().any(|end| name.ends_with(end)) => Width::Bf16.bytes(count),
            2 => self.width.bytes(count),
            _ => count * size_of::<f32>(),
        };
        if shape.len() == 2 {
            self.weights += count;
        }
        if name == "embed_tokens.weight" {
            self.head = count;
        }
        self.source.take(name, shape)
    }

    fn discard(&mut self, name: &str) {
        self.source.discard(name);
    }
}

/// Milliseconds, for printing and for scripts.
pub(crate) fn millis(times: &[(usize, Duration)]) -> impl Iterator<Item = (usize, f64)> + '_ {
    times.iter().map(|(key, time)| (*key, ms(*time)))
}
