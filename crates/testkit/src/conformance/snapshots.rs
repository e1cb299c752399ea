//! The laws of snapshots, which hold for every kind of cache.

use candle_core::DType;
use recant_core::Snapshot;

use super::lab::{deep_copy, Lab, Sequence};
use super::laws::{lengths, text, Checked};
use super::Options;

pub(super) fn shares_nothing(lab: &Lab<'_>, options: &Options) -> Checked {
    let law = "a snapshot shares nothing with any cache, and continues as the cache it came from";
    for len in lengths(options) {
        // Without a checkpoint, so that the next call writes over the state; with one; and with records on either side.
        for pending in [None, Some(0), Some(1), Some(3)] {
            let mut sequence = lab.fed(law, &text(0, len))?;
            if let Some(pending) = pending {
                let open = sequence.checkpoint()?;
                if pending > 0 {
                    sequence.feed(&text(1, pending + 2))?;
                    sequence.trim(2)?;
                }
                if pending == 1 {
                    sequence.commit(open)?;
                }
            }
            let held = sequence.history().to_vec();
            let snapshot = sequence.snapshot()?;
            let copy = sequence.done("copying a snapshot", deep_copy(&snapshot).map_err(Into::into))?;
            let unchanged = |sequence: &Sequence<'_, '_>, what: &str| {
                sequence.same_snapshot(&snapshot, &copy, &format!("a snapshot changed when {what}"))
            };
            // Both ways of going on: recorded or not, and over rows that were there before.
            sequence.feed(&text(2, 2))?;
            unchanged(&sequence, "its cache was fed")?;
            sequence.reset()?;
            sequence.feed(&text(3, held.len() + 1))?;
            sequence.feed(&text(2, 1))?;
            unchanged(&sequence, "its cache was reset and fed")?;

            let mut used = lab.fed(law, &text(4, 6))?;
            let _ended = used.checkpoint()?;
            used.feed(&text(3, 2))?;
            for mut target in [lab.fresh(law), used, sequence] {
                target.load(&snapshot, &held)?;
                target.check_state()?;
                target.feed(&text(2, 1))?;
                target.feed(&text(4, 4))?;
                target.check_state()?;
                unchanged(&target, "a cache that had loaded it was fed")?;
                let open = target.checkpoint()?;
                target.feed(&text(2, 2))?;
                target.restore(&open)?;
                target.check_state()?;
            }
        }
    }
    Ok(())
}

/// Snapshots that resemble `good`, each wrong in one way.
fn spoiled(good: &Snapshot) -> candle_core::Result<Vec<(String, Snapshot)>> {
    let rebuilt = |kind: &str, skip: Option<&str>| {
        let mut copy = Snapshot::new(kind, good.len()).with_parts(good.parts().to_vec());
        for (name, value) in good.settings() {
            copy = copy.with_setting(name, *value);
        }
        for (name, array) in good.arrays() {
            if Some(name.as_str()) != skip {
                copy = copy.with_array(name, array.clone());
            }
        }
        copy
    };
    let mut out = vec![("another kind".to_owned(), rebuilt("no-such-kind", None))];
    for (name, value) in good.settings() {
        let wrong = rebuilt(good.kind(), None).with_setting(name, value + 1);
        out.push((format!("another `{name}`"), wrong));
    }
    for (name, array) in good.arrays() {
        let whole = || rebuilt(good.kind(), None);
        let other = match array.dtype() {
            DType::F32 => DType::F64,
            _ => DType::F32,
        };
        out.push((format!("no `{name}`"), rebuilt(good.kind(), Some(name))));
        out.push((
            format!("a `{name}` of another type"),
            whole().with_array(name, array.to_dtype(other)?),
        ));
        out.push((
            format!("a `{name}` with a dimension more"),
            whole().with_array(name, array.unsqueeze(0)?),
        ));
        let rows = array.dims().first().copied().unwrap_or(0);
        if rows > 1 {
            out.push((
                format!("a `{name}` with a row less"),
                whole().with_array(name, array.narrow(0, 0, rows - 1)?),
            ));
        }
    }
    for (index, part) in good.parts().iter().enumerate() {
        for (what, wrong) in spoiled(part)? {
            let mut parts = good.parts().to_vec();
            parts[index] = wrong;
            let copy = rebuilt(good.kind(), None).with_parts(parts);
            out.push((format!("part {index}: {what}"), copy));
        }
    }
    if !good.parts().is_empty() {
        let fewer = good.parts()[1..].to_vec();
        out.push((
            "a part less".to_owned(),
            rebuilt(good.kind(), None).with_parts(fewer),
        ));
    }
    Ok(out)
}

pub(super) fn wrong_ones(lab: &Lab<'_>, options: &Options) -> Checked {
    let law = "load() takes exactly what fits() accepts, and a refusal changes nothing";
    for len in [1, options.tokens] {
        let source = lab.fed(law, &text(0, len))?;
        let good = source.snapshot()?;
        let wrong = source.done("spoiling a snapshot", spoiled(&good).map_err(Into::into))?;
        for (what, wrong) in wrong {
            let mut target = lab.fed(law, &text(1, 5))?;
            let open = target.checkpoint()?;
            target.feed(&text(2, 2))?;
            target.must_refuse(&format!("fits() of a snapshot with {what}"), |cache| {
                cache.fits(&wrong)
            })?;
            target.must_refuse(&format!("load() of a snapshot with {what}"), |cache| {
                cache.load(&wrong)
            })?;
            target.restore(&open)?;
            target.check_state()?;
        }
    }
    Ok(())
}
