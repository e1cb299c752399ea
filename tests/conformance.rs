//! Real models, the model drafter and the example's cache, held against the suites that `recant-testkit` offers everyone.

mod common;
#[allow(dead_code, unreachable_pub)]
#[path = "../examples/custom_cache.rs"]
mod custom_cache;

use std::sync::Arc;

use common::{load, seeded, tiny, tiny_of, Result};
use recant::candle::{DType, Device};
use recant::core::{AttentionLayout, CacheOptions, KvType, Window};
use recant::generate::{CombinedDrafter, DraftVocabulary, Drafter, ModelDrafter, NgramDrafter};
use recant_testkit::conformance::{self, Options};

#[test]
fn the_cache_of_the_example_keeps_the_laws() {
    let layout = AttentionLayout {
        kv_heads: 2,
        head_dim: 6,
        dtype: DType::F32,
    };
    let options = Options {
        tokens: 70,
        exact: false,
        ..Options::default()
    };
    let make = || -> Box<dyn recant::core::AttentionCache> {
        match custom_cache::HalfKvCache::new(layout.clone(), &Device::Cpu) {
            Ok(cache) => Box::new(cache),
            Err(error) => panic!("{error}"),
        }
    };
    conformance::assert_attention_cache(make, &options);
}

#[test]
fn the_demo_pair_keeps_the_laws_of_language_models() -> Result<()> {
    for name in ["demo-target", "demo-draft"] {
        let model = load(name)?.model().clone();
        let options = Options {
            tokens: 8,
            ..Options::default()
        };
        conformance::language_model(&*model, &CacheOptions::default(), &options)?;
    }
    Ok(())
}

#[test]
fn mixtures_of_experts_keep_the_laws_of_language_models() -> Result<()> {
    for config in [seeded::moe(|_| {}), seeded::next(|_| {})] {
        let options = Options {
            tokens: 8,
            ..Options::default()
        };
        conformance::language_model(&*tiny_of(&config)?, &CacheOptions::default(), &options)?;
    }
    Ok(())
}

#[test]
fn tiny_models_keep_the_laws_with_and_without_a_window_and_in_sixteen_bits() -> Result<()> {
    let model = tiny(|_| {})?;
    for (window, kv) in [
        (None, KvType::Native),
        (None, KvType::F16),
        (Some(Window { window: 8, sink: 2 }), KvType::Native),
        (Some(Window { window: 8, sink: 2 }), KvType::Bf16),
    ] {
        let caches = CacheOptions {
            window,
            kv,
            ..CacheOptions::default()
        };
        conformance::language_model(&*model, &caches, &Options::default())?;
    }
    Ok(())
}

#[test]
fn drafters_propose_by_the_text_alone() -> Result<()> {
    let (target, draft) = (
        tiny(|_| {})?,
        tiny(|text| text["hidden_size"] = serde_json::json!(48))?,
    );
    let model = || match ModelDrafter::new(Arc::clone(&draft), &CacheOptions::default()) {
        Ok(drafter) => drafter,
        Err(error) => panic!("{error}"),
    };
    let options = Options::default();
    conformance::drafter(|| Box::new(model()), &*target, &options)?;
    let few = || DraftVocabulary::first(20);
    conformance::drafter(|| Box::new(model().with_vocabulary(few())), &*target, &options)?;
    // Ends of one token, since texts of the suite are short.
    let ngram = || NgramDrafter::new().with_least(1);
    conformance::drafter(|| Box::new(ngram()), &*target, &options)?;
    let combined = || -> Box<dyn Drafter> { Box::new(CombinedDrafter::new(ngram(), Box::new(model()))) };
    conformance::drafter(combined, &*target, &options)?;
    Ok(())
}
