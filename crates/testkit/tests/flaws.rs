//! Caches and models that are wrong in one way each, as others have been: every flaw must be found.

use recant_core::candle::{DType, Device, Tensor};
use recant_core::{
    ArraysCache, AttentionCache, AttentionLayout, Cache, CacheOptions, Checkpoint, Footprint, KvCache,
    KvView, LanguageModel, ModelSpec, Output, RecurrentCache, RecurrentLayout, RecurrentStep, Result,
    Segment, Snapshot,
};
use recant_testkit::conformance::{self, Options};
use recant_testkit::ScriptedModel;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flaw {
    None,
    TrimDoesNothing,
    TrimTakesWhatItCan,
    TrimmableIsTooMuch,
    TrimmableIsTooLittle,
    TrimGoesBelowTheCheckpoint,
    RestoreDoesNothing,
    RestoreTakesAnyCheckpoint,
    CommitDropsTokens,
    SnapshotSharesStorage,
    SnapshotLacksTheLast,
    FitsAcceptsAll,
    FitsRefusesAll,
    ResetKeepsTokens,
    FootprintForgetsTokens,
    RecordsGrow,
    AdmitsNothing,
    ViewLacksTheOldest,
    ViewLagsBehind,
    ViewHasAWindow,
    BlocksOutOfOrder,
    WrongRowsAreTaken,
    FoldLeftOut,
    ReplayLeftOut,
    AbandonDoesNothing,
    WrongResultsAreTaken,
    TornIsForgotten,
    KindIsEmpty,
    RoundsToHalf,
}

/// A right cache with a flaw put over it.
struct Flawed<C> {
    inner: C,
    flaw: Flaw,
    calls: usize,
    last: Option<KvView>,
}

impl<C> Flawed<C> {
    fn new(inner: C, flaw: Flaw) -> Self {
        Self {
            inner,
            flaw,
            calls: 0,
            last: None,
        }
    }

    fn is(&self, flaw: Flaw) -> bool {
        self.flaw == flaw
    }
}

impl<C: Cache> Cache for Flawed<C> {
    fn kind(&self) -> &str {
        if self.is(Flaw::KindIsEmpty) {
            ""
        } else {
            self.inner.kind()
        }
    }

    fn len(&self) -> usize {
        self.inner.len()
    }

    fn trimmable(&self) -> usize {
        match self.flaw {
            Flaw::TrimmableIsTooMuch => self.inner.len().min(self.inner.trimmable() + 1),
            Flaw::TrimmableIsTooLittle => self.inner.trimmable().saturating_sub(1),
            Flaw::TrimGoesBelowTheCheckpoint => self.inner.len(),
            _ => self.inner.trimmable(),
        }
    }

    fn trim(&mut self, n: usize) -> Result<()> {
        match self.flaw {
            Flaw::TrimDoesNothing => Ok(()),
            Flaw::TrimTakesWhatItCan => self.inner.trim(n.min(self.inner.trimmable())),
            Flaw::TrimGoesBelowTheCheckpoint if n <= self.inner.len() => {
                let tokens = self.inner.len() - n;
                match self.inner.trim(n) {
                    Ok(()) => Ok(()),
                    Err(_) => {
                        self.inner.reset();
                        Err(recant_core::Error::other(format!("{tokens} were left")))
                    }
                }
            }
            _ => self.inner.trim(n),
        }
    }

    fn checkpoint(&mut self) -> Result<Checkpoint> {
        self.calls += 1;
        self.inner.checkpoint()
    }

    fn restore(&mut self, to: &Checkpoint) -> Result<()> {
        match self.flaw {
            Flaw::RestoreDoesNothing => Ok(()),
            Flaw::RestoreTakesAnyCheckpoint => match self.inner.restore(to) {
                Err(_) if self.inner.len() == to.len() => Ok(()),
                result => result,
            },
            _ => self.inner.restore(to),
        }
    }

    fn commit(&mut self, checkpoint: Checkpoint) {
        if self.is(Flaw::CommitDropsTokens) {
            let _ = self.inner.trim(1);
        }
        self.inner.commit(checkpoint);
    }

