//! Two blocks that share their first `m` tokens and differ after leave, trimmed to `m`, identical bytes in every cache and
//! identical next logits: what was fed and taken back leaves no trace.

mod common;

use common::{assert_same, feed, folder_or_skip, load, seeded, text_ids, tiny, tiny_of, Result, Rng};
use recant::core::{CacheOptions, CacheStack, LanguageModel, Transaction, Window};

/// How a block is fed.
#[derive(Debug, Clone, Copy)]
enum Steps {
    OneCall,
    OneToken,
    Halves,
}

fn feed_block(model: &dyn LanguageModel, caches: &mut CacheStack, block: &[u32], steps: Steps) -> Result<()> {
    let size = match steps {
        Steps::OneCall => block.len(),
        Steps::OneToken => 1,
        Steps::Halves => block.len().div_ceil(2),
    };
    for piece in block.chunks(size.max(1)) {
        feed(model, caches, piece)?;
    }
    Ok(())
}

/// For every block size and every `m`: the block, trimmed to `m` in a transaction, against one with another
/// tail, and against a cache that was only ever fed the `m` tokens.
fn no_trace(
    model: &dyn LanguageModel,
    options: &CacheOptions,
    prefixes: &[usize],
    sizes: impl Iterator<Item = usize> + Clone,
    all_steps: &[Steps],
) -> Result<()> {
    let vocab = model.spec().vocab_size;
    let mut rng = Rng(5);
    let mut ids = |n: usize| -> Vec<u32> { (0..n).map(|_| rng.below(vocab) as u32).collect() };
    for &prefix in prefixes {
        let (start, probe) = (ids(prefix), ids(3));
        for size in sizes.clone() {
            let (block, other) = (ids(size), ids(size));
            for m in 0..=size {
                let mut plain = model.new_caches(options)?;
                feed_block(model, &mut plain, &start, Steps::OneCall)?;
                feed_block(model, &mut plain, &block[..m], Steps::OneToken)?;
                let snapshot = plain.duplicate()?;
                let next = feed(model, &mut plain, &probe)?;
                for &steps in all_steps {
                    for tail in [&block[m..], &other[m..]] {
                        let what = format!("{options:?}, prefix {prefix}, block {size}, kept {m}, {steps:?}");
                        let mut caches = model.new_caches(options)?;
                        feed_block(model, &mut caches, &start, Steps::OneCall)?;
                        let mut round = Transaction::begin(&mut caches)?;
                        let fed: Vec<u32> = block[..m].iter().chain(tail).copied().collect();
                        feed_block(model, round.cache(), &fed, steps)?;
                        round.keep(m)?;
                        assert_same(&what, &snapshot, &caches)?;
                        let after = feed(model, &mut caches, &probe)?;
                        assert!(after == next, "{what}: next logits differ");
                        assert_same(&what, &plain, &caches)?;
                    }
                }
            }
        }
    }
    Ok(())
}

/// A copy of a stack by way of a snapshot.
trait Duplicate: Sized {
    fn duplicate(&self) -> Result<Self>;
}

impl Duplicate for CacheStack {
    fn duplicate(&self) -> Result<Self> {
        use recant::core::Cache;
        let options = CacheOptions {
            window: self
                .layers()
                .find(|c| c.kind() == "rotating-kv")
                .map(|_| window_of(self))
                .transpose()?,
            ..CacheOptions::default()
        };
        let mut copy = Self::standard(self.layout().clone(), &options)?;
        copy.load(&self.snapshot()?)?;
        Ok(copy)
    }
}

fn window_of(stack: &CacheStack) -> Result<Window> {
    let snapshot = stack
        .layers()
        .find(|c| c.kind() == "rotating-kv")
        .ok_or("no rotating layer")?
        .snapshot()?;
    Ok(Window {
        window: snapshot.settings()["window"],
        sink: snapshot.settings()["sink"],
    })
}

const ALL: [Steps; 3] = [Steps::OneCall, Steps::OneToken, Steps::Halves];

#[test]
fn full_attention_and_recurrence_forget_what_was_taken_back() -> Result<()> {
    let model = tiny(|_| {})?;
    no_trace(&*model, &CacheOptions::default(), &[0, 1, 2, 3, 20], 1..=9, &ALL)
}

#[test]
fn records_beyond_what_one_walk_folds_forget_as_well() -> Result<()> {
    let model = tiny(|_| {})?;
    no_trace(
        &*model,
        &CacheOptions::default(),
        &[5],
        [16, 17, 27].into_iter(),
        &ALL,
    )
}

#[test]
fn windows_forget_before_at_and_after_the_wrap() -> Result<()> {
    let model = tiny(|_| {})?;
    for sink in [0, 2] {
        let options = CacheOptions {
            window: Some(Window { window: 8, sink }),
            ..CacheOptions::default()
        };
        no_trace(&*model, &options, &[3, 7, 8, 9, 40], 1..=9, &ALL)?;
    }
    Ok(())
}

#[test]
fn windows_forget_when_the_ring_has_gone_round_many_times() -> Result<()> {
    let model = tiny(|_| {})?;
    for (window, sink) in [(1, 0), (3, 5), (8, 2)] {
        let options = CacheOptions {
            window: Some(Window { window, sink }),
            record_limit: 12,
            ..CacheOptions::default()
        };
        no_trace(
            &*model,
            &options,
            &[300],
            1..=4,
            &[Steps::OneCall, Steps::OneToken],
        )?;
    }
    Ok(())
}

#[test]
fn the_demo_target_forgets_what_was_taken_back() -> Result<()> {
    let model = load("demo-target")?.model().clone();
    no_trace(
        &*model,
        &CacheOptions::default(),
        &[17],
        1..=5,
        &[Steps::OneCall, Steps::OneToken],
    )
}

#[test]
fn mixtures_of_experts_forget_what_was_taken_back() -> Result<()> {
    for config in [
        seeded::moe(|text| text["linear_num_value_heads"] = serde_json::json!(6)),
        seeded::next(|text| text["num_experts"] = serde_json::json!(40)),
    ] {
        let model = tiny_of(&config)?;
        no_trace(&*model, &CacheOptions::default(), &[0, 2, 3, 20], 1..=6, &ALL)?;
    }
    Ok(())
}

#[test]
fn trained_mixtures_of_experts_forget_what_was_taken_back() -> Result<()> {
    for name in ["moe", "next"] {
        if folder_or_skip("tail independence of a trained mixture", name).is_some() {
            let model = load(name)?.model().clone();
            no_trace(
                &*model,
                &CacheOptions::default(),
                &[17],
                1..=4,
                &[Steps::OneCall, Steps::OneToken],
            )?;
        }
    }
    Ok(())
}

#[test]
fn c003_c004_trim_without_a_checkpoint_is_refused_whole_and_names_the_layer() -> Result<()> {
    use recant::core::Cache;
    let model = load("demo-target")?.model().clone();
    let mut caches = model.new_caches(&CacheOptions::default())?;
    feed(&*model, &mut caches, &text_ids(20)?)?;
    let before = caches.duplicate()?;
    let error = caches.trim(4).err().ok_or("trimmed a recurrence")?.to_string();
    assert!(error.contains("layer 0 (arrays)"), "{error}");
    assert!(error.contains("cannot trim 4 tokens"), "{error}");
    assert_same("after a refused trim", &before, &caches)
}
