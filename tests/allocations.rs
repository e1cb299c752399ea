//! What decoding asks of the allocator once it is warm: a fixed number of requests a layer, none of them larger than a
//! row of activations, and nothing that stays but what the caches say they hold.
//!
//! Everything runs in a pool of one thread and is counted on it. With more threads a leader also asks for a few dozen
//! bytes whenever it calls workers back that had gone.

mod common;

use std::cell::Cell;
use std::sync::Arc;

use common::counting::Counting;
use common::{load, seeded, tiny_of, Result};
use recant::core::{ArraySpec, CacheOptions, LanguageModel, LayerLayout};
use recant::Threads;
use recant_generate::{Decoder, Drafter, ModelDrafter, NgramDrafter};
use serde_json::Value;

/// What was asked of the allocator.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Asked {
    times: usize,
    /// Bytes of the largest request.
    largest: usize,
    /// Bytes given less bytes taken back.
    live: isize,
}

thread_local!(static ASKED: Cell<Asked> = const { Cell::new(Asked { times: 0, largest: 0, live: 0 }) });

/// Runs `task` and says what it asked for on this thread.
fn asked<T>(task: impl FnOnce() -> T) -> (T, Asked) {
    ASKED.set(Asked::default());
    let result = task();
    (result, ASKED.get())
}

fn count(asked: usize, freed: usize) {
    let mut sum = ASKED.get();
    sum.times += usize::from(asked > 0);
    sum.largest = sum.largest.max(asked);
    sum.live += asked as isize - freed as isize;
    ASKED.set(sum);
}

#[global_allocator]
static ALLOCATOR: Counting = Counting(count);

/// Requests of a round of one token, its layers left out: the step's lists, text, checkpoint, embedding, norm, head.
const ROUND: usize = 42;

/// Requests of a further row: its choice.
const ROW: usize = 2;

/// Requests of a Gated DeltaNet layer with a dense MLP.
const LINEAR: usize = 106;

/// Requests of a full attention layer with a dense MLP.
const FULL: usize = 82;

/// What a mixture of experts asks for beyond a dense MLP, apart from its experts.
const MIXTURE: usize = 32;

/// Requests of one expert.
const EXPERT: usize = 22;

/// What a drafter asks for in a round beyond the calls of its model.
const DRAFTER: usize = 16;

/// What a full attention layer asks for beyond its share when it begins a block of its cache.
const BLOCK: usize = 26;

/// Requests of lists that grow with the text, in a round in which they do.
const LISTS: usize = 8;

/// Bytes that a token adds to lists, with the room that a list gives itself.
const LIST_ENTRY: usize = 8;

/// Bytes that a token adds to what a look-up drafter knows, with the room that it gives itself.
const LOOK_UP_ENTRY: usize = 256;

/// What a full attention layer asks for beyond its share where the context is long enough to be split into spans.
const SPANS: usize = 8;

/// Bytes of the partial results that it then holds for a thread, at most, whatever the context.
const PARTIALS: usize = 2 << 20;

/// Positions of a block of keys and values.
const BLOCK_POSITIONS: usize = 256;

/// Rounds before the counting begins: scratch is as large as it gets.
const WARM_UP: usize = 16;

/// A model, and what bounds its requests.
struct Subject {
    name: &'static str,
    model: Arc<dyn LanguageModel>,
    /// The widest row of activations. Rows of logits are not written.
    widest: usize,
    /// Experts of a token, if there is a mixture.
    experts: Option<usize>,
}

impl Subject {
    fn new(name: &'static str, model: Arc<dyn LanguageModel>, config: &Value) -> Self {
        let text = config.get("text_config").unwrap_or(config);
        let get = |name: &str| text[name].as_u64().unwrap_or(0) as usize;
        let (heads, kv_heads, head_dim) = (
            get("num_attention_heads"),
            get("num_key_value_heads"),
            get("head_dim"),
        );
        let keys = get("linear_num_key_heads") * get("linear_key_head_dim");
        let values = get("linear_num_value_heads") * get("linear_value_head_dim");
        let widths = [
            2 * get("intermediate_size"),
            2 * get("shared_expert_intermediate_size"),
            2 * (heads + kv_heads) * head_dim,
            2 * (keys + values + get("linear_num_value_heads")),
            get("num_experts_per_tok") * get("hidden_size"),
            // The convolution's window, which is made anew.
            (get("linear_conv_kernel_dim") - 1) * (2 * keys + values),
        ];
        Self {
            name,
            model,
            widest: widths.into_iter().max().unwrap_or(0),
            experts: text
                .get("num_experts_per_tok")
                .map(|_| get("num_experts_per_tok")),
        }
    }

    fn seeded(name: &'static str, config: &Value) -> Result<Self> {
        Ok(Self::new(name, tiny_of(config)?, config))
    }

    fn demo(name: &'static str) -> Result<Self> {
        let loaded = load(name)?;
        let config = std::fs::read_to_string(loaded.path().join("config.json"))?;
        Ok(Self::new(
            name,
            loaded.model().clone(),
            &serde_json::from_str(&config)?,
        ))
    }