    fn snapshot(&self) -> Result<Snapshot> {
        let snapshot = match self.inner.snapshot() {
            Err(_) if self.is(Flaw::TornIsForgotten) => return Ok(Snapshot::new(self.kind(), self.len())),
            snapshot => snapshot?,
        };
        match (&self.last, self.flaw) {
            (Some(view), Flaw::SnapshotSharesStorage) if !self.is_empty() => {
                let keys = view.blocks[0].keys.narrow(0, 0, self.len())?;
                Ok(snapshot.with_array("keys", keys))
            }
            (_, Flaw::SnapshotLacksTheLast) if self.len() > 1 => {
                let keys = snapshot.arrays()["keys"].narrow(0, 0, self.len() - 1)?;
                Ok(snapshot.with_array("keys", keys))
            }
            _ => Ok(snapshot),
        }
    }

    fn fits(&self, from: &Snapshot) -> Result<()> {
        match self.flaw {
            Flaw::FitsAcceptsAll => Ok(()),
            Flaw::FitsRefusesAll => Err(recant_core::Error::other("no")),
            _ => self.inner.fits(from),
        }
    }

    fn load(&mut self, from: &Snapshot) -> Result<()> {
        self.inner.load(from)
    }

    fn reset(&mut self) {
        if !self.is(Flaw::ResetKeepsTokens) {
            self.inner.reset();
        }
    }

    fn footprint(&self) -> Footprint {
        let mut footprint = self.inner.footprint();
        match self.flaw {
            Flaw::FootprintForgetsTokens => footprint.live = 0,
            Flaw::RecordsGrow => footprint.records += 8 * self.calls,
            _ => {}
        }
        footprint
    }

    fn admit(&self, tokens: usize) -> Result<()> {
        match self.flaw {
            Flaw::AdmitsNothing => Err(recant_core::Error::other("no")),
            _ => self.inner.admit(tokens),
        }
    }
}

impl AttentionCache for Flawed<KvCache> {
    fn layout(&self) -> &AttentionLayout {
        self.inner.layout()
    }

    fn append(&mut self, keys: &Tensor, values: &Tensor) -> Result<()> {
        if self.is(Flaw::ViewLagsBehind) && !self.is_empty() {
            self.last = Some(self.inner.view()?);
        }
        let appended = match self.flaw {
            Flaw::RoundsToHalf if keys.dtype() == DType::F32 => {
                let round =
                    |rows: &Tensor| rows.affine(0.37, 0.)?.to_dtype(DType::BF16)?.to_dtype(DType::F32);
                self.inner.append(&round(keys)?, values)
            }
            _ => self.inner.append(keys, values),
        };
        match appended {
            Err(_) if self.is(Flaw::WrongRowsAreTaken) => return Ok(()),
            result => result?,
        }
        if !self.is(Flaw::ViewLagsBehind) {
            self.last = Some(self.inner.view()?);
        }
        Ok(())
    }

    fn view(&self) -> Result<KvView> {
        let mut view = self.inner.view()?;
        match (self.flaw, &self.last) {
            (Flaw::ViewLacksTheOldest, _) if self.len() > 8 => {
                let block = &mut view.blocks[0];
                block.start += 1;
                block.rows -= 1;
                block.keys = block.keys.narrow(0, 1, block.rows)?;
                block.values = block.values.narrow(0, 1, block.rows)?;
            }
            (Flaw::ViewLagsBehind, Some(last)) => view = last.clone(),
            (Flaw::ViewHasAWindow, _) => view.window = Some(1 << 20),
            (Flaw::BlocksOutOfOrder, _) if self.len() > 1 => {
                let first = view.blocks.remove(0);
                let mut later = first.clone();
                later.start += 1;
                later.rows -= 1;
                later.keys = first.keys.narrow(0, 1, later.rows)?;
                later.values = first.values.narrow(0, 1, later.rows)?;
                view.blocks = vec![later, recant_core::KvBlock { rows: 1, ..first }];
            }
            _ => {}
        }
        Ok(view)
    }
}

impl RecurrentCache for Flawed<ArraysCache> {
    fn layout(&self) -> &RecurrentLayout {
        self.inner.layout()
    }

