//! The grouping law, without tolerance: logits and caches do not depend on how tokens are grouped into calls, on the
//! number of threads, or on the sequences that share a call.

mod common;

use std::sync::Arc;

use common::{bits, feed, folder_or_skip, load, seeded, text_ids, tiny, tiny_of, Result, Rng};
use recant::candle::{DType, Tensor};
use recant::core::{
    largest, Cache, CacheOptions, Hidden, KvType, LanguageModel, Output, Readout, Rows, Segment,
    SegmentOutput, Snapshot, Window,
};
use recant::{ActivationPrecision, GroupFormat, LoadOptions, Threads};
use recant_weights::Source;
use serde_json::{json, Value};

const TOKENS: usize = 200;

#[test]
fn demo_target_keeps_the_law() -> Result<()> {
    let model = load("demo-target")?.model().clone();
    holds(&*model, &text_ids(TOKENS)?, &CacheOptions::default(), 6)
}

#[test]
fn demo_draft_with_one_value_head_a_key_head_keeps_the_law() -> Result<()> {
    let model = load("demo-draft")?.model().clone();
    holds(&*model, &text_ids(TOKENS)?, &CacheOptions::default(), 3)
}

#[test]
fn two_three_and_four_value_heads_a_key_head_keep_the_law() -> Result<()> {
    for heads in [4, 6, 8] {
        let model = tiny(|text| text["linear_num_value_heads"] = json!(heads))?;
        holds(&*model, &random_ids(TOKENS), &CacheOptions::default(), 6)?;
    }
    Ok(())
}

#[test]
fn sizes_that_fill_no_vector_keep_the_law() -> Result<()> {
    let model = tiny(|text| {
        text["hidden_size"] = json!(52);
        text["intermediate_size"] = json!(75);
        text["head_dim"] = json!(20);
        text["rope_parameters"]["partial_rotary_factor"] = json!(0.5);
        text["linear_key_head_dim"] = json!(13);
        text["linear_value_head_dim"] = json!(19);
        text["vocab_size"] = json!(251);
        text["tie_word_embeddings"] = json!(true);
    })?;
    let ids: Vec<u32> = random_ids(TOKENS).into_iter().map(|id| id % 251).collect();
    holds(&*model, &ids, &CacheOptions::default(), 6)
}

#[test]
fn sliding_windows_keep_the_law() -> Result<()> {
    let model = tiny(|_| {})?;
    for sink in [0, 2] {
        let options = CacheOptions {
            window: Some(Window { window: 8, sink }),
            ..CacheOptions::default()
        };
        holds(&*model, &random_ids(TOKENS), &options, 6)?;
    }
    Ok(())
}

/// A row that is rounded when it is kept must be read rounded by its own token too: else it would differ for the rows that
/// come in the same call and those that come later.
#[test]
fn keys_and_values_in_sixteen_bits_keep_the_law() -> Result<()> {
    let (tiny, demo) = (tiny(|_| {})?, load("demo-target")?.model().clone());
    for kv in [KvType::F16, KvType::Bf16] {
        for window in [None, Some(Window { window: 8, sink: 2 })] {
            let options = CacheOptions {
                kv,
                window,
                ..CacheOptions::default()
            };
            holds(&*tiny, &random_ids(TOKENS), &options, 4)?;
        }
        let options = CacheOptions {
            kv,
            ..CacheOptions::default()
        };
        holds(&*demo, &text_ids(TOKENS)?, &options, 3)?;
    }
    Ok(())
}

#[test]
fn keys_and_values_in_sixteen_bits_take_half_the_bytes_and_change_what_is_read() -> Result<()> {
    let model = tiny(|_| {})?;
    let text = random_ids(40);
    let fed = |kv| -> Result<(Vec<u32>, usize)> {
        let options = CacheOptions {
            kv,
            ..CacheOptions::default()
        };
        let mut caches = model.new_caches(&options)?;
        let logits = feed(&*model, &mut caches, &text)?;
        let attention = caches.layers().filter(|cache| cache.kind() == "kv");
        Ok((logits, attention.map(|cache| cache.footprint().live).sum()))
    };
    let (exact, bytes) = fed(KvType::Native)?;
    assert_eq!(fed(KvType::Native)?, (exact.clone(), bytes));
    let mut seen = vec![exact];
    for kv in [KvType::F16, KvType::Bf16] {
        let (logits, half) = fed(kv)?;
        assert_eq!(half * 2, bytes);
        assert!(!seen.contains(&logits), "{kv:?} rounds nothing");
        seen.push(logits);
    }
    Ok(())
}

