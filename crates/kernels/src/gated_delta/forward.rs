//! A call on the CPU: operands held, aliases refused, work handed out.

use candle_core::Tensor;
use recant_core::RecordSlice;

use crate::pool::{self, Shared, Unwritten};
use crate::simd;
use crate::tensors::{tensor, Held};
use crate::{Error, Result};

use super::kernel::{apart, Layer, Record, Records, Segment, Unit, Window};
use super::states::with_states;
use super::tile::State;
use super::{DeltaAdvance, DeltaOutput, DeltaSegment, GatedDeltaShape, Weights, OP};

/// A [`RecordSlice`], held.
pub(super) struct HeldRecords<'t> {
    slice: &'t RecordSlice,
    arrays: [Held<'t>; 4],
}

impl<'t> HeldRecords<'t> {
    /// Holds a slice that was checked.
    pub(super) fn new(slice: &'t RecordSlice) -> Result<Self> {
        let hold = |i: usize, operand| OP.hold(operand, &slice.arrays[i]);
        Ok(Self {
            slice,
            arrays: [
                hold(0, "key")?,
                hold(1, "decay")?,
                hold(2, "update")?,
                hold(3, "input")?,
            ],
        })
    }
}

/// Token by token.
pub(super) fn records<'a>(shape: &GatedDeltaShape, held: &'a [HeldRecords<'_>]) -> Result<Vec<Record<'a>>> {
    let mut records = Vec::new();
    for HeldRecords { slice, arrays } in held {
        let [key, decay, update, input] = arrays;
        let (key, decay, update, input) = (key.f32()?, decay.f32()?, update.f32()?, input.f32()?);
        records.extend(slice.rows.clone().map(|row| Record {
            key: row_of(key, row, shape.keys()),
            decay: row_of(decay, row, shape.value_heads),
            update: row_of(update, row, shape.values()),
            input: row_of(input, row, shape.channels()),
        }));
    }
    Ok(records)
}

fn row_of(x: &[f32], row: usize, width: usize) -> &[f32] {
    &x[row * width..(row + 1) * width]
}

pub(super) fn rows_of(x: &[f32], width: usize) -> Vec<&[f32]> {
    x.chunks_exact(width).collect()
}

/// One segment's operands.
struct HeldSegment<'t> {
    conv: Held<'t>,
    scale: Held<'t>,
    /// The state, unless it is to be written.
    state: Option<Held<'t>>,
    fold: Vec<HeldRecords<'t>>,
    replay: Vec<HeldRecords<'t>>,
}

/// What one segment's call gives.
struct Given {
    /// The new window, if it moves.
    conv: Option<Unwritten>,
    /// The new scale, if it moves: a number of each head, [`apart`].
    scale: Option<Vec<f32>>,
    /// If the call is recorded.
    records: Option<GivenRecords>,
}

struct GivenRecords {
    key: Unwritten,
    /// Head by head, [`apart`].
    decay: Vec<f32>,
    update: Unwritten,
    input: Unwritten,
}

/// `[rows, heads]` of numbers that lie head by head, [`apart`].
pub(super) fn together(by_head: &[f32], rows: usize) -> Vec<f32> {
    let heads = by_head.chunks_exact(apart(rows));
    let mut numbers = Vec::with_capacity(rows * heads.len());
    for row in 0..rows {
        numbers.extend(heads.clone().map(|head| head[row]));
    }
    numbers
}