    fn begin(&mut self, tokens: usize) -> Result<RecurrentStep> {
        let mut step = self.inner.begin(tokens)?;
        match self.flaw {
            Flaw::FoldLeftOut => step.fold.clear(),
            Flaw::ReplayLeftOut => step.replay.clear(),
            _ => {}
        }
        Ok(step)
    }

    fn finish(&mut self, arrays: Vec<Tensor>, records: Vec<Tensor>) -> Result<()> {
        match self.inner.finish(arrays, records) {
            Err(_) if self.is(Flaw::WrongResultsAreTaken) => Ok(()),
            result => result,
        }
    }

    fn abandon(&mut self) {
        if !self.is(Flaw::AbandonDoesNothing) {
            self.inner.abandon();
        }
    }
}

fn attention(flaw: Flaw, options: &Options) -> String {
    let layout = AttentionLayout {
        kv_heads: 2,
        head_dim: 3,
        dtype: DType::F32,
    };
    let make = || -> Box<dyn AttentionCache> {
        Box::new(Flawed::new(KvCache::new(layout.clone(), &Device::Cpu), flaw))
    };
    match conformance::attention_cache(make, options) {
        Ok(()) => String::new(),
        Err(failure) => failure.to_string(),
    }
}

fn recurrent(flaw: Flaw) -> String {
    let make = |layout: &RecurrentLayout| -> Box<dyn RecurrentCache> {
        match ArraysCache::new(layout.clone(), 64, &Device::Cpu) {
            Ok(cache) => Box::new(Flawed::new(cache, flaw)),
            Err(error) => panic!("{error}"),
        }
    };
    match conformance::recurrent_cache(make, &Options::default()) {
        Ok(()) => String::new(),
        Err(failure) => failure.to_string(),
    }
}

#[test]
fn every_flaw_of_an_attention_cache_is_found() {
    let options = Options::default();
    assert_eq!(attention(Flaw::None, &options), "");
    for (flaw, says) in [
        (Flaw::TrimDoesNothing, "its length is"),
        (Flaw::TrimTakesWhatItCan, "succeeded and must be refused"),
        (Flaw::TrimmableIsTooMuch, "can be trimmed"),
        (
            Flaw::TrimmableIsTooLittle,
            "a trim of more than is trimmable succeeded",
        ),
        (Flaw::TrimGoesBelowTheCheckpoint, "can be trimmed"),
        (Flaw::RestoreDoesNothing, "its length is"),
        (
            Flaw::RestoreTakesAnyCheckpoint,
            "a checkpoint is good for its own cache",
        ),
        (Flaw::CommitDropsTokens, "its length is"),
        (Flaw::SnapshotSharesStorage, "a snapshot changed when"),
        (Flaw::SnapshotLacksTheLast, "was refused"),
        (
            Flaw::FitsAcceptsAll,
            "fits() of a snapshot with another kind succeeded",
        ),
        (
            Flaw::FitsRefusesAll,
            "fits(), of a snapshot of the same kind of cache, was refused",
        ),
        (Flaw::ResetKeepsTokens, "reset"),
        (Flaw::FootprintForgetsTokens, "bytes were live"),
        (Flaw::RecordsGrow, "records"),
        (Flaw::AdmitsNothing, "they were fed all the same"),
        (Flaw::ViewLacksTheOldest, "lacks position 0"),
        (Flaw::ViewLagsBehind, "lacks position"),
        (Flaw::ViewHasAWindow, "the view has window"),
        (Flaw::BlocksOutOfOrder, "after one that ended at"),
        (Flaw::WrongRowsAreTaken, "were appended"),
        (Flaw::KindIsEmpty, "its kind is an empty string"),
    ] {
        let found = attention(flaw, &options);
        assert!(found.contains(says), "{flaw:?}: `{found}`");
    }
}

#[test]
fn a_cache_that_rounds_is_held_against_itself_when_told_so() {
    let exact = Options::default();
    let lossy = Options {
        exact: false,
        ..Options::default()
    };
    assert!(attention(Flaw::RoundsToHalf, &exact).contains("is not what it must"));
    assert_eq!(attention(Flaw::RoundsToHalf, &lossy), "");
    // The laws themselves hold for lossy caches too.
    assert!(attention(Flaw::ViewLacksTheOldest, &lossy).contains("lacks position 0"));
    assert!(attention(Flaw::CommitDropsTokens, &lossy).contains("its length is"));
}