    fn full_layers(&self) -> usize {
        let layers = &self.model.spec().layout.layers;
        let full = |layer: &&LayerLayout| matches!(layer, LayerLayout::Attention(_));
        layers.iter().filter(full).count()
    }

    /// Requests of a call, for up to so many rows.
    fn call(&self, rows: usize) -> usize {
        let (layers, full) = (self.model.spec().layout.layers.len(), self.full_layers());
        let mixture = self
            .experts
            .map_or(0, |experts| MIXTURE + experts * rows * EXPERT);
        ROUND + (rows - 1) * ROW + (layers - full) * LINEAR + full * FULL + layers * mixture
    }

    /// Bytes of the widest row.
    fn row_bytes(&self) -> usize {
        self.widest * size_of::<f32>()
    }

    /// Bytes that all layers' caches hold for so many tokens, of which `recorded` can be taken back.
    fn caches(&self, tokens: usize, recorded: usize) -> usize {
        let positions = tokens.div_ceil(BLOCK_POSITIONS) * BLOCK_POSITIONS;
        let layers = self.model.spec().layout.layers.iter();
        let bytes = layers.map(|layer| match layer {
            LayerLayout::Attention(row) => {
                2 * positions * row.kv_heads * row.head_dim * row.dtype.size_in_bytes()
            }
            LayerLayout::Recurrent(layout) => {
                recorded * layout.records.iter().map(ArraySpec::bytes).sum::<usize>()
            }
        });
        bytes.sum()
    }

    /// Bytes of the largest request that no row of activations explains: keys or values of a block, and less than a cache line
    /// by which they are shifted.
    fn largest_block(&self) -> usize {
        let layers = self.model.spec().layout.layers.iter();
        let bytes = layers.map(|layer| match layer {
            LayerLayout::Attention(row) => {
                BLOCK_POSITIONS * row.kv_heads * row.head_dim * row.dtype.size_in_bytes() + 63
            }
            LayerLayout::Recurrent(_) => 0,
        });
        bytes.max().unwrap_or(0)
    }
}

/// One of each kind.
fn subjects() -> Result<Vec<Subject>> {
    Ok(vec![
        Subject::demo("demo-target")?,
        Subject::demo("demo-draft")?,
        Subject::seeded("dense", &seeded::dense(|_| ()))?,
        Subject::seeded(
            "every second layer full",
            &seeded::dense(|text| text["full_attention_interval"] = 2.into()),
        )?,
        Subject::seeded("mixture", &seeded::moe(|_| ()))?,
        Subject::seeded(
            "mixture, three experts",
            &seeded::moe(|text| text["num_experts_per_tok"] = 3.into()),
        )?,
        Subject::seeded("next", &seeded::next(|_| ()))?,
    ])
}

/// One round of a decoder.
#[derive(Debug, Clone, Copy)]
struct Round {
    asked: Asked,
    tokens: usize,
}

/// Rounds of a decoder after a prompt, from when it is warm.
fn rounds(
    model: &Arc<dyn LanguageModel>,
    drafter: Option<Box<dyn Drafter>>,
    depth: usize,
    prompt: usize,
    count: usize,
) -> Result<Vec<Round>> {
    let vocab = model.spec().vocab_size;
    let caches = model.new_caches(&CacheOptions::default())?;
    let mut decoder = Decoder::new(model.clone(), caches, vocab)?;
    if let Some(drafter) = drafter {
        decoder = decoder.with_drafter(drafter, depth)?;
    }
    let prompt: Vec<u32> = (0..prompt).map(|i| (7 * i % 250) as u32).collect();
    decoder.prefill(&prompt, &mut |_, _| ())?;
    let mut rounds = Vec::with_capacity(count);
    for round in 0..WARM_UP + count {
        let (tokens, asked) = asked(|| {
            decoder
                .round(depth, usize::MAX, &[])
                .map(|round| round.tokens.len())
        });
        if round >= WARM_UP {
            let tokens = tokens?;
            rounds.push(Round { asked, tokens });
        }
    }
    Ok(rounds)
}

/// Runs a test's body on the one thread of a pool.
fn on_one_thread(body: impl FnOnce() -> Result<()> + Send) -> Result<()> {
    Ok(Threads::new(1)?.run(|| body().map_err(|e| e.to_string()))?)
}

#[test]
fn a_token_asks_a_fixed_number_of_times_a_layer() -> Result<()> {
    on_one_thread(|| {
        for subject in subjects()? {
            let rounds = rounds(&subject.model, None, 0, 10, 300)?;
            let steady = rounds.iter().filter(|round| round.asked.live == 0);
            assert!(
                steady.clone().count() >= 290,
                "{}: it grows too often",
                subject.name
            );
            let most = steady.map(|round| round.asked.times).max();
            assert!(
                most <= Some(subject.call(1)),
                "{}: {most:?}, expected {}",
                subject.name,
                subject.call(1)
            );
            let growing = subject.call(1) + subject.full_layers() * BLOCK + LISTS;
            for round in rounds {
                assert!(round.asked.times <= growing, "{}: {round:?}", subject.name);
            }
        }
        Ok(())
    })
}