#[test]
fn trained_mixtures_of_experts_keep_the_law() -> Result<()> {
    for name in ["moe", "next"] {
        if folder_or_skip("the grouping law of a trained mixture", name).is_some() {
            let model = load(name)?.model().clone();
            holds(&*model, &text_ids(TOKENS)?, &CacheOptions::default(), 3)?;
        }
    }
    Ok(())
}

#[test]
fn mixtures_of_more_experts_than_rows_and_of_all_experts_keep_the_law() -> Result<()> {
    for (experts, top_k, heads) in [(96, 3, 4), (5, 5, 6), (1, 1, 2)] {
        for with in [seeded::moe, seeded::next] as [fn(Edit) -> Value; 2] {
            let model = tiny_of(&with(Box::new(move |text| {
                text["num_experts"] = json!(experts);
                text["num_experts_per_tok"] = json!(top_k);
                text["linear_num_value_heads"] = json!(heads);
            })))?;
            holds(&*model, &random_ids(TOKENS), &CacheOptions::default(), 2)?;
        }
    }
    Ok(())
}

#[test]
fn mixtures_of_sizes_that_fill_no_vector_and_layers_without_experts_keep_the_law() -> Result<()> {
    let model = tiny_of(&seeded::next(|text| {
        text["hidden_size"] = json!(52);
        text["moe_intermediate_size"] = json!(13);
        text["shared_expert_intermediate_size"] = json!(7);
        text["mlp_only_layers"] = json!([1]);
        text["num_experts_per_tok"] = json!(3);
        text["norm_topk_prob"] = json!(false);
    }))?;
    holds(&*model, &random_ids(TOKENS), &CacheOptions::default(), 4)
}

#[test]
fn weights_in_groups_keep_the_law() -> Result<()> {
    let configs = [seeded::dense(|_| {}), seeded::moe(|_| {}), seeded::next(|_| {})];
    for (bits, group, affine, scales) in [
        (8, 32, false, DType::F16),
        (8, 64, true, DType::BF16),
        (4, 32, false, DType::F16),
        (4, 64, true, DType::F32),
    ] {
        for activations in [ActivationPrecision::Int8, ActivationPrecision::Full] {
            let options = LoadOptions {
                quantize: Some(GroupFormat {
                    bits,
                    group,
                    affine,
                    scales,
                }),
                activations,
                ..LoadOptions::default()
            };
            for config in &configs {
                let mut source = seeded::Seeded {
                    seed: 9,
                    dtype: DType::BF16,
                };
                let model = seeded::model_of(config, "groups", &mut source, &options)?;
                holds(&model, &random_ids(TOKENS), &CacheOptions::default(), 2)?;
            }
        }
    }
    Ok(())
}

