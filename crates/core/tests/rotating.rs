//! The sliding window around its wrap, with marker values that can be read back.

use recant_core::candle::{DType, Device, Tensor};
use recant_core::{AttentionCache, AttentionLayout, Cache, Error, Result, RotatingKvCache, Window};

const LAYOUT: AttentionLayout = AttentionLayout {
    kv_heads: 1,
    head_dim: 1,
    dtype: DType::F32,
};

fn cache(window: usize, sink: usize, slack: usize) -> Result<RotatingKvCache> {
    RotatingKvCache::new(LAYOUT, Window { window, sink }, slack, &Device::Cpu)
}

fn push(cache: &mut RotatingKvCache, markers: &[f32]) -> Result<()> {
    let rows = Tensor::from_slice(markers, (markers.len(), 1, 1), &Device::Cpu)?;
    cache.append(&rows, &(&rows * -1.)?)
}

/// Position and marker of each row that the newest token sees.
fn visible(cache: &RotatingKvCache) -> Result<Vec<(usize, f32)>> {
    let view = cache.view()?;
    let newest = cache.len() - 1;
    let mut out = Vec::new();
    for block in &view.blocks {
        let keys: Vec<f32> = block.keys.flatten_all()?.to_vec1()?;
        let values: Vec<f32> = block.values.flatten_all()?.to_vec1()?;
        for row in 0..block.rows {
            let position = block.start + row;
            let seen = view
                .window
                .is_none_or(|w| newest - position < w || position < view.sink);
            if seen {
                assert_eq!(keys[row], -values[row]);
                out.push((position, keys[row]));
            }
        }
    }
    Ok(out)
}

#[test]
fn c006_trim_after_the_wrap_keeps_time_order() -> Result<()> {
    for sink in [0, 2] {
        let mut cache = cache(8, sink, 8)?;
        for marker in 0..11 {
            push(&mut cache, &[marker as f32])?;
        }
        cache.trim(3)?;
        push(&mut cache, &[108.])?;
        push(&mut cache, &[109.])?;
        // Ten tokens are held; the newest sees positions 2 to 9, and those of the sink.
        let mut expected: Vec<(usize, f32)> = (0..sink).map(|p| (p, p as f32)).collect();
        expected.extend((2..8).map(|p| (p, p as f32)));
        expected.extend([(8, 108.), (9, 109.)]);
        assert_eq!(visible(&cache)?, expected, "sink {sink}");
    }
    Ok(())
}

#[test]
fn c006_a_trim_that_would_need_evicted_rows_is_refused() -> Result<()> {
    let mut cache = cache(8, 0, 4)?;
    for marker in 0..100 {
        push(&mut cache, &[marker as f32])?;
    }
    assert!(cache.trimmable() >= 4 && cache.trimmable() < 92);
    let before = cache.snapshot()?;
    let asked = cache.trimmable() + 1;
    let refusal = cache.trim(asked);
    assert!(
        matches!(&refusal, Err(Error::Trim { asked: a, len: 100, trimmable, .. }) if *a == asked && trimmable + 1 == asked),
        "{refusal:?}"
    );
    assert_eq!(cache.snapshot()?.difference(&before), None);
    Ok(())
}

#[test]
fn c007_a_wrapped_window_that_lost_the_prefix_is_not_cut_back_to_it() -> Result<()> {
    let mut cache = cache(8, 0, 2)?;
    let turn: Vec<f32> = (0..64).map(|marker| marker as f32).collect();
    turn.iter().try_for_each(|marker| push(&mut cache, &[*marker]))?;
    // The next turn shares 4 tokens with this one; their window went out of the ring long ago.
    assert!(matches!(cache.trim(60), Err(Error::Trim { .. })));
    assert_eq!(cache.len(), 64);
    Ok(())
}

#[test]
fn c007_a_window_cut_back_to_a_shared_prefix_continues_as_a_cold_one() -> Result<()> {
    let mut warm = cache(8, 0, 16)?;
    let turn: Vec<f32> = (0..14).map(|marker| marker as f32).collect();
    push(&mut warm, &turn)?;
    warm.trim(10)?;
    let mut cold = cache(8, 0, 16)?;
    push(&mut cold, &turn[..4])?;
    for marker in 0..12 {
        for cache in [&mut warm, &mut cold] {
            push(cache, &[200. + marker as f32])?;
        }
        assert_eq!(visible(&warm)?, visible(&cold)?);
        assert_eq!(warm.snapshot()?.difference(&cold.snapshot()?), None);
    }
    Ok(())
}

#[test]
fn the_ring_stays_bounded_over_a_long_text() -> Result<()> {
    let mut cache = cache(8, 2, 4)?;
    let mut most = 0;
    for token in 0..5000 {
        push(&mut cache, &[token as f32])?;
        if token == 100 {
            most = cache.footprint().total();
        }
    }
    assert_eq!(cache.footprint().total(), most);
    assert_eq!(cache.footprint().live, (8 + 2) * 2 * 4);
    Ok(())
}

#[test]
fn a_window_of_zero_is_refused() {
    assert!(matches!(cache(0, 2, 4), Err(Error::Mismatch { .. })));
}

#[test]
fn windows_and_sinks_beyond_all_memory_are_only_numbers() -> Result<()> {
    for (window, sink, slack) in [
        (usize::MAX, 0, 0),
        (usize::MAX, usize::MAX, usize::MAX),
        (4, usize::MAX, 4),
        (4, 1 << 40, usize::MAX),
    ] {
        let mut cache = cache(window, sink, slack)?;
        for marker in 0..20 {
            push(&mut cache, &[marker as f32])?;
        }
        assert_eq!(visible(&cache)?.len(), 20);
        cache.trim(3)?;
        assert!(cache.footprint().total() < 1 << 20);
        let snapshot = cache.snapshot()?;
        cache.load(&snapshot)?;
        assert_eq!(cache.len(), 17);
    }
    Ok(())
}
