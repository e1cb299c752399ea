//! Cutting snapshots between tokens, and joining the pieces.

use std::sync::Arc;

use proptest::prelude::*;
use recant_core::candle::{DType, Device, Storage, Tensor};
use recant_core::{
    AttentionLayout, Cache, CacheOptions, CacheStack, LanguageModel, LayerLayout, Result, Rows, Segment,
    Snapshot, StackLayout, Window,
};
use recant_testkit::ScriptedModel;

fn text(tokens: usize) -> Vec<u32> {
    (0..tokens as u32).map(|i| (7 * i + 3) % 30).collect()
}

fn fed(options: &CacheOptions, tokens: &[u32]) -> Result<CacheStack> {
    let model = ScriptedModel::new(1, 32);
    let mut stack = model.new_caches(options)?;
    model.forward(&mut [Segment::new(tokens, &mut stack, Rows::None)])?;
    Ok(stack)
}

fn windowed() -> CacheOptions {
    CacheOptions {
        window: Some(Window { window: 8, sink: 2 }),
        ..CacheOptions::default()
    }
}

/// Elements of all storage that a snapshot keeps alive, and those that it shows.
fn storage(snapshot: &Snapshot) -> (usize, usize) {
    let mut sums = (0, 0);
    for array in snapshot.arrays().values() {
        let (storage, _) = array.storage_and_layout();
        if let Storage::Cpu(storage) = &*storage {
            sums.0 += storage.as_slice::<f32>().map_or(0, <[f32]>::len);
            sums.1 += array.elem_count();
        }
    }
    snapshot
        .parts()
        .iter()
        .map(storage)
        .fold(sums, |a, b| (a.0 + b.0, a.1 + b.1))
}

#[test]
fn rows_are_marked_by_the_cache_and_everything_else_is_whole() -> Result<()> {
    let kv = fed(&CacheOptions::default(), &text(9))?.snapshot()?;
    let names: Vec<Vec<&str>> = kv
        .parts()
        .iter()
        .map(|part| part.row_names().iter().map(String::as_str).collect())
        .collect();
    assert_eq!(names, [vec![], vec!["keys", "values"]]);
    let ring = fed(&windowed(), &text(9))?.snapshot()?;
    assert!(ring.parts().iter().all(|part| part.row_names().is_empty()));
    Ok(())
}

#[test]
fn a_cache_refuses_a_snapshot_that_lacks_rows() -> Result<()> {
    let whole = fed(&CacheOptions::default(), &text(9))?.snapshot()?;
    let mut stack = fed(&CacheOptions::default(), &[5])?;
    for piece in [
        whole.after(1)?,
        whole.after(9)?,
        whole.rows(0..8)?,
        whole.rows(0..9)?,
        whole.rows(3..5)?,
    ] {
        assert!(stack.fits(&piece).is_err(), "{piece:?}");
        assert!(stack.load(&piece).is_err());
        assert_eq!(stack.len(), 1);
    }
    stack.load(&Snapshot::join(&[&whole.rows(0..8)?, &whole.after(8)?])?)?;
    assert_eq!(stack.snapshot()?.difference(&whole), None);
    Ok(())
}

#[test]
fn c116_pieces_own_exactly_their_storage() -> Result<()> {
    let whole = fed(&CacheOptions::default(), &text(300))?.snapshot()?;
    for piece in [
        whole.rows(0..1)?,
        whole.rows(0..300)?,
        whole.rows(7..9)?,
        whole.after(299)?,
        whole.after(300)?,
        Snapshot::join(&[&whole.rows(0..256)?, &whole.rows(256..299)?, &whole.after(299)?])?,
    ] {
        let (kept, shown) = storage(&piece);
        assert_eq!(kept, shown, "{piece:?}");
        assert_eq!(piece.bytes(), 4 * shown);
    }
    // A cache of another crate may hand out views.
    let large = Tensor::zeros((1000, 2), DType::F32, &Device::Cpu)?;
    let views = Snapshot::new("views", 3)
        .with_rows("rows", large.narrow(0, 0, 3)?)
        .with_array("last", large.narrow(0, 999, 1)?);
    assert_eq!(storage(&views), (4000, 8));
    for (piece, shown) in [
        (views.compact()?, 8),
        (views.rows(0..3)?, 6),
        (views.after(0)?, 8),
        (views.after(3)?, 2),
        (Snapshot::join(&[&views])?, 8),
        (
            Snapshot::new("outer", 3)
                .with_parts(vec![views.clone()])
                .compact()?,
            8,
        ),
    ] {
        assert_eq!(storage(&piece), (shown, shown), "{piece:?}");
    }
    Ok(())
}