/// Runs operands that were checked for shape and type.
pub(super) fn forward(
    weights: &Weights,
    projected: &Tensor,
    segments: &[DeltaSegment],
) -> Result<DeltaOutput> {
    let shape = &weights.shape;
    let rows = projected.dims()[0];
    let held_projected = OP.hold("projected", projected)?;
    let held_weights = (
        OP.hold("conv_weight", &weights.conv)?,
        OP.hold("a_log", &weights.a_log)?,
        OP.hold("dt_bias", &weights.dt_bias)?,
        OP.hold("norm", &weights.norm)?,
    );
    let layer = Layer {
        shape,
        conv: held_weights.0.f32()?,
        a_log: held_weights.1.f32()?,
        dt_bias: held_weights.2.f32()?,
        norm: held_weights.3.f32()?,
    };
    let x = held_projected.f32()?;

    let (held, written) = hold_segments(segments, &held_projected)?;
    let mut inputs = Vec::with_capacity(segments.len());
    let mut given = Vec::with_capacity(segments.len());
    let mut start = 0;
    for (DeltaSegment { rows, step }, held) in segments.iter().zip(&held) {
        let fold = records(shape, &held.fold)?;
        let replay = records(shape, &held.replay)?;
        let x = &x[start * shape.projected()..(start + rows) * shape.projected()];
        let mut seen = rows_of(held.conv.f32()?, shape.channels());
        seen.extend(fold.iter().map(|record| record.input));
        let folded = seen.len();
        seen.extend(replay.iter().map(|record| record.input));
        let history = seen[seen.len() + 1 - shape.conv_kernel..].to_vec();
        if step.recording {
            seen.truncate(folded);
        } else {
            let new = x.chunks_exact(shape.projected());
            seen.extend(new.map(|row| &row[..shape.channels()]));
        }
        let moves = !step.recording || !fold.is_empty();
        given.push(Given {
            scale: moves.then(|| vec![0.0; shape.value_heads * apart(1)]),
            conv: moves.then(|| Unwritten::new((shape.conv_kernel - 1) * shape.channels())),
            records: step.recording.then(|| GivenRecords {
                key: Unwritten::new(rows * shape.keys()),
                decay: vec![0.0; shape.value_heads * apart(*rows)],
                update: Unwritten::new(rows * shape.values()),
                input: Unwritten::new(rows * shape.channels()),
            }),
        });
        inputs.push((x, *rows, fold, replay, history, seen, held.scale.f32()?));
        start += rows;
    }

    let mut mixed = vec![0.0; rows * shape.values()];
    let mut work = 0;
    {
        let mut body = |states: &[&Shared<'_, f32>]| {
            let mut states = states.iter();
            let mut mixed = mixed.as_mut_slice();
            let mut ready = Vec::with_capacity(inputs.len());
            for (((x, rows, fold, replay, history, seen, scale), held), given) in
                inputs.drain(..).zip(&held).zip(&mut given)
            {
                let (own, rest) = std::mem::take(&mut mixed).split_at_mut(rows * shape.values());
                mixed = rest;
                let state = match held.state.as_ref().map(Held::f32) {
                    Some(Ok(state)) => State::Read(state),
                    // A state that is not held for reading was lent for writing, in the same order.
                    _ => match states.next() {
                        Some(state) => State::Write(state),
                        None => unreachable!("a state was lent for each that is written"),
                    },
                };
                work += (2 + 3 * rows + fold.len() + replay.len()) * shape.values() * shape.key_dim;
                ready.push(Segment {
                    projected: x,
                    rows,
                    history,
                    fold,
                    replay,
                    state,
                    scale,
                    new_scale: given.scale.as_mut().map(|scale| Shared::new(scale)),
                    window: given.conv.as_mut().map(|conv| Window::new(shape, seen, conv)),
                    records: given.records.as_mut().map(|records| Records {
                        key: records.key.shared(),
                        decay: Shared::new(&mut records.decay),
                        update: records.update.shared(),
                        input: records.input.shared(),
                    }),
                    mixed: Shared::new(own),
                });
            }
            run(&layer, &ready, work);
        };
        with_states(&written, &mut body)?;
    }

    let mut advances = Vec::with_capacity(segments.len());
    for (DeltaSegment { rows, step }, given) in segments.iter().zip(given) {
        let conv = match given.conv {
            // SAFETY: the units have all channels between them.
            Some(conv) => tensor(unsafe { conv.written() }, step.arrays[0].dims())?,
            None => step.arrays[0].clone(),
        };
        let records = match given.records {
            Some(records) => {
                // SAFETY: the units have all heads and all channels of all rows between them.
                let [key, update, input] =
                    [records.key, records.update, records.input].map(|x| unsafe { x.written() });
                vec![
                    tensor(key, &[*rows, shape.key_heads, shape.key_dim])?,
                    tensor(together(&records.decay, *rows), &[*rows, shape.value_heads])?,
                    tensor(update, &[*rows, shape.value_heads, shape.value_dim])?,
                    tensor(input, &[*rows, shape.channels()])?,
                ]
            }
            None => Vec::new(),
        };
        let scale = match given.scale {
            Some(scale) => tensor(together(&scale, 1), step.arrays[2].dims())?,
            None => step.arrays[2].clone(),
        };
        advances.push(DeltaAdvance {
            arrays: vec![conv, step.arrays[1].clone(), scale],
            records,
        });
    }
    Ok(DeltaOutput {
        mixed: tensor(mixed, &[rows, shape.values()])?,
        segments: advances,
    })
}

