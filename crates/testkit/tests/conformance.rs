//! The suites pass what is right, and find what is wrong.

use recant_core::candle::{DType, Device};
use recant_core::{ArraysCache, AttentionLayout, CacheOptions, KvCache, RotatingKvCache, Window};
use recant_testkit::{conformance, conformance::Options, Failure, ScriptedModel};

fn layout() -> AttentionLayout {
    AttentionLayout {
        kv_heads: 2,
        head_dim: 3,
        dtype: DType::F32,
    }
}

#[test]
fn kv_passes() -> Result<(), Failure> {
    conformance::attention_cache(
        || Box::new(KvCache::new(layout(), &Device::Cpu)),
        &Options::default(),
    )
}

#[test]
fn rotating_passes() -> Result<(), Failure> {
    let window = Window { window: 8, sink: 2 };
    let options = Options {
        window: Some(window),
        ..Options::default()
    };
    conformance::attention_cache(
        || match RotatingKvCache::new(layout(), window, 16, &Device::Cpu) {
            Ok(cache) => Box::new(cache),
            Err(error) => panic!("{error}"),
        },
        &options,
    )
}

#[test]
fn arrays_pass() -> Result<(), Failure> {
    conformance::recurrent_cache(
        |layout| match ArraysCache::new(layout.clone(), 64, &Device::Cpu) {
            Ok(cache) => Box::new(cache),
            Err(error) => panic!("{error}"),
        },
        &Options::default(),
    )
}

#[test]
fn scripted_model_passes() -> Result<(), Failure> {
    conformance::language_model(
        &ScriptedModel::new(1, 32),
        &CacheOptions::default(),
        &Options::default(),
    )
}