#[test]
fn what_cannot_be_cut_or_joined_is_refused() -> Result<()> {
    let whole = fed(&CacheOptions::default(), &text(9))?.snapshot()?;
    #[allow(clippy::reversed_empty_ranges)]
    for tokens in [0..10, 5..4, 10..10, 0..usize::MAX] {
        assert!(whole.rows(tokens.clone()).is_err(), "{tokens:?}");
    }
    assert!(whole.after(10).is_err());
    assert!(whole.after(4)?.rows(3..9).is_err());
    let other = fed(&windowed(), &text(9))?.snapshot()?;
    let fewer = Snapshot::new("stack", 9).with_parts(whole.parts()[..1].to_vec());
    for pieces in [
        vec![],
        vec![&whole, &whole],
        vec![&whole.rows(0..4)?, &whole.after(5)?],
        vec![&whole.rows(0..4)?, &whole.after(3)?],
        vec![&whole.rows(0..4)?, &other.after(4)?],
        vec![&whole.rows(0..4)?, &fewer.after(4)?],
    ] {
        assert!(Snapshot::join(&pieces).is_err(), "{pieces:?}");
    }
    // Rows of other names, also with an empty piece between them; of other shapes; and of another number.
    let rows = |name: &str, len: usize, width: usize| -> Result<Snapshot> {
        let array = Tensor::zeros((len, width), DType::F32, &Device::Cpu)?;
        Ok(Snapshot::new("kv", len).with_rows(name, array))
    };
    let (a, b) = (rows("a", 4, 1)?, rows("b", 9, 1)?);
    assert!(Snapshot::join(&[&a, &b.after(4)?]).is_err());
    assert!(Snapshot::join(&[&a, &a.after(4)?, &b.after(4)?]).is_err());
    assert!(Snapshot::join(&[&a, &rows("a", 9, 2)?.after(4)?]).is_err());
    let short = Snapshot::new("kv", 5).with_rows("a", Tensor::zeros((4, 1), DType::F32, &Device::Cpu)?);
    assert!(short.rows(0..5).is_err() && short.after(2).is_err() && short.compact().is_err());
    assert!(Snapshot::join(&[&short]).is_err() && Snapshot::join(&[&short, &a.rows(4..4)?]).is_err());
    let scalar = Snapshot::new("kv", 1).with_rows("a", Tensor::zeros((), DType::F32, &Device::Cpu)?);
    assert!(scalar.rows(0..1).is_err());
    let uneven = Snapshot::new("stack", 5).with_parts(vec![a]);
    assert!(uneven.rows(0..4).is_err());
    Ok(())
}

#[test]
fn an_array_that_is_put_again_is_what_it_was_put_as_last() -> Result<()> {
    let array = || Tensor::zeros((3, 1), DType::F32, &Device::Cpu);
    let whole = Snapshot::new("kv", 3)
        .with_rows("a", array()?)
        .with_array("a", array()?);
    assert!(whole.row_names().is_empty());
    assert!(whole.after(3)?.arrays().contains_key("a"));
    let rows = Snapshot::new("kv", 3)
        .with_array("a", array()?)
        .with_rows("a", array()?);
    assert!(rows.row_names().contains("a"));
    assert!(rows.after(3)?.arrays().is_empty());
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Cut anywhere and joined again, a snapshot is what it was.
    #[test]
    fn pieces_join_to_the_whole(tokens in 1usize..600, mut cuts in prop::collection::vec(0usize..600, 0..6), window in any::<bool>()) {
        let options = if window { windowed() } else { CacheOptions::default() };
        let whole = fed(&options, &text(tokens)).unwrap().snapshot().unwrap();
        cuts.iter_mut().for_each(|cut| *cut %= tokens + 1);
        cuts.extend([0, tokens]);
        cuts.sort_unstable();
        let mut pieces: Vec<Snapshot> = cuts.windows(2).map(|pair| whole.rows(pair[0]..pair[1]).unwrap()).collect();
        pieces.push(whole.after(tokens).unwrap());
        let joined = Snapshot::join(&pieces.iter().collect::<Vec<_>>()).unwrap();
        prop_assert_eq!(joined.difference(&whole), None);
        for (a, b) in joined.parts().iter().zip(whole.parts()) {
            prop_assert_eq!(a.row_names(), b.row_names());
        }
        // A piece is cut as the whole is, and the rows of a shorter text are those of a longer one.
        let [low, high] = [cuts[cuts.len() / 3], cuts[2 * cuts.len() / 3]];
        let twice = whole.after(low).unwrap().rows(high..tokens).unwrap();
        prop_assert_eq!(twice.difference(&whole.rows(high..tokens).unwrap()), None);
        if !window && high > 0 {
            let shorter = fed(&options, &text(high)).unwrap().snapshot().unwrap();
            let rows = shorter.rows(low..high).unwrap();
            prop_assert_eq!(rows.difference(&whole.rows(low..high).unwrap()), None);
        }
    }
}

#[test]
fn layers_of_caches_alone_are_cut_too() -> Result<()> {
    let layout = StackLayout {
        fingerprint: "a model".to_owned(),
        layers: vec![LayerLayout::Attention(AttentionLayout {
            kv_heads: 1,
            head_dim: 2,
            dtype: DType::F32,
        })],
        device: Device::Cpu,
    };
    let mut stack = CacheStack::standard(Arc::new(layout), &CacheOptions::default())?;
    let rows = Tensor::rand(0f32, 1.0, (20, 1, 2), &Device::Cpu)?;
    stack.attention(0)?.append(&rows, &rows)?;
    let whole = stack.snapshot()?;
    let joined = Snapshot::join(&[&whole.rows(0..13)?, &whole.rows(13..20)?, &whole.after(20)?])?;
    assert_eq!(joined.difference(&whole), None);
    // There is nothing but rows, so the rows are all of it.
    stack.load(&whole.rows(0..20)?)?;
    assert_eq!(stack.snapshot()?.difference(&whole), None);
    Ok(())
}
