//! The journal of a recurrent cache: what is kept, for how long, and what owns its storage.

use recant_core::candle::{DType, Device, Storage, Tensor};
use recant_core::{ArraysCache, Cache, Error, RecurrentCache, Result};
use recant_testkit::{Recurrence, Writes};

fn cache(record_limit: usize) -> Result<ArraysCache> {
    ArraysCache::new(Recurrence::layout(), record_limit, &Device::Cpu)
}

const LAYER: fn() -> Recurrence = || Recurrence::new(Writes::InPlace);

#[test]
fn without_a_checkpoint_nothing_can_be_trimmed_and_nothing_is_recorded() -> Result<()> {
    let mut cache = cache(64)?;
    LAYER().feed(&mut cache, &[1, 2, 3])?;
    assert_eq!((cache.trimmable(), cache.footprint().records), (0, 0));
    let refusal = cache.trim(1);
    assert!(
        matches!(
            &refusal,
            Err(Error::Trim { kind, asked: 1, len: 3, trimmable: 0 }) if kind == "arrays"
        ),
        "{refusal:?}"
    );
    Ok(())
}

#[test]
fn committed_tokens_cannot_be_trimmed_any_more() -> Result<()> {
    let mut cache = cache(64)?;
    let open = cache.checkpoint()?;
    LAYER().feed(&mut cache, &[1, 2, 3, 4])?;
    cache.trim(1)?;
    cache.commit(open);
    assert_eq!((cache.len(), cache.trimmable()), (3, 0));
    assert!(cache.trim(1).is_err());
    // The next checkpoint opens above them, though their records are still to be folded.
    let _open = cache.checkpoint()?;
    LAYER().feed(&mut cache, &[5])?;
    assert_eq!(cache.trimmable(), 1);
    assert!(cache.trim(2).is_err());
    Ok(())
}

#[test]
fn more_tokens_than_the_record_limit_are_refused_before_anything_changes() -> Result<()> {
    let mut cache = cache(4)?;
    LAYER().feed(&mut cache, &[9; 10])?;
    let open = cache.checkpoint()?;
    LAYER().feed(&mut cache, &[1, 2, 3])?;
    let before = cache.snapshot()?;
    let limit = Error::RecordLimit {
        asked: 2,
        held: 3,
        limit: 4,
    };
    for refusal in [cache.admit(2), LAYER().feed(&mut cache, &[4, 5]).map(drop)] {
        assert_eq!(refusal.map_err(|e| e.to_string()), Err(limit.to_string()));
    }
    assert_eq!(cache.snapshot()?.difference(&before), None);
    // What was trimmed counts no longer, and neither does what was committed.
    LAYER().feed(&mut cache, &[4])?;
    cache.trim(2)?;
    LAYER().feed(&mut cache, &[5, 6])?;
    cache.commit(open);
    let _open = cache.checkpoint()?;
    LAYER().feed(&mut cache, &[1, 2, 3, 4])?;
    assert!(cache.admit(1).is_err());
    Ok(())
}

#[test]
fn a_cache_with_no_room_for_records_still_serves_plain_decoding() -> Result<()> {
    let mut cache = cache(0)?;
    LAYER().feed(&mut cache, &[1, 2, 3])?;
    let open = cache.checkpoint()?;
    assert!(LAYER().feed(&mut cache, &[4]).is_err());
    cache.restore(&open)?;
    cache.commit(open);
    LAYER().feed(&mut cache, &[4])?;
    assert_eq!(cache.len(), 4);
    Ok(())
}

#[test]
fn a_call_whose_records_were_trimmed_meanwhile_is_not_taken() -> Result<()> {
    let mut cache = cache(64)?;
    let _open = cache.checkpoint()?;
    LAYER().feed(&mut cache, &[1, 2, 3])?;
    let records = cache.begin(1)?.replay[0].clone();
    let step = cache.begin(1)?;
    assert!(!step.writes());
    cache.trim(1)?;
    let one = records.arrays.iter().map(|array| Ok(array.narrow(0, 0, 1)?));
    let one = one.collect::<Result<Vec<Tensor>>>()?;
    assert!(cache.finish(step.arrays, one).is_err());
    assert_eq!(cache.len(), 2);
    Ok(())
}

