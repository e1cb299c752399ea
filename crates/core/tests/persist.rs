//! Saving and loading a stack: identity, and that nothing damaged or foreign is taken.

use std::path::PathBuf;
use std::sync::Arc;

use proptest::prelude::*;
use recant_core::candle::{DType, Device, Tensor};
use recant_core::{
    persist, AttentionCache, AttentionLayout, Cache, CacheOptions, CacheStack, Checkpoint, Error, Footprint,
    KvCache, KvType, KvView, LanguageModel, LayerCache, LayerLayout, Result, Rows, Segment, Snapshot,
    StackLayout, Transaction, Window,
};
use recant_testkit::ScriptedModel;
use tempfile::TempDir;

fn text(tokens: usize) -> Vec<u32> {
    (0..tokens as u32).map(|i| (7 * i + 3) % 30).collect()
}

fn feed(model: &ScriptedModel, stack: &mut CacheStack, tokens: &[u32]) -> Result<Vec<Vec<f32>>> {
    let output = model.forward(&mut [Segment::new(tokens, stack, Rows::All)])?;
    Ok(output.segments[0].logits()?.to_vec2()?)
}

fn fed(model: &ScriptedModel, options: &CacheOptions, tokens: &[u32]) -> Result<CacheStack> {
    let mut stack = model.new_caches(options)?;
    if !tokens.is_empty() {
        feed(model, &mut stack, tokens)?;
    }
    Ok(stack)
}

fn place() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("prompt.cache");
    (folder, path)
}