/// One task a segment and key head.
fn run(layer: &Layer<'_>, segments: &[Segment<'_>], work: usize) {
    let key_heads = layer.shape.key_heads;
    let isa = simd::isa();
    pool::for_each(segments.len() * key_heads, work, &|task| {
        let segment = &segments[task / key_heads];
        pool::with_scratch(Unit::scratch(layer.shape, segment.rows), |scratch| {
            simd::run(
                isa,
                Unit {
                    layer,
                    segment,
                    key_head: task % key_heads,
                    scratch,
                },
            );
        });
    });
}

/// Holds what is read, lists the states that are written, and refuses a written state that shares storage with anything.
fn hold_segments<'t>(
    segments: &'t [DeltaSegment],
    projected: &Held<'_>,
) -> Result<(Vec<HeldSegment<'t>>, Vec<&'t Tensor>)> {
    let mut held = Vec::with_capacity(segments.len());
    let mut written = Vec::new();
    let mut operands = Vec::with_capacity(1 + 7 * segments.len());
    operands.push(Operand {
        address: projected.address(),
        name: "projected",
        segment: None,
        written: false,
    });
    for (index, DeltaSegment { step, .. }) in segments.iter().enumerate() {
        let mut note = |held: &Held<'_>, name: &'static str, written: bool| {
            operands.push(Operand {
                address: held.address(),
                name,
                segment: Some(index),
                written,
            });
        };
        let conv = OP.hold("conv", &step.arrays[0])?;
        note(&conv, "conv", false);
        let state = OP.hold("state", &step.arrays[1])?;
        note(&state, "state", step.writes());
        if step.writes() {
            written.push(&step.arrays[1]);
        }
        let scale = OP.hold("scale", &step.arrays[2])?;
        note(&scale, "scale", false);
        let mut hold_all = |slices: &'t [RecordSlice]| {
            let held = slices.iter().map(HeldRecords::new).collect::<Result<Vec<_>>>()?;
            for array in held.iter().flat_map(|held| &held.arrays) {
                note(array, "records", false);
            }
            Ok::<_, Error>(held)
        };
        held.push(HeldSegment {
            conv,
            scale,
            fold: hold_all(&step.fold)?,
            replay: hold_all(&step.replay)?,
            state: (!step.writes()).then_some(state),
        });
    }
    for (i, a) in operands.iter().enumerate() {
        for b in &operands[..i] {
            if a.address == b.address && (a.written || b.written) {
                return Err(Error::Aliased {
                    op: OP.0,
                    first: b.to_string(),
                    second: a.to_string(),
                });
            }
        }
    }
    Ok((held, written))
}

/// Where an operand's storage is, and how to call it.
struct Operand {
    address: usize,
    name: &'static str,
    segment: Option<usize>,
    written: bool,
}

impl std::fmt::Display for Operand {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "`{}`", self.name)?;
        match self.segment {
            Some(segment) => write!(f, " of segment {segment}"),
            None => Ok(()),
        }
    }
}