#[test]
fn the_largest_logits_are_those_of_all_logits() -> Result<()> {
    let model = tiny(|_| {})?;
    let text = random_ids(9);
    let run = |readouts: [Readout; 3], rows: [Rows; 3]| -> Result<Output> {
        let mut stacks = (0..3)
            .map(|_| Ok(model.new_caches(&CacheOptions::default())?))
            .collect::<Result<Vec<_>>>()?;
        let mut batch: Vec<_> = stacks
            .iter_mut()
            .zip([&text[..4], &text[..9], &text[2..5]])
            .map(|(caches, tokens)| Segment::new(tokens, caches, Rows::All))
            .collect();
        for (segment, (readout, rows)) in batch.iter_mut().zip(readouts.into_iter().zip(rows)) {
            (segment.readout, segment.logits) = (readout, rows);
        }
        Ok(model.forward(&mut batch)?)
    };
    let top = |count| Readout::Largest { count, among: 200 };
    for rows in [
        [Rows::All; 3],
        [Rows::Last, Rows::None, Rows::All],
        [Rows::None; 3],
    ] {
        let all = run([Readout::All; 3], rows)?;
        for readouts in [
            [top(1); 3],
            [top(3), top(1), top(1)],
            [Readout::All, top(2), Readout::All],
        ] {
            let got = run(readouts, rows)?;
            for ((got, all), readout) in got.segments.iter().zip(&all.segments).zip(readouts) {
                let (Readout::Largest { count, among }, Some(logits)) = (readout, &all.logits) else {
                    assert!(got.largest.is_none());
                    let bits_of = |output: &SegmentOutput| output.logits.as_ref().map(bits).transpose();
                    assert_eq!(bits_of(got)?, bits_of(all)?.filter(|_| readout == Readout::All));
                    continue;
                };
                assert!(got.logits.is_none());
                assert_eq!(got.largest(count, among)?, largest(logits, count, among)?);
            }
        }
    }
    Ok(())
}

/// A router without preferences: all experts are equally probable, and every row goes to the first ones.
#[test]
fn a_mixture_whose_rows_all_go_to_the_same_experts_keeps_the_law() -> Result<()> {
    struct NoPreference(seeded::Seeded);
    impl Source for NoPreference {
        fn has(&self, name: &str) -> bool {
            self.0.has(name)
        }
        fn take(&mut self, name: &str, shape: &[usize]) -> recant_weights::Result<Tensor> {
            let tensor = self.0.take(name, shape)?;
            Ok(if name.ends_with("mlp.gate.weight") {
                tensor.zeros_like().unwrap_or(tensor)
            } else {
                tensor
            })
        }
        fn discard(&mut self, _name: &str) {}
    }
    let mut source = NoPreference(seeded::Seeded {
        seed: 7,
        dtype: DType::BF16,
    });
    let model = seeded::model_of(
        &seeded::moe(|_| {}),
        "no preference",
        &mut source,
        &LoadOptions::default(),
    )?;
    holds(&model, &random_ids(TOKENS), &CacheOptions::default(), 4)
}

type Edit = Box<dyn FnOnce(&mut Value)>;

fn random_ids(n: usize) -> Vec<u32> {
    let mut rng = Rng(11);
    (0..n).map(|_| rng.below(256) as u32).collect()
}

/// Feeds `text` one token at a time on one thread, then in `partitions` random groupings, each on one and two threads,
/// alone and with two neighbours, and compares every bit.
fn holds(model: &dyn LanguageModel, text: &[u32], options: &CacheOptions, partitions: usize) -> Result<()> {
    let one = Threads::new(1)?;
    let two = Threads::new(2)?;
    let singles = vec![1; text.len()];
    let (logits, snapshot) = one.run(|| alone(model, text, &singles, options).map_err(|e| e.to_string()))?;
    let mut rng = Rng(3);
    for round in 0..partitions {
        let pieces = rng.partition(text.len(), 64);
        for (threads, neighbours) in [(&one, false), (&two, false), (&one, true), (&two, true)] {
            let seed = rng.next();
            let (got, caches) = threads.run(|| {
                if neighbours {
                    with_neighbours(model, text, &pieces, options, seed)
                } else {
                    alone(model, text, &pieces, options)
                }
                .map_err(|e| e.to_string())
            })?;
            let what = format!(
                "partition {round} {pieces:?}, {} threads, neighbours: {neighbours}",
                threads.count()
            );
            let width = logits.len() / text.len();
            if let Some(at) = logits.iter().zip(&got).position(|(a, b)| a != b) {
                return Err(format!(
                    "{what}: logits differ at token {} entry {}",
                    at / width,
                    at % width
                )
                .into());
            }
            assert_eq!(logits.len(), got.len(), "{what}");
            if let Some(difference) = snapshot.difference(&caches) {
                return Err(format!("{what}: caches differ: {difference}").into());
            }
        }
    }
    Ok(())
}