/// The storage behind `tensor` is its own, but for less than a cache line, by which it may be shifted.
fn assert_owned(tensor: &Tensor) -> Result<()> {
    let (storage, _) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        unreachable!("the test runs on the CPU");
    };
    let all = storage.as_slice::<f32>()?.len();
    assert!(all - tensor.elem_count() < 16, "{} of {all}", tensor.elem_count());
    Ok(())
}

/// Feeds rows as a layer does that cuts its new window off a long convolution input.
fn feed_views(cache: &mut ArraysCache, tokens: usize) -> Result<()> {
    let step = cache.begin(tokens)?;
    let input = Tensor::ones((tokens + 3, 8), DType::F32, &Device::Cpu)?;
    let window = input.narrow(0, tokens, 3)?;
    let state = Tensor::ones((3, 2, 4), DType::F32, &Device::Cpu)?.transpose(0, 1)?;
    assert!(step.writes());
    cache.finish(vec![state, window], Vec::new())
}

#[test]
fn c116_arrays_and_snapshots_own_their_storage_and_no_more() -> Result<()> {
    let mut cache = cache(64)?;
    let state = 2 * 3 * 4;
    let window = 3 * 8;
    for tokens in [512, 1, 64] {
        feed_views(&mut cache, tokens)?;
        let snapshot = cache.snapshot()?;
        let held = cache.begin(1)?.arrays;
        cache.abandon();
        for (array, elements) in [
            (&held[0], state),
            (&held[1], window),
            (&snapshot.arrays()["state"], state),
            (&snapshot.arrays()["window"], window),
        ] {
            assert_eq!(array.elem_count(), elements);
            assert_owned(array)?;
            assert!(array.is_contiguous());
        }
        assert_eq!(cache.footprint().live, (state + window) * 4);
        // A snapshot may come from anywhere, and be a view too.
        let wide = Tensor::ones((100, 8), DType::F32, &Device::Cpu)?.narrow(0, 0, 3)?;
        let foreign = snapshot.with_array("window", wide);
        cache.load(&foreign)?;
        let loaded = cache.begin(1)?.arrays;
        cache.abandon();
        assert_eq!(loaded[1].elem_count(), window);
        assert_owned(&loaded[1])?;
    }
    Ok(())
}

#[test]
fn c116_memory_is_flat_over_many_requests() -> Result<()> {
    let mut cache = cache(64)?;
    let mut after = Vec::new();
    for request in 0..200 {
        cache.reset();
        LAYER().feed(&mut cache, &[request % 30; 64])?;
        for _ in 0..4 {
            let open = cache.checkpoint()?;
            LAYER().feed(&mut cache, &[1, 2, 3])?;
            cache.trim(2)?;
            cache.commit(open);
        }
        after.push(cache.footprint().total());
    }
    assert_eq!(after[20], after[199]);
    Ok(())
}

#[test]
fn c098_a_loaded_state_counts_once_however_the_rest_is_cut() -> Result<()> {
    let mut source = cache(64)?;
    LAYER().feed(&mut source, &[3, 1, 4])?;
    let loaded = source.snapshot()?;
    let rest: Vec<u32> = (0..24).collect();
    let mut ends = Vec::new();
    for chunk in [24, 8, 5, 1] {
        let mut cache = cache(64)?;
        cache.load(&loaded)?;
        for part in rest.chunks(chunk) {
            LAYER().feed(&mut cache, part)?;
        }
        ends.push(cache.snapshot()?);
    }
    for end in &ends[1..] {
        assert_eq!(end.difference(&ends[0]), None);
    }
    Ok(())
}
