//! Folding of records, for caches.

use candle_core::Tensor;
use recant_core::{Fold, RecordSlice};

use crate::pool::{self, Shared, Unwritten};
use crate::simd;
use crate::tensors::tensor;
use crate::Result;

use super::forward::{records, rows_of, together, HeldRecords};
use super::kernel::{apart, Layer, Segment, Unit, Window};
use super::tile::State;
use super::{check_fold, GatedDeltaShape, OP};

/// Folds by the kernel itself, as a call of no rows.
pub(super) struct CpuFold {
    pub(super) shape: GatedDeltaShape,
}

impl Fold for CpuFold {
    fn fold(&self, arrays: &[Tensor], records: &[RecordSlice]) -> recant_core::Result<Vec<Tensor>> {
        Ok(fold(&self.shape, arrays, records)?)
    }
}

fn fold(shape: &GatedDeltaShape, arrays: &[Tensor], slices: &[RecordSlice]) -> Result<Vec<Tensor>> {
    check_fold(shape, arrays, slices)?;
    let [conv, state, scale] =
        [("conv", 0), ("state", 1), ("scale", 2)].map(|(name, i)| OP.hold(name, &arrays[i]));
    let (conv, state, scale) = (conv?, state?, scale?);
    let held = slices.iter().map(HeldRecords::new).collect::<Result<Vec<_>>>()?;
    let fold = records(shape, &held)?;

    let mut rows = rows_of(conv.f32()?, shape.channels());
    rows.extend(fold.iter().map(|record| record.input));

    let mut state = state.f32()?.to_vec();
    let mut new_scale = vec![0.0; shape.value_heads * apart(1)];
    let mut new_conv = Unwritten::new(conv.f32()?.len());
    let work = state.len() * (1 + fold.len());
    let shared = Shared::new(&mut state);
    let layer = Layer {
        shape,
        conv: &[],
        a_log: &[],
        dt_bias: &[],
        norm: &[],
    };
    let segment = Segment {
        projected: &[],
        rows: 0,
        history: Vec::new(),
        fold,
        replay: Vec::new(),
        state: State::Write(&shared),
        scale: scale.f32()?,
        new_scale: Some(Shared::new(&mut new_scale)),
        window: Some(Window::new(shape, rows, &mut new_conv)),
        records: None,
        mixed: Shared::new(&mut []),
    };
    let isa = simd::isa();
    pool::for_each(shape.key_heads, work, &|key_head| {
        pool::with_scratch(Unit::scratch(shape, 0), |scratch| {
            simd::run(
                isa,
                Unit {
                    layer: &layer,
                    segment: &segment,
                    key_head,
                    scratch,
                },
            );
        });
    });
    Ok(vec![
        // SAFETY: the units have all channels between them.
        tensor(unsafe { new_conv.written() }, arrays[0].dims())?,
        tensor(state, arrays[1].dims())?,
        tensor(together(&new_scale, 1), arrays[2].dims())?,
    ])
}
