//! The laws of `Cache`, held against every kind of this crate.

use std::sync::Arc;

use recant_core::candle::{DType, Device, Tensor};
use recant_core::{
    ArraysCache, AttentionLayout, CacheOptions, CacheStack, KvCache, KvType, LayerLayout, Result,
    RotatingKvCache, StackLayout, Window,
};
use recant_testkit::conformance::{self, Options};
use recant_testkit::{Failure, Recurrence, ScriptedModel, Writes};

fn layout(dtype: DType) -> AttentionLayout {
    AttentionLayout {
        kv_heads: 2,
        head_dim: 3,
        dtype,
    }
}

#[test]
fn kv_cache_keeps_the_laws_in_every_type() -> std::result::Result<(), Failure> {
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
        let make = || -> Box<dyn recant_core::AttentionCache> {
            Box::new(KvCache::new(layout(dtype), &Device::Cpu))
        };
        conformance::attention_cache(make, &Options::default())?;
    }
    Ok(())
}

const KV_TYPES: [KvType; 3] = [KvType::Native, KvType::F16, KvType::Bf16];

#[test]
fn caches_that_round_what_they_are_given_keep_the_laws() -> std::result::Result<(), Failure> {
    for kv in KV_TYPES {
        let options = Options {
            exact: kv == KvType::Native,
            ..Options::default()
        };
        let make = || -> Box<dyn recant_core::AttentionCache> {
            Box::new(KvCache::stored_as(layout(DType::F32), kv, &Device::Cpu))
        };
        conformance::attention_cache(make, &options)?;
        let window = Window { window: 8, sink: 2 };
        let options = Options {
            window: Some(window),
            ..options
        };
        let make = || RotatingKvCache::stored_as(layout(DType::F32), kv, window, 4, &Device::Cpu);
        conformance::attention_cache(|| Box::new(make().expect("a window of at least 1")), &options)?;
    }
    Ok(())
}

#[test]
fn kv_cache_keeps_the_laws_across_its_blocks() -> std::result::Result<(), Failure> {
    // A block is 256 rows: the longest text ends in the second.
    for tokens in [255, 257] {
        let options = Options {
            tokens,
            ..Options::default()
        };
        conformance::attention_cache(
            || Box::new(KvCache::new(layout(DType::F32), &Device::Cpu)),
            &options,
        )?;
    }
    Ok(())
}

#[test]
fn rotating_cache_keeps_the_laws_before_at_and_after_the_wrap() -> std::result::Result<(), Failure> {
    for window in [1, 4, 8] {
        for sink in [0, 2, 13] {
            for slack in [0, 4, 16] {
                rotating(Window { window, sink }, slack, 40)?;
            }
        }
    }
    Ok(())
}

#[test]
fn rotating_cache_keeps_the_laws_with_windows_and_sinks_of_several_blocks() -> std::result::Result<(), Failure>
{
    rotating(Window { window: 300, sink: 0 }, 8, 620)?;
    rotating(
        Window {
            window: 20,
            sink: 300,
        },
        8,
        320,
    )
}

fn rotating(window: Window, slack: usize, tokens: usize) -> std::result::Result<(), Failure> {
    let options = Options {
        window: Some(window),
        tokens,
        ..Options::default()
    };
    let make = || RotatingKvCache::new(layout(DType::F32), window, slack, &Device::Cpu);
    conformance::attention_cache(|| Box::new(make().expect("a window of at least 1")), &options)
}

#[test]
fn arrays_cache_keeps_the_laws_with_both_ways_of_writing() -> std::result::Result<(), Failure> {
    for record_limit in [16, 64, 1000] {
        let make = |layout: &recant_core::RecurrentLayout| {
            ArraysCache::new(layout.clone(), record_limit, &Device::Cpu)
        };
        conformance::recurrent_cache(
            |layout| Box::new(make(layout).expect("zeros")),
            &Options::default(),
        )?;
    }
    Ok(())
}

#[test]
fn mixed_stacks_keep_the_laws() -> std::result::Result<(), Failure> {
    let attention = || {
        LayerLayout::Attention(AttentionLayout {
            kv_heads: 1,
            head_dim: 2,
            dtype: DType::F32,
        })
    };
    let recurrent = || LayerLayout::Recurrent(Recurrence::layout());
    for (window, kv) in [None, Some(Window { window: 8, sink: 2 })]
        .into_iter()
        .flat_map(|window| KV_TYPES.map(|kv| (window, kv)))
    {
        let caches = CacheOptions {
            window,
            kv,
            ..CacheOptions::default()
        };
        let layout = Arc::new(StackLayout {
            fingerprint: "mixed".to_owned(),
            layers: vec![recurrent(), attention(), recurrent(), attention()],
            device: Device::Cpu,
        });
        let make = || CacheStack::standard(Arc::clone(&layout), &caches).expect("a stack");
        let options = Options {
            window,
            ..Options::default()
        };
        conformance::cache_stack(make, feed_mixed, &options)?;
    }
    Ok(())
}

fn feed_mixed(stack: &mut CacheStack, tokens: &[u32]) -> Result<Tensor> {
    let mut outputs = Vec::new();
    for (layer, writes) in [(0, Writes::InPlace), (2, Writes::Fresh)] {
        outputs.push(Recurrence::new(writes).feed(stack.recurrent(layer)?, tokens)?);
        let rows = outputs[outputs.len() - 1].narrow(1, 0, 2)?.unsqueeze(1)?;
        stack.attention(layer + 1)?.append(&rows, &rows)?;
    }
    Ok(Tensor::cat(&outputs, 1)?)
}

#[test]
fn scripted_model_keeps_the_laws_on_standard_caches() -> std::result::Result<(), Failure> {
    let model = ScriptedModel::new(1, 32).with_max_positions(2000);
    for window in [
        None,
        Some(Window { window: 8, sink: 0 }),
        Some(Window { window: 4, sink: 2 }),
    ] {
        let caches = CacheOptions {
            window,
            ..CacheOptions::default()
        };
        let options = Options {
            window,
            ..Options::default()
        };
        conformance::language_model(&model, &caches, &options)?;
    }
    Ok(())
}