type Fed = (Vec<u32>, Snapshot);

fn alone(model: &dyn LanguageModel, text: &[u32], pieces: &[usize], options: &CacheOptions) -> Result<Fed> {
    let mut caches = model.new_caches(options)?;
    let mut logits = Vec::new();
    let mut rest = text;
    for &piece in pieces {
        let (tokens, after) = rest.split_at(piece);
        logits.extend(feed(model, &mut caches, tokens)?);
        rest = after;
    }
    Ok((logits, caches.snapshot()?))
}

/// The same with a sequence before and one behind in every call, of random length and kind of output, one of them
/// recording.
fn with_neighbours(
    model: &dyn LanguageModel,
    text: &[u32],
    pieces: &[usize],
    options: &CacheOptions,
    seed: u64,
) -> Result<Fed> {
    let mut rng = Rng(seed);
    let vocab = model.spec().vocab_size;
    let mut caches = model.new_caches(options)?;
    let (mut before, mut behind) = (model.new_caches(options)?, model.new_caches(options)?);
    let mut logits = Vec::new();
    let mut rest = text;
    for &piece in pieces {
        let (tokens, after) = rest.split_at(piece);
        let mut noise = |most: usize| -> Vec<u32> {
            let count = 1 + rng.below(most);
            (0..count).map(|_| rng.below(vocab) as u32).collect()
        };
        let (a, b) = (noise(9), noise(5));
        let checkpoint = behind.checkpoint()?;
        let output = model.forward(&mut [
            Segment::new(&a, &mut before, Rows::Last),
            Segment::new(tokens, &mut caches, Rows::All),
            Segment::new(&b, &mut behind, Rows::None),
        ])?;
        behind.commit(checkpoint);
        assert!(output.segments[2].logits.is_none());
        assert_eq!(output.segments[0].logits()?.dims(), [1, vocab]);
        logits.extend(bits(output.segments[1].logits()?)?);
        rest = after;
    }
    Ok((logits, caches.snapshot()?))
}

#[test]
fn a_segment_gives_the_rows_it_was_asked_for() -> Result<()> {
    let model = tiny(|_| {})?;
    let text = random_ids(9);
    let mut caches = model.new_caches(&CacheOptions::default())?;
    let all = feed(&*model, &mut caches, &text)?;
    for (rows, want) in [(Rows::Last, &all[all.len() - 256..]), (Rows::All, &all[..])] {
        for hidden in [false, true] {
            let mut caches = model.new_caches(&CacheOptions::default())?;
            let mut segment = Segment::new(&text, &mut caches, rows);
            segment.hidden = hidden.then_some(Hidden::PostNorm);
            let output = model.forward(&mut [segment])?;
            let output = &output.segments[0];
            assert_eq!(bits(output.logits()?)?, want);
            assert_eq!(
                output.hidden.as_ref().map(|h| h.dims().to_vec()),
                hidden.then(|| vec![9, 64])
            );
        }
    }
    Ok(())
}

#[test]
fn c108_c112_sequences_join_at_any_length_and_stay_themselves() -> Result<()> {
    let model: Arc<dyn LanguageModel> = tiny(|_| {})?;
    let text = random_ids(30);
    let (logits, snapshot) = alone(&*model, &text, &[13, 17], &CacheOptions::default())?;
    let mut old = model.new_caches(&CacheOptions::default())?;
    let mut fresh = model.new_caches(&CacheOptions::default())?;
    feed(&*model, &mut old, &text[..13])?;
    let output = model.forward(&mut [
        Segment::new(&text[13..], &mut old, Rows::All),
        Segment::new(&text, &mut fresh, Rows::All),
    ])?;
    assert_eq!(bits(output.segments[0].logits()?)?, logits[13 * 256..]);
    assert_eq!(bits(output.segments[1].logits()?)?, logits);
    assert_eq!(snapshot.difference(&old.snapshot()?), None);
    assert_eq!(snapshot.difference(&fresh.snapshot()?), None);
    Ok(())
}