#[test]
fn neither_context_nor_vocabulary_changes_how_often_a_token_asks() -> Result<()> {
    on_one_thread(|| {
        let usual = |vocab: usize, prompt: usize| -> Result<Option<usize>> {
            let model = tiny_of(&seeded::dense(|text| text["vocab_size"] = vocab.into()))?;
            let rounds = rounds(&model, None, 0, prompt, 100)?;
            let steady = rounds.iter().filter(|round| round.asked.live == 0);
            Ok(steady.map(|round| round.asked.times).max())
        };
        let few = usual(256, 10)?;
        assert!(few.is_some());
        assert_eq!(usual(8192, 10)?, few, "vocabulary");
        assert_eq!(usual(256, 500)?, few, "context");
        // From here on attention works span by span, with lists of spans.
        let long = usual(256, 3000)?;
        assert!(long <= few.map(|few| few + SPANS), "{long:?}, {few:?}");
        Ok(())
    })
}

#[test]
fn no_request_is_larger_than_a_row_of_activations_or_a_block_of_a_cache() -> Result<()> {
    on_one_thread(|| {
        for subject in subjects()? {
            for round in rounds(&subject.model, None, 0, 400, 300)? {
                let bound = match round.asked.live {
                    0 => subject.row_bytes(),
                    _ => subject.row_bytes().max(subject.largest_block()),
                };
                assert!(
                    round.asked.largest <= bound,
                    "{}: {round:?}, expected {bound}",
                    subject.name
                );
            }
            for round in rounds(&subject.model, None, 0, 3000, 10)? {
                assert!(round.asked.largest <= PARTIALS, "{}: {round:?}", subject.name);
            }
        }
        Ok(())
    })
}

#[test]
fn what_stays_after_a_token_is_in_the_caches_or_the_text() -> Result<()> {
    on_one_thread(|| {
        for subject in subjects()? {
            let (prompt, count) = (500, 300);
            let rounds = rounds(&subject.model, None, 0, prompt, count)?;
            let live: isize = rounds.iter().map(|round| round.asked.live).sum();
            let before = prompt + WARM_UP;
            let grown = subject.caches(before + count, 1) - subject.caches(before, 1);
            let lists = count * LIST_ENTRY + subject.full_layers() * 1024;
            assert!(
                live >= 0 && live as usize <= grown + lists,
                "{}: {live} bytes stay, the caches hold {grown} more",
                subject.name
            );
        }
        Ok(())
    })
}

/// Checks rounds of up to `depth` tokens, drafted by a model, or by what follows the text itself.
fn check_speculative(subject: &Subject, draft: Option<&Subject>, depth: usize) -> Result<()> {
    let drafter: Box<dyn Drafter> = match draft {
        Some(draft) => Box::new(ModelDrafter::new(draft.model.clone(), &CacheOptions::default())?),
        None => Box::new(NgramDrafter::new()),
    };
    let (prompt, count) = (10, 150);
    let rounds = rounds(&subject.model, Some(drafter), depth, prompt, count)?;
    let models = [Some(subject), draft].into_iter().flatten();

    let most = subject.call(depth + 1) + draft.map_or(0, |draft| depth * draft.call(2)) + DRAFTER;
    let blocks = models.clone().map(Subject::full_layers).sum::<usize>() * BLOCK;
    let largest = models
        .clone()
        .map(|model| ((depth + 1) * model.row_bytes()).max(model.largest_block()))
        .max();
    for round in &rounds {
        assert!(
            round.asked.times <= most + blocks + LISTS,
            "{}: {round:?}, expected {most}",
            subject.name
        );
        assert!(
            Some(round.asked.largest) <= largest,
            "{}: {round:?}",
            subject.name
        );
    }
    let usual = rounds.iter().filter(|round| round.asked.times <= most).count();
    assert!(usual >= count * 9 / 10, "{}: {usual} usual rounds", subject.name);

    let live: isize = rounds.iter().map(|round| round.asked.live).sum();
    let tokens: usize = rounds.iter().map(|round| round.tokens).sum();
    let last = prompt + WARM_UP * (depth + 1) + tokens;
    let grown: usize = models.map(|model| model.caches(last, depth + 1)).sum();
    let entry = if draft.is_some() {
        LIST_ENTRY
    } else {
        LOOK_UP_ENTRY
    };
    assert!(
        live <= (grown + last * entry) as isize,
        "{}: {live} bytes stay, the caches hold up to {grown}",
        subject.name
    );
    Ok(())
}

#[test]
fn speculation_asks_for_no_more_than_its_calls_do() -> Result<()> {
    on_one_thread(|| {
        let (target, draft) = (Subject::demo("demo-target")?, Subject::demo("demo-draft")?);
        check_speculative(&target, Some(&draft), 4)?;
        check_speculative(&target, None, 4)?;
        for subject in subjects()? {
            check_speculative(&subject, Some(&subject), 3)?;
        }
        Ok(())
    })
}