#[test]
fn every_flaw_of_a_recurrent_cache_is_found() {
    assert_eq!(recurrent(Flaw::None), "");
    for (flaw, says) in [
        (Flaw::TrimDoesNothing, "succeeded and must be refused"),
        (Flaw::TrimTakesWhatItCan, "succeeded and must be refused"),
        (Flaw::TrimmableIsTooLittle, "can be trimmed"),
        (Flaw::RestoreDoesNothing, "its length is"),
        (
            Flaw::RestoreTakesAnyCheckpoint,
            "a checkpoint is good for its own cache",
        ),
        (Flaw::ResetKeepsTokens, "reset"),
        (Flaw::RecordsGrow, "records"),
        (Flaw::FoldLeftOut, "is not what it must"),
        (Flaw::ReplayLeftOut, "is not what it must"),
        (
            Flaw::AbandonDoesNothing,
            "a call that is abandoned leaves no trace",
        ),
        (Flaw::WrongResultsAreTaken, "were taken"),
        (Flaw::TornIsForgotten, "snapshot() succeeded"),
    ] {
        let found = recurrent(flaw);
        assert!(found.contains(says), "{flaw:?}: `{found}`");
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ModelFlaw {
    None,
    DependsOnTheGrouping,
    MixesSequences,
    TakesWhatItMustRefuse,
    LastIsFirst,
}

struct FlawedModel(ScriptedModel, ModelFlaw);

impl LanguageModel for FlawedModel {
    fn spec(&self) -> &ModelSpec {
        self.0.spec()
    }

    fn forward(&self, batch: &mut [Segment<'_>]) -> Result<Output> {
        let tokens: Vec<usize> = batch.iter().map(|segment| segment.tokens.len()).collect();
        let mut output = match self.0.forward(batch) {
            Err(_) if self.1 == ModelFlaw::TakesWhatItMustRefuse => {
                return Ok(Output { segments: Vec::new() })
            }
            output => output?,
        };
        let change = match self.1 {
            ModelFlaw::DependsOnTheGrouping => tokens[0] == 7,
            ModelFlaw::MixesSequences => tokens.len() > 1,
            ModelFlaw::LastIsFirst => output.segments[0]
                .logits
                .as_ref()
                .is_some_and(|l| l.dims()[0] < tokens[0]),
            ModelFlaw::None | ModelFlaw::TakesWhatItMustRefuse => false,
        };
        if change {
            if let Some(logits) = &mut output.segments[0].logits {
                // The smallest step that f32 can take at 4: no tolerance would see it.
                *logits = (&*logits + 4.8e-7)?;
            }
        }
        Ok(output)
    }
}

#[test]
fn every_flaw_of_a_model_is_found() {
    for (flaw, says) in [
        (ModelFlaw::None, ""),
        (ModelFlaw::DependsOnTheGrouping, "is not what it must"),
        (ModelFlaw::MixesSequences, "sequences that share a call"),
        (ModelFlaw::TakesWhatItMustRefuse, "were taken"),
        (ModelFlaw::LastIsFirst, "gave other bits than all of them"),
    ] {
        let model = FlawedModel(ScriptedModel::new(1, 32), flaw);
        let result = conformance::language_model(&model, &CacheOptions::default(), &Options::default());
        let found = result
            .err()
            .map_or_else(String::new, |failure| failure.to_string());
        assert!(
            found.contains(says) && found.is_empty() == says.is_empty(),
            "{flaw:?}: `{found}`"
        );
    }
}

#[test]
#[should_panic(expected = "law broken")]
fn the_asserting_form_panics_with_the_law() {
    let layout = AttentionLayout {
        kv_heads: 1,
        head_dim: 1,
        dtype: DType::F32,
    };
    conformance::assert_attention_cache(
        || {
            Box::new(Flawed::new(
                KvCache::new(layout.clone(), &Device::Cpu),
                Flaw::RestoreDoesNothing,
            ))
        },
        &Options::default(),
    );
}
