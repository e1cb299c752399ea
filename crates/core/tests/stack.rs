//! All layers of a model together: what is refused, and that a refusal leaves all as they were.

use std::sync::Arc;

use recant_core::candle::{DType, Device, Tensor};
use recant_core::{
    ArraysCache, AttentionLayout, Cache, CacheOptions, CacheStack, Error, KvCache, LanguageModel, LayerCache,
    LayerLayout, Result, Rows, Segment, StackLayout, Window,
};
use recant_testkit::{Fault, Harm, Place, Recurrence, ScriptedModel, Writes};

const KV: AttentionLayout = AttentionLayout {
    kv_heads: 1,
    head_dim: 2,
    dtype: DType::F32,
};

fn layout(layers: Vec<LayerLayout>) -> Arc<StackLayout> {
    Arc::new(StackLayout {
        fingerprint: "a model".to_owned(),
        layers,
        device: Device::Cpu,
    })
}

/// Attention first: whatever changes layers in order would have changed it before the recurrent layer refuses.
fn mixed() -> Arc<StackLayout> {
    layout(vec![
        LayerLayout::Attention(KV),
        LayerLayout::Recurrent(Recurrence::layout()),
        LayerLayout::Attention(KV),
    ])
}

fn feed(stack: &mut CacheStack, tokens: &[u32]) -> Result<()> {
    let rows = Tensor::ones((tokens.len(), 1, 2), DType::F32, &Device::Cpu)?;
    stack.attention(0)?.append(&rows, &rows)?;
    Recurrence::new(Writes::Fresh).feed(stack.recurrent(1)?, tokens)?;
    stack.attention(2)?.append(&rows, &rows)
}

fn lengths(stack: &CacheStack) -> Vec<usize> {
    stack.layers().map(|cache| cache.len()).collect()
}

#[test]
fn trim_refuses_whole_and_names_the_layer_that_cannot() -> Result<()> {
    let mut stack = CacheStack::standard(mixed(), &CacheOptions::default())?;
    feed(&mut stack, &[1, 2, 3, 4, 5])?;
    let before = stack.snapshot()?;
    let refusal = stack.trim(2);
    let Err(Error::Layer {
        layer: 1,
        kind,
        source,
    }) = &refusal
    else {
        panic!("{refusal:?}");
    };
    assert_eq!(kind, "arrays");
    assert!(matches!(
        **source,
        Error::Trim {
            asked: 2,
            len: 5,
            trimmable: 0,
            ..
        }
    ));
    assert_eq!(
        refusal.map_err(|e| e.to_string()),
        Err("layer 1 (arrays): cannot trim 2 tokens: the arrays holds 5 and can give back 0; open a checkpoint \
             before feeding tokens that may have to be taken back"
            .to_owned())
    );
    assert_eq!(lengths(&stack), [5, 5, 5]);
    assert_eq!(stack.snapshot()?.difference(&before), None);
    Ok(())
}

#[test]
fn c003_c004_a_prefix_is_not_cut_free_where_a_layer_cannot_follow() -> Result<()> {
    let mut stack = CacheStack::standard(mixed(), &CacheOptions::default())?;
    feed(&mut stack, &[3; 20])?;
    assert_eq!(stack.trimmable(), 0);
    assert!(stack.trim(4).is_err());
    let open = stack.checkpoint()?;
    feed(&mut stack, &[1, 2, 3, 4])?;
    assert_eq!(stack.trimmable(), 4);
    stack.trim(4)?;
    feed(&mut stack, &[9; 4])?;
    stack.commit(open);
    let mut cold = CacheStack::standard(mixed(), &CacheOptions::default())?;
    feed(&mut cold, &[3; 20])?;
    feed(&mut cold, &[9; 4])?;
    assert_eq!(stack.snapshot()?.difference(&cold.snapshot()?), None);
    Ok(())
}

#[test]
fn c005_a_wrapped_layer_refuses_for_all_and_is_named() -> Result<()> {
    let options = CacheOptions {
        window: Some(Window { window: 8, sink: 0 }),
        record_limit: 4,
        ..CacheOptions::default()
    };
    let layers = vec![LayerLayout::Attention(KV), LayerLayout::Attention(KV)];
    let full = LayerCache::Attention(Box::new(KvCache::new(KV, &Device::Cpu)));
    let rotating = LayerCache::standard(&layers[1], &options, &Device::Cpu)?;
    let mut stack = CacheStack::new(layout(layers), vec![full, rotating])?;
    let rows = Tensor::ones((1, 1, 2), DType::F32, &Device::Cpu)?;
    for _ in 0..60 {
        stack.attention(0)?.append(&rows, &rows)?;
        stack.attention(1)?.append(&rows, &rows)?;
    }
    let refusal = stack.trim(50);
    assert!(
        matches!(&refusal, Err(Error::Layer { layer: 1, kind, .. }) if kind == "rotating-kv"),
        "{refusal:?}"
    );
    assert_eq!(lengths(&stack), [60, 60]);
    stack.trim(4)?;
    assert_eq!(lengths(&stack), [56, 56]);
    Ok(())
}

