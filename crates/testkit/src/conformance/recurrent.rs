//! Recurrent caches: the laws of `Cache`, driven by a small recurrence, and those of the call itself.

use recant_core::{Cache, Error, RecurrentCache, RecurrentLayout};

use super::lab::{rows_of, Bits, Lab, Subject, Trouble};
use super::{laws, Options};
use crate::{Failure, Recurrence, Writes};

type Make<'a> = dyn Fn(&RecurrentLayout) -> Box<dyn RecurrentCache> + 'a;

pub(super) fn check(make: &Make<'_>, options: &Options) -> Result<(), Failure> {
    let layout = Recurrence::layout();
    let known = |history: &[u32]| -> Vec<Bits> {
        let bits = |row: Vec<f32>| row.into_iter().map(|x| f64::from(x).to_bits()).collect();
        Recurrence::plain(history).into_iter().map(bits).collect()
    };
    for writes in [Writes::Fresh, Writes::InPlace] {
        let subject = || -> Box<dyn Subject + '_> {
            Box::new(Recurrent {
                cache: make(&layout),
                layer: Recurrence::new(writes),
            })
        };
        laws::check(&Lab::new(&subject, Some(&known)), options)?;
        let calls = Calls {
            lab: &Lab::new(&subject, Some(&known)),
            make,
            layer: Recurrence::new(writes),
        };
        calls.abandoned()?;
        calls.wrong_results()?;
        calls.torn()?;
    }
    Ok(())
}

struct Recurrent {
    cache: Box<dyn RecurrentCache>,
    layer: Recurrence,
}

impl Subject for Recurrent {
    fn cache(&self) -> &dyn Cache {
        self.cache.as_ref()
    }

    fn cache_mut(&mut self) -> &mut dyn Cache {
        self.cache.as_mut()
    }

    fn feed(&mut self, tokens: &[u32]) -> Result<Vec<Bits>, Trouble> {
        let output = self.layer.feed(self.cache.as_mut(), tokens)?;
        Ok(rows_of(&output)?)
    }
}

/// The laws of `begin`, `finish` and `abandon`.
struct Calls<'l, 'a> {
    lab: &'l Lab<'a>,
    make: &'a Make<'a>,
    layer: Recurrence,
}

impl Calls<'_, '_> {
    /// A cache with records to fold and, if `open`, records to replay, and the number of its tokens.
    fn prepared(&self, open: bool) -> recant_core::Result<Box<dyn RecurrentCache>> {
        let mut cache = (self.make)(&Recurrence::layout());
        self.layer.feed(cache.as_mut(), &[1, 2, 3])?;
        let first = cache.checkpoint()?;
        self.layer.feed(cache.as_mut(), &[4, 5, 6])?;
        cache.trim(1)?;
        cache.commit(first);
        if open {
            let _open = cache.checkpoint()?;
        }
        Ok(cache)
    }

    fn abandoned(&self) -> Result<(), Failure> {
        let scene = self.lab.fresh("a call that is abandoned leaves no trace");
        for open in [false, true] {
            let mut cache = scene.done("a plain use", self.prepared(open))?;
            let before = scene.done("snapshot()", cache.snapshot())?;
            scene.done("begin()", cache.begin(2))?;
            cache.abandon();
            let after = scene.done("snapshot() after abandon()", cache.snapshot())?;
            scene.same_snapshot(&after, &before, "the snapshot changed")?;
            scene.done("a call after abandon()", self.layer.feed(cache.as_mut(), &[7]))?;
            if cache.len() != 6 {
                return Err(scene.broken(format!(
                    "5 tokens and one more make {} after an abandoned call",
                    cache.len()
                )));
            }
        }
        Ok(())
    }

    fn wrong_results(&self) -> Result<(), Failure> {
        let scene = self
            .lab
            .fresh("finish() refuses results of another number, shape or type");
        for open in [false, true] {
            for wrong in 0..4 {
                let mut cache = scene.done("a plain use", self.prepared(open))?;
                let mut step = scene.done("begin()", cache.begin(2))?;
                if step.recording != open {
                    return Err(scene.broken(format!(
                        "with a checkpoint open: {open}, begin() says recording: {}",
                        step.recording
                    )));
                }
                match wrong {
                    0 => drop(step.arrays.pop()),
                    1 => step.arrays.swap(0, 1),
                    2 => {
                        let other = step.arrays[0].to_dtype(candle_core::DType::F64);
                        step.arrays[0] = scene.done("to_dtype()", other.map_err(Into::into))?;
                    }
                    // The arrays are right; the records are absent, or given where none are wanted.
                    _ => {}
                }
                let records = if open { Vec::new() } else { step.arrays.clone() };
                if cache.finish(step.arrays, records).is_ok() {
                    return Err(scene.broken(format!("wrong results, case {wrong}, were taken")));
                }
                if cache.len() != 5 {
                    return Err(scene.broken("a refused finish() changed the length"));
                }
            }
        }
        let mut cache = (self.make)(&Recurrence::layout());
        match cache.finish(Vec::new(), Vec::new()) {
            Err(_) => Ok(()),
            Ok(()) => Err(scene.broken("results were taken though no call was begun")),
        }
    }

    fn torn(&self) -> Result<(), Failure> {
        let scene = self
            .lab
            .fresh("a cache cut off while its arrays are written refuses everything but reset() and load()");
        for open in [false, true] {
            for load in [false, true] {
                let mut cache = scene.done("a plain use", self.prepared(open))?;
                let good = scene.done("snapshot()", cache.snapshot())?;
                let step = scene.done("begin()", cache.begin(1))?;
                if !step.writes() {
                    // Nothing is pending, so nothing can be half written.
                    continue;
                }
                drop(step);
                let torn = |what: &str, result: recant_core::Result<()>| match result {
                    Err(Error::Torn { .. }) => Ok(()),
                    Err(other) => Err(scene.broken(format!("{what} says `{other}`, not that it is torn"))),
                    Ok(()) => Err(scene.broken(format!("{what} succeeded"))),
                };
                torn("snapshot()", cache.snapshot().map(drop))?;
                torn("trim()", cache.trim(0))?;
                torn("begin()", cache.begin(1).map(drop))?;
                torn("admit()", cache.admit(1))?;
                torn("checkpoint()", cache.checkpoint().map(drop))?;
                if cache.trimmable() != 0 {
                    return Err(scene.broken("it says that tokens can be trimmed"));
                }
                if load {
                    scene.done("load()", cache.load(&good))?;
                } else {
                    cache.reset();
                    scene.done(
                        "a call after reset()",
                        self.layer.feed(cache.as_mut(), &[1, 2, 3, 4, 5]),
                    )?;
                }
                let after = scene.done("snapshot()", cache.snapshot())?;
                scene.same_snapshot(&after, &good, "after reset() or load() the state is another")?;
            }
        }
        Ok(())
    }
}
