//! What an append costs and keeps, counted and not timed.

use recant_core::candle::{DType, Device, Tensor};
use recant_core::{AttentionCache, AttentionLayout, Cache, KvCache, Result};

#[test]
fn c120_appends_move_no_row_that_is_held_and_grow_by_the_block() -> Result<()> {
    let layout = AttentionLayout {
        kv_heads: 2,
        head_dim: 4,
        dtype: DType::F32,
    };
    let row_bytes = 2 * 2 * 4 * 4;
    let mut cache = KvCache::new(layout, &Device::Cpu);
    let row = Tensor::ones((1, 2, 4), DType::F32, &Device::Cpu)?;
    cache.append(&row, &row)?;
    let first = cache.view()?.blocks.remove(0);
    let mut grown = 0;
    let mut total = cache.footprint().total();
    for held in 2..=4000 {
        cache.append(&row, &row)?;
        let footprint = cache.footprint();
        assert_eq!(footprint.live, held * row_bytes);
        if footprint.total() != total {
            // One block of 256 rows more, and only when the last one was full.
            assert_eq!((footprint.total() - total, held % 256), (256 * row_bytes, 1));
            (total, grown) = (footprint.total(), grown + 1);
        }
    }
    assert_eq!(grown, 15);
    // The rows of the first block lie where they lay: a view taken then reads what was written since.
    let again = cache.view()?.blocks.remove(0);
    assert_eq!((first.rows, again.rows), (1, 256));
    assert_eq!(
        first.keys.flatten_all()?.to_vec1::<f32>()?,
        again.keys.flatten_all()?.to_vec1::<f32>()?
    );
    Ok(())
}

#[test]
fn rows_let_go_are_used_again() -> Result<()> {
    let layout = AttentionLayout {
        kv_heads: 1,
        head_dim: 1,
        dtype: DType::F32,
    };
    let mut cache = KvCache::new(layout, &Device::Cpu);
    let rows = Tensor::ones((700, 1, 1), DType::F32, &Device::Cpu)?;
    cache.append(&rows, &rows)?;
    let total = cache.footprint().total();
    for _ in 0..10 {
        cache.trim(699)?;
        cache.append(&rows.narrow(0, 0, 650)?, &rows.narrow(0, 0, 650)?)?;
        assert_eq!(cache.footprint().total(), total);
        cache.reset();
        cache.append(&rows, &rows)?;
        assert_eq!(cache.footprint().total(), total);
    }
    Ok(())
}