#[test]
fn c025_caches_of_the_wrong_number_kind_or_shape_are_refused_by_layer() {
    let kv = || LayerCache::Attention(Box::new(KvCache::new(KV, &Device::Cpu)));
    let arrays = || {
        let cache = ArraysCache::new(Recurrence::layout(), 8, &Device::Cpu).expect("zeros");
        LayerCache::Recurrent(Box::new(cache))
    };
    let wide = LayerCache::Attention(Box::new(KvCache::new(
        AttentionLayout { kv_heads: 2, ..KV },
        &Device::Cpu,
    )));
    let refusal = |layers| match CacheStack::new(mixed(), layers) {
        Ok(_) => "none".to_owned(),
        Err(error) => error.to_string(),
    };
    assert_eq!(
        refusal(vec![kv(), kv(), kv()]),
        "layer 1 (kv): the layer's cache: expected recurrent cache, found attention cache `kv`"
    );
    assert_eq!(
        refusal(vec![arrays(), arrays(), kv()]),
        "layer 0 (arrays): the layer's cache: expected attention cache, found recurrent cache `arrays`"
    );
    assert_eq!(
        refusal(vec![kv(), arrays()]),
        "caches of a model: expected 3, found 2"
    );
    assert_eq!(refusal(Vec::new()), "caches of a model: expected 3, found 0");
    let shape = refusal(vec![kv(), arrays(), wide]);
    assert!(
        shape.starts_with("layer 2 (kv): the layer's cache: expected") && shape.contains("kv_heads: 2"),
        "{shape}"
    );
    let mut used = ArraysCache::new(Recurrence::layout(), 8, &Device::Cpu).expect("zeros");
    Recurrence::new(Writes::Fresh)
        .feed(&mut used, &[1])
        .expect("a token");
    assert_eq!(
        refusal(vec![kv(), LayerCache::Recurrent(Box::new(used)), kv()]),
        "layer 1 (arrays): tokens in a new stack's cache: expected 0, found 1"
    );
}

#[test]
fn layers_are_handed_out_by_kind() -> Result<()> {
    let mut stack = CacheStack::standard(mixed(), &CacheOptions::default())?;
    for (error, says) in [
        (
            stack.attention(1).err(),
            "cache of layer 1: expected attention, found arrays",
        ),
        (
            stack.recurrent(0).err(),
            "cache of layer 0: expected recurrent, found kv",
        ),
        (
            stack.recurrent(3).err(),
            "cache of layer 3: expected recurrent, found no such layer",
        ),
    ] {
        assert_eq!(error.map(|e| e.to_string()).as_deref(), Some(says));
    }
    Ok(())
}

#[test]
fn a_stack_of_another_model_is_refused_before_anything_changes() -> Result<()> {
    let (one, other) = (ScriptedModel::new(1, 16), ScriptedModel::new(2, 16));
    let mut own = one.new_caches(&CacheOptions::default())?;
    let mut foreign = other.new_caches(&CacheOptions::default())?;
    other.forward(&mut [Segment::new(&[1, 2], &mut foreign, Rows::None)])?;
    let before = foreign.snapshot()?;
    let mut batch = [
        Segment::new(&[1], &mut own, Rows::Last),
        Segment::new(&[1], &mut foreign, Rows::Last),
    ];
    let refusal = one.forward(&mut batch).err().map(|e| e.to_string());
    assert_eq!(
        refusal.as_deref(),
        Some("the model that the caches were made for: expected scripted-1-16, found scripted-2-16")
    );
    assert!(own.is_empty());
    assert_eq!(foreign.snapshot()?.difference(&before), None);
    Ok(())
}

#[test]
fn a_stack_of_another_layout_is_refused_though_the_fingerprint_is_equal() -> Result<()> {
    let stack = CacheStack::standard(mixed(), &CacheOptions::default())?;
    stack.belongs_to(&mixed())?;
    let refusal = stack.belongs_to(&layout(vec![LayerLayout::Attention(KV)]));
    assert!(
        matches!(&refusal, Err(Error::Mismatch { what, .. }) if what == "layout of the caches"),
        "{refusal:?}"
    );
    Ok(())
}

