//! What an append costs and keeps, counted and not timed.

use recant_core::candle::{DType, Device, Tensor};
use recant_core::{AttentionCache, AttentionLayout, Cache, KvCache, KvType, Result, RotatingKvCache, Window};

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

/// Beyond 1, f16 holds steps of 2^-10 and bf16 of 2^-7. Ties go to even.
#[test]
fn rows_are_rounded_to_nearest_when_they_are_appended_and_take_the_bytes_of_their_type() -> Result<()> {
    let layout = AttentionLayout {
        kv_heads: 1,
        head_dim: 4,
        dtype: DType::F32,
    };
    let row = |x: f32| Tensor::full(x, (2, 1, 4), &Device::Cpu);
    let window = Window { window: 5, sink: 1 };
    for (kv, step, [held, held_tie], bytes) in [
        (KvType::Native, 1.0 / 1024.0, [0.75, 1.5], 4),
        (KvType::F16, 1.0 / 1024.0, [1.0, 2.0], 2),
        (KvType::Bf16, 1.0 / 128.0, [1.0, 2.0], 2),
    ] {
        let [given, tie, held, held_tie] = [0.75, 1.5, held, held_tie].map(|steps| 1.0 + steps * step);
        let rotating = RotatingKvCache::stored_as(layout.clone(), kv, window, 0, &Device::Cpu)?;
        let kvs = KvCache::stored_as(layout.clone(), kv, &Device::Cpu);
        for mut cache in [Box::new(kvs) as Box<dyn AttentionCache>, Box::new(rotating)] {
            assert_eq!(cache.layout(), &layout, "what is appended is as before");
            cache.append(&row(given)?, &row(tie)?)?;
            for block in cache.view()?.blocks {
                let values = |x: &Tensor| {
                    let rows = x.narrow(0, 0, block.rows)?.to_dtype(DType::F32)?;
                    rows.flatten_all()?.to_vec1::<f32>()
                };
                assert_eq!(block.keys.dtype(), kv.of(DType::F32));
                assert_eq!(values(&block.keys)?, vec![held; 4 * block.rows], "{kv:?}");
                assert_eq!(values(&block.values)?, vec![held_tie; 4 * block.rows], "{kv:?}");
            }
            let rows = if cache.kind() == "kv" { 2 } else { 3 };
            let footprint = cache.footprint();
            assert_eq!(footprint.live, rows * 2 * 4 * bytes);
            assert_eq!(footprint.reserve % (2 * 4 * bytes), 0);
            let again = cache.snapshot()?;
            cache.load(&again)?;
            assert_eq!(again.difference(&cache.snapshot()?), None);
        }
    }
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