/// The reason a file was refused for; the stack must be as it was.
fn refusal(path: &PathBuf, stack: &mut CacheStack) -> Result<String> {
    let before = stack.snapshot()?;
    let result = persist::load(path, stack);
    assert_eq!(stack.snapshot()?.difference(&before), None);
    match result {
        Err(Error::File { path: named, reason }) => {
            assert_eq!(&named, path);
            Ok(reason)
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn c021_a_saved_cache_continues_bit_for_bit() -> Result<()> {
    let model = ScriptedModel::new(1, 32);
    for window in [None, Some(Window { window: 8, sink: 2 })] {
        let options = CacheOptions {
            window,
            ..CacheOptions::default()
        };
        for tokens in [0, 1, 9, 300] {
            let (_folder, path) = place();
            let held = text(tokens);
            let mut stack = fed(&model, &options, &held)?;
            persist::save(&path, &stack, &held)?;
            // Into a new stack, and into one that is in use and has a checkpoint open.
            let mut used = fed(&model, &options, &[9; 20])?;
            let _ended = used.checkpoint()?;
            let expected = feed(&model, &mut stack, &[1, 2, 3, 4, 5])?;
            for mut loaded in [model.new_caches(&options)?, used] {
                assert_eq!(persist::load(&path, &mut loaded)?, held);
                assert_eq!(loaded.len(), tokens);
                assert_eq!(feed(&model, &mut loaded, &[1, 2, 3, 4, 5])?, expected);
                assert_eq!(loaded.snapshot()?.difference(&stack.snapshot()?), None);
            }
        }
    }
    Ok(())
}

#[test]
fn pending_records_are_settled_in_the_file_and_stay_pending_in_the_cache() -> Result<()> {
    let model = ScriptedModel::new(1, 32);
    let (_folder, path) = place();
    let mut stack = fed(&model, &CacheOptions::default(), &text(9))?;
    let mut round = Transaction::begin(&mut stack)?;
    feed(&model, round.cache(), &[1, 2, 3, 4])?;
    round.cache().trim(1)?;
    let mut held = text(9);
    held.extend([1, 2, 3]);
    persist::save(&path, round.cache(), &held)?;
    drop(round);
    let cold = fed(&model, &CacheOptions::default(), &text(9))?;
    assert_eq!(stack.snapshot()?.difference(&cold.snapshot()?), None);

    let mut loaded = model.new_caches(&CacheOptions::default())?;
    assert_eq!(persist::load(&path, &mut loaded)?, held);
    let cold = fed(&model, &CacheOptions::default(), &held)?;
    assert_eq!(loaded.snapshot()?.difference(&cold.snapshot()?), None);
    Ok(())
}

#[test]
fn equal_caches_give_equal_files_but_for_the_order_of_metadata() -> Result<()> {
    let model = ScriptedModel::new(1, 32);
    let (_folder, path) = place();
    let mut sizes = Vec::new();
    for cut in [1, 4, 9] {
        let mut stack = fed(&model, &CacheOptions::default(), &text(9)[..cut])?;
        if cut < 9 {
            feed(&model, &mut stack, &text(9)[cut..])?;
        }
        persist::save(&path, &stack, &text(9))?;
        let bytes = std::fs::read(&path).map_err(Error::other)?;
        let (header, _) = safetensors::SafeTensors::read_metadata(&bytes).map_err(Error::other)?;
        sizes.push(bytes[8 + header..].to_vec());
    }
    assert_eq!(sizes[0], sizes[1]);
    assert_eq!(sizes[0], sizes[2]);
    Ok(())
}

#[test]
fn a_file_cut_off_anywhere_is_refused() -> Result<()> {
    let model = ScriptedModel::new(1, 32);
    let (_folder, path) = place();
    let stack = fed(&model, &CacheOptions::default(), &text(9))?;
    persist::save(&path, &stack, &text(9))?;
    let whole = std::fs::read(&path).map_err(Error::other)?;
    let mut other = fed(&model, &CacheOptions::default(), &[5, 5])?;
    for len in (0..whole.len()).step_by(3).chain(whole.len() - 4..whole.len()) {
        std::fs::write(&path, &whole[..len]).map_err(Error::other)?;
        let reason = refusal(&path, &mut other)?;
        assert!(
            reason.starts_with("is truncated or no safetensors file"),
            "{len}: {reason}"
        );
    }
    let longer = [whole.as_slice(), &[0; 8]].concat();
    std::fs::write(&path, longer).map_err(Error::other)?;
    refusal(&path, &mut other)?;
    Ok(())
}

#[test]
fn a_file_with_any_byte_changed_is_refused_or_means_the_same() -> Result<()> {
    let model = ScriptedModel::new(1, 32);
    let (_folder, path) = place();
    let stack = fed(&model, &CacheOptions::default(), &text(9))?;
    persist::save(&path, &stack, &text(9))?;
    let whole = std::fs::read(&path).map_err(Error::other)?;
    let (header, _) = safetensors::SafeTensors::read_metadata(&whole).map_err(Error::other)?;
    let mut other = model.new_caches(&CacheOptions::default())?;
    for at in 0..whole.len() {
        for flip in [0x01, 0x80, 0x2a] {
            let mut bytes = whole.clone();
            bytes[at] ^= flip;
            std::fs::write(&path, bytes).map_err(Error::other)?;
            other.reset();
            if let Ok(tokens) = persist::load(&path, &mut other) {
                // White space in the header may become other white space; nothing that is read may change.
                assert!(at < 8 + header, "byte {at} of the data");
                assert_eq!(tokens, text(9));
                assert_eq!(other.snapshot()?.difference(&stack.snapshot()?), None);
            }
        }
    }
    Ok(())
}

#[test]
fn files_that_are_something_else_are_refused() -> Result<()> {
    let model = ScriptedModel::new(1, 32);
    let (folder, path) = place();
    let mut stack = fed(&model, &CacheOptions::default(), &[5])?;
    assert!(refusal(&path, &mut stack)?.starts_with("cannot be read"));
    assert!(refusal(&folder.path().to_owned(), &mut stack)?.starts_with("cannot be read"));
    for bytes in [
        &b""[..],
        b"{}",
        b"GGUF\x03\0\0\0\0\0\0\0",
        &[0xff; 64],
        b"\x02\0\0\0\0\0\0\0{}",
        // A header of many dimensions, for 4 bytes.
        b"\x45\0\0\0\0\0\0\0{\"a\":{\"dtype\":\"F32\",\"shape\":[1000000,1000000],\"data_offsets\":[0,4]}} \0\0\0\0",
    ] {
        std::fs::write(&path, bytes).map_err(Error::other)?;
        refusal(&path, &mut stack)?;
    }
    let tensors = [("a", Tensor::ones(3, DType::F32, &Device::Cpu)?)];
    safetensors::serialize_to_file(tensors, None, &path).map_err(Error::other)?;
    assert_eq!(
        refusal(&path, &mut stack)?,
        "lacks the metadata field `format`: it is no cache file of this library"
    );
    Ok(())
}

#[test]
fn c021_a_file_of_another_model_is_refused() -> Result<()> {
    let (_folder, path) = place();
    let one = ScriptedModel::new(1, 32);
    persist::save(&path, &fed(&one, &CacheOptions::default(), &text(9))?, &text(9))?;
    let other = ScriptedModel::new(2, 32);
    let mut stack = fed(&other, &CacheOptions::default(), &[5])?;
    assert_eq!(
        refusal(&path, &mut stack)?,
        "has model `scripted-1-32`, where `scripted-2-32` is expected"
    );
    Ok(())
}

#[test]
fn a_file_of_another_kind_of_cache_or_another_window_is_refused_by_layer() -> Result<()> {
    let (_folder, path) = place();
    let model = ScriptedModel::new(1, 32);
    let options = |window| CacheOptions {
        window,
        ..CacheOptions::default()
    };
    let windows = [
        None,
        Some(Window { window: 8, sink: 0 }),
        Some(Window { window: 8, sink: 2 }),
        Some(Window { window: 9, sink: 0 }),
    ];
    for saved in windows {
        persist::save(&path, &fed(&model, &options(saved), &text(20))?, &text(20))?;
        for asked in windows {
            let mut stack = fed(&model, &options(asked), &[5])?;
            if saved == asked {
                persist::load(&path, &mut stack)?;
            } else {
                let reason = refusal(&path, &mut stack)?;
                assert!(reason.contains("layer 1 ("), "{saved:?} into {asked:?}: {reason}");
            }
        }
    }
    Ok(())
}

#[test]
fn a_file_whose_keys_and_values_are_of_another_type_is_refused_by_layer() -> Result<()> {
    let (_folder, path) = place();
    let layout = Arc::new(StackLayout {
        fingerprint: "a model".to_owned(),
        layers: vec![LayerLayout::Attention(AttentionLayout {
            kv_heads: 1,
            head_dim: 2,
            dtype: DType::F32,
        })],
        device: Device::Cpu,
    });
    let rows = (Tensor::rand(0f32, 1.0, (20, 1, 2), &Device::Cpu)? / 3.0)?;
    for window in [None, Some(Window { window: 8, sink: 2 })] {
        let fed = |kv, tokens| -> Result<CacheStack> {
            let options = CacheOptions {
                window,
                kv,
                ..CacheOptions::default()
            };
            let mut stack = CacheStack::standard(Arc::clone(&layout), &options)?;
            let rows = rows.narrow(0, 0, tokens)?;
            stack.attention(0)?.append(&rows, &rows)?;
            Ok(stack)
        };
        let types = [KvType::Native, KvType::F16, KvType::Bf16];
        for saved in types {
            let from = fed(saved, 20)?;
            persist::save(&path, &from, &text(20))?;
            for asked in types {
                let mut stack = fed(asked, 1)?;
                if saved == asked {
                    persist::load(&path, &mut stack)?;
                    assert_eq!(from.snapshot()?.difference(&stack.snapshot()?), None);
                    continue;
                }
                let reason = refusal(&path, &mut stack)?;
                let [asked, saved] = [asked, saved].map(|kv| kv.of(DType::F32));
                for part in [
                    "layer 0 (",
                    &format!("expected {asked:?} of"),
                    &format!("found {saved:?} of"),
                ] {
                    assert!(reason.contains(part), "{reason}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn a_file_of_another_layout_is_refused_though_the_fingerprint_is_equal() -> Result<()> {
    let (_folder, path) = place();
    let stack = |head_dim, layers| {
        let layer = LayerLayout::Attention(AttentionLayout {
            kv_heads: 1,
            head_dim,
            dtype: DType::F32,
        });
        let layout = StackLayout {
            fingerprint: "a model".to_owned(),
            layers: vec![layer; layers],
            device: Device::Cpu,
        };
        CacheStack::standard(Arc::new(layout), &CacheOptions::default())
    };
    let mut saved = stack(2, 2)?;
    let rows = Tensor::ones((3, 1, 2), DType::F32, &Device::Cpu)?;
    saved.attention(0)?.append(&rows, &rows)?;
    assert!(matches!(
        persist::save(&path, &saved, &[1, 2, 3]),
        Err(Error::Uneven { .. })
    ));
    saved.attention(1)?.append(&rows, &rows)?;
    persist::save(&path, &saved, &[1, 2, 3])?;
    for (head_dim, layers) in [(4, 2), (2, 1), (2, 3)] {
        let reason = refusal(&path, &mut stack(head_dim, layers)?)?;
        assert!(reason.starts_with("does not fit the caches"), "{reason}");
    }
    Ok(())
}

#[test]
fn c019_token_ids_must_be_as_many_as_the_caches_hold() -> Result<()> {
    let (_folder, path) = place();
    let model = ScriptedModel::new(1, 32);
    let stack = fed(&model, &CacheOptions::default(), &text(9))?;
    for tokens in [0, 8, 10] {
        let refused = persist::save(&path, &stack, &text(tokens));
        assert!(matches!(refused, Err(Error::Mismatch { .. })), "{refused:?}");
        assert!(!path.exists());
    }
    Ok(())
}

#[test]
fn an_existing_file_is_kept_when_saving_fails() -> Result<()> {
    let (folder, path) = place();
    let model = ScriptedModel::new(1, 32);
    let stack = fed(&model, &CacheOptions::default(), &text(9))?;
    persist::save(&path, &stack, &text(9))?;
    let before = std::fs::read(&path).map_err(Error::other)?;
    assert!(persist::save(&path, &stack, &text(8)).is_err());
    assert_eq!(std::fs::read(&path).map_err(Error::other)?, before);
    // A path that a file cannot be put at: a folder with something in it.
    let full = folder.path().join("full");
    std::fs::create_dir(&full).map_err(Error::other)?;
    std::fs::write(full.join("kept"), b"kept").map_err(Error::other)?;
    assert!(matches!(
        persist::save(&full, &stack, &text(9)),
        Err(Error::File { .. })
    ));
    assert!(full.join("kept").exists());
    let absent = folder.path().join("absent").join("cache");
    assert!(matches!(
        persist::save(absent, &stack, &text(9)),
        Err(Error::File { .. })
    ));
    // Nothing half written is left beside them.
    let left = std::fs::read_dir(folder.path()).map_err(Error::other)?.count();
    assert_eq!(left, 2);
    Ok(())
}

#[test]
fn two_threads_that_save_to_one_path_leave_one_whole_file() -> Result<()> {
    let (_folder, path) = place();
    let model = ScriptedModel::new(1, 32);
    let both = std::sync::Barrier::new(2);
    std::thread::scope(|scope| {
        let handles: Vec<_> = [3, 500]
            .into_iter()
            .map(|tokens| {
                let (model, path, both) = (&model, &path, &both);
                scope.spawn(move || -> Result<()> {
                    let stack = fed(model, &CacheOptions::default(), &text(tokens))?;
                    both.wait();
                    (0..200).try_for_each(|_| persist::save(path, &stack, &text(tokens)))
                })
            })
            .collect();
        let mut loaded = model.new_caches(&CacheOptions::default())?;
        for handle in handles {
            handle.join().expect("no panic")?;
            let tokens = persist::load(&path, &mut loaded)?;
            assert!([3, 500].contains(&tokens.len()));
        }
        Ok(())
    })
}

/// A cache made of caches, as somebody else may write one.
struct Nested(KvCache);

impl Cache for Nested {
    fn kind(&self) -> &str {
        "nested"
    }
    fn len(&self) -> usize {
        self.0.len()
    }
    fn trimmable(&self) -> usize {
        self.0.trimmable()
    }
    fn trim(&mut self, n: usize) -> Result<()> {
        self.0.trim(n)
    }
    fn checkpoint(&mut self) -> Result<Checkpoint> {
        self.0.checkpoint()
    }
    fn restore(&mut self, to: &Checkpoint) -> Result<()> {
        self.0.restore(to)
    }
    fn commit(&mut self, checkpoint: Checkpoint) {
        self.0.commit(checkpoint);
    }
    fn snapshot(&self) -> Result<Snapshot> {
        Ok(Snapshot::new(self.kind(), self.len()).with_parts(vec![self.0.snapshot()?]))
    }
    fn fits(&self, from: &Snapshot) -> Result<()> {
        from.expect_kind(self.kind())?;
        self.0.fits(&from.parts()[0])
    }
    fn load(&mut self, from: &Snapshot) -> Result<()> {
        self.0.load(&from.parts()[0])
    }
    fn reset(&mut self) {
        self.0.reset();
    }
    fn footprint(&self) -> Footprint {
        self.0.footprint()
    }
}

impl AttentionCache for Nested {
    fn layout(&self) -> &AttentionLayout {
        self.0.layout()
    }
    fn append(&mut self, keys: &Tensor, values: &Tensor) -> Result<()> {
        self.0.append(keys, values)
    }
    fn view(&self) -> Result<KvView> {
        self.0.view()
    }
}

#[test]
fn a_snapshot_that_the_format_cannot_hold_is_refused_and_not_saved_in_part() -> Result<()> {
    let (_folder, path) = place();
    let kv = AttentionLayout {
        kv_heads: 1,
        head_dim: 2,
        dtype: DType::F32,
    };
    let layout = StackLayout {
        fingerprint: "a model".to_owned(),
        layers: vec![LayerLayout::Attention(kv.clone())],
        device: Device::Cpu,
    };
    let nested = Nested(KvCache::new(kv, &Device::Cpu));
    let mut stack = CacheStack::new(Arc::new(layout), vec![LayerCache::Attention(Box::new(nested))])?;
    let rows = Tensor::ones((3, 1, 2), DType::F32, &Device::Cpu)?;
    stack.attention(0)?.append(&rows, &rows)?;
    let refused = persist::save(&path, &stack, &[1, 2, 3]);
    assert!(
        matches!(refused, Err(Error::Layer { layer: 0, .. })),
        "{refused:?}"
    );
    assert!(!path.exists());
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Any history of rounds, saved, loaded and continued, is that of the kept tokens alone.
    #[test]
    fn save_and_load_keep_whatever_was_kept(
        rounds in prop::collection::vec((prop::collection::vec(0u32..32, 1..9), 0usize..9, any::<bool>()), 1..12),
    ) {
        let model = ScriptedModel::new(1, 32);
        let (_folder, path) = place();
        let mut stack = model.new_caches(&CacheOptions::default()).unwrap();
        let mut held: Vec<u32> = Vec::new();
        for (block, kept, reload) in rounds {
            let kept = kept.min(block.len());
            let mut round = Transaction::begin(&mut stack).unwrap();
            feed(&model, round.cache(), &block).unwrap();
            round.keep(kept).unwrap();
            held.extend(&block[..kept]);
            if reload {
                persist::save(&path, &stack, &held).unwrap();
                stack = model.new_caches(&CacheOptions::default()).unwrap();
                prop_assert_eq!(&persist::load(&path, &mut stack).unwrap(), &held);
            }
        }
        let cold = fed(&model, &CacheOptions::default(), &held).unwrap();
        prop_assert_eq!(stack.snapshot().unwrap().difference(&cold.snapshot().unwrap()), None);
    }

    /// A loader takes any bytes without a panic.
    #[test]
    fn any_bytes_are_refused_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let model = ScriptedModel::new(1, 32);
        let (_folder, path) = place();
        std::fs::write(&path, bytes).unwrap();
        let mut stack = model.new_caches(&CacheOptions::default()).unwrap();
        prop_assert!(persist::load(&path, &mut stack).is_err());
    }
}