#[test]
fn an_uneven_stack_says_so_until_it_is_reset_or_loaded() -> Result<()> {
    let fault = Fault {
        forward: 1,
        place: Place::Middle,
        harm: Harm::Error,
    };
    for load in [false, true] {
        let model = ScriptedModel::new(1, 16).with_fault(fault);
        let mut stack = model.new_caches(&CacheOptions::default())?;
        model.forward(&mut [Segment::new(&[1, 2], &mut stack, Rows::None)])?;
        let good = stack.snapshot()?;
        let failed = model.forward(&mut [Segment::new(&[3], &mut stack, Rows::None)]);
        assert!(matches!(failed, Err(Error::Other(_))));

        let uneven = |what: &str, result: Result<()>| {
            assert!(
                matches!(
                    result,
                    Err(Error::Uneven {
                        first: 3,
                        layer: 1,
                        len: 2
                    })
                ),
                "{what}: {result:?}"
            );
        };
        uneven("check_even", stack.check_even());
        uneven("trim", stack.trim(0));
        uneven("checkpoint", stack.checkpoint().map(drop));
        uneven("snapshot", stack.snapshot().map(drop));
        uneven("admit", stack.admit(1));
        let again = model.forward(&mut [Segment::new(&[3], &mut stack, Rows::None)]);
        uneven("forward", again.map(drop));
        assert_eq!(stack.trimmable(), 0);
        if load {
            stack.load(&good)?;
        } else {
            stack.reset();
            model.forward(&mut [Segment::new(&[1, 2], &mut stack, Rows::None)])?;
        }
        assert_eq!(stack.snapshot()?.difference(&good), None);
    }
    Ok(())
}

#[test]
fn a_checkpoint_that_one_layer_refuses_is_open_in_none() -> Result<()> {
    let arrays = ArraysCache::new(Recurrence::layout(), 8, &Device::Cpu)?;
    let mut second = ArraysCache::new(Recurrence::layout(), 8, &Device::Cpu)?;
    // Somebody holds a checkpoint of the second layer's cache already.
    let _held = second.checkpoint()?;
    let layers = vec![LayerLayout::Recurrent(Recurrence::layout()); 2];
    let caches = vec![
        LayerCache::Recurrent(Box::new(arrays)),
        LayerCache::Recurrent(Box::new(second)),
    ];
    let mut stack = CacheStack::new(layout(layers), caches)?;
    let refusal = stack.checkpoint();
    assert!(
        matches!(&refusal, Err(Error::Layer { layer: 1, source, .. }) if matches!(**source, Error::Checkpoint(_))),
        "{refusal:?}"
    );
    // The first layer does not record, so its checkpoint is not open.
    assert!(!stack.recurrent(0)?.begin(1)?.recording);
    Ok(())
}

#[test]
fn c024_c015_a_used_session_starts_anew_after_reset() -> Result<()> {
    let model = ScriptedModel::new(4, 16);
    let mut stack = model.new_caches(&CacheOptions::default())?;
    let prompt: Vec<u32> = (0..40).map(|i| (7 * i + 3) % 16).collect();
    let mut logits = Vec::new();
    for _ in 0..3 {
        stack.reset();
        let output = model.forward(&mut [Segment::new(&prompt, &mut stack, Rows::Last)])?;
        logits.push(output.segments[0].logits()?.to_vec2::<f32>()?);
        model.forward(&mut [Segment::new(&[1, 2, 3], &mut stack, Rows::None)])?;
    }
    assert_eq!(logits[0], logits[1]);
    assert_eq!(logits[0], logits[2]);
    Ok(())
}

#[test]
fn c111_c112_neighbours_of_other_lengths_and_newcomers_change_nothing() -> Result<()> {
    let model = ScriptedModel::new(5, 16);
    let texts: [Vec<u32>; 3] = [vec![1; 5], (0..13).collect(), vec![7, 8]];
    let alone = |text: &[u32]| -> Result<Vec<Vec<f32>>> {
        let mut stack = model.new_caches(&CacheOptions::default())?;
        let output = model.forward(&mut [Segment::new(text, &mut stack, Rows::All)])?;
        Ok(output.segments[0].logits()?.to_vec2()?)
    };
    let mut stacks = Vec::new();
    for _ in &texts {
        stacks.push(model.new_caches(&CacheOptions::default())?);
    }
    let mut found: [Vec<Vec<f32>>; 3] = Default::default();
    // Chunks of 4: the first text leaves after two calls, and the third joins at the second.
    for call in 0..4 {
        let mut batch = Vec::new();
        let mut members = Vec::new();
        for (index, (text, stack)) in texts.iter().zip(&mut stacks).enumerate() {
            let Some(turn) = usize::checked_sub(call, usize::from(index == 2)) else {
                continue;
            };
            if let Some(chunk) = text.chunks(4).nth(turn) {
                batch.push(Segment::new(chunk, stack, Rows::All));
                members.push(index);
            }
        }
        let output = model.forward(&mut batch)?;
        for (index, segment) in members.into_iter().zip(&output.segments) {
            found[index].extend(segment.logits()?.to_vec2()?);
        }
    }
    for (text, found) in texts.iter().zip(&found) {
        assert_eq!(&alone(text)?, found);
    }
    Ok(())
}
