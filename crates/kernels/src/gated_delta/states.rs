//! State tensors, several at once, for writing.
//!
//! candle lends one tensor's storage at a time for writing, for as long as an operation runs. So the operations nest:
//! each lends one state and runs the next.

use std::cell::RefCell;

use candle_core::{CpuStorage, InplaceOp1, Layout, Tensor};

use crate::pool::Shared;
use crate::Result;

/// A state, and those lent before it.
struct Lent<'a> {
    state: &'a Shared<'a, f32>,
    before: Option<&'a Lent<'a>>,
}

type Body<'b> = dyn FnMut(&[&Shared<'_, f32>]) + 'b;

struct Lend<'a, 'b> {
    rest: &'a [&'a Tensor],
    before: Option<&'a Lent<'a>>,
    body: RefCell<&'a mut Body<'b>>,
}

/// Runs `body` once with the elements of all `states`, which are contiguous f32 CPU tensors that share no storage with
/// each other, nor with anything that is held for reading.
pub(super) fn with_states(states: &[&Tensor], body: &mut Body<'_>) -> Result<()> {
    Ok(lend(states, None, body)?)
}

fn lend(rest: &[&Tensor], before: Option<&Lent<'_>>, body: &mut Body<'_>) -> candle_core::Result<()> {
    let Some((state, rest)) = rest.split_first() else {
        let mut states = Vec::new();
        let mut last = before;
        while let Some(lent) = last {
            states.push(lent.state);
            last = lent.before;
        }
        states.reverse();
        body(&states);
        return Ok(());
    };
    state.inplace_op1(&Lend {
        rest,
        before,
        body: RefCell::new(body),
    })
}

impl InplaceOp1 for Lend<'_, '_> {
    fn name(&self) -> &'static str {
        "gated_delta"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let (CpuStorage::F32(elements), Some((start, end))) = (storage, layout.contiguous_offsets()) else {
            candle_core::bail!("a gated delta state must be contiguous f32");
        };
        let state = Shared::new(&mut elements[start..end]);
        let lent = Lent {
            state: &state,
            before: self.before,
        };
        let mut body = self.body.borrow_mut();
        lend(self.rest, Some(&lent), &mut **body)
    }
}
