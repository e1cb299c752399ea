//! Gated grouped-query attention over blocks of cached keys and values.

mod inputs;
mod kernel;
mod partial;
mod tile;

use std::ops::Range;

use candle_core::{DType, Tensor};
use half::{bf16, f16};
use recant_core::KvView;

use crate::tensors::{tensor, Held, Op};
use crate::{composed, Backend, Error, Result};

pub use inputs::{attention_inputs, AttentionInputs};

const OP: Op = Op("attention");

/// Sizes of an attention layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    /// Query heads.
    pub heads: usize,
    /// Key/value heads. Query head `h` reads head `h / (heads / kv_heads)`.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// How many of a head's first dimensions are rotated.
    pub rotary_dims: usize,
    /// Whether a head's output is multiplied by the sigmoid of a gate, which comes with the query.
    pub gated: bool,
    /// Added to the mean square in the norms of queries and keys.
    pub eps: f64,
}

impl AttentionShape {
    fn check(&self, op: Op) -> Result<()> {
        let Self {
            heads,
            kv_heads,
            head_dim,
            ..
        } = *self;
        if heads == 0 || kv_heads == 0 || head_dim == 0 || heads % kv_heads != 0 {
            return Err(op.value(format!(
                "{heads} query heads of width {head_dim} over {kv_heads} key/value heads; \
                 all must be at least 1, and the first a multiple of the last"
            )));
        }
        if self.rotary_dims % 2 == 1 || self.rotary_dims > head_dim {
            return Err(op.value(format!(
                "{} rotary dimensions of {head_dim}; the number must be even and fit",
                self.rotary_dims
            )));
        }
        Ok(())
    }

    /// Query heads that read one key/value head.
    pub(crate) fn group(&self) -> usize {
        self.heads / self.kv_heads
    }
}

/// The rows of one sequence in a call.
#[derive(Debug, Clone, Copy)]
pub struct AttentionSegment<'a> {
    /// How many rows.
    pub rows: usize,
    /// Position of the first.
    pub position: usize,
    /// What they see: their own keys and values included.
    pub view: &'a KvView,
}

/// Which positions a query sees.
#[derive(Clone, Copy)]
pub(crate) struct Sight {
    window: Option<usize>,
    sink: usize,
}

impl Sight {
    pub(crate) fn of(view: &KvView) -> Self {
        Self {
            window: view.window,
            sink: view.sink,
        }
    }

    /// The first position that the query at `position` sees by its window.
    pub(crate) fn first(self, position: usize) -> usize {
        self.window
            .map_or(0, |window| (position + 1).saturating_sub(window))
    }

    pub(crate) fn sees(self, position: usize, key: usize) -> bool {
        key <= position && (key >= self.first(position) || key < self.sink)
    }

    /// The keys among `keys` that some query at the positions from `oldest` to `newest` sees: first positions, then those
    /// of windows. Either may be empty.
    pub(crate) fn seen(self, oldest: usize, newest: usize, keys: &Range<usize>) -> [Range<usize>; 2] {
        let first = self.first(oldest);
        let end = keys.end.min(newest + 1);
        [
            keys.start..end.min(self.sink.min(first)),
            keys.start.max(first)..end,
        ]
    }

    /// Whether the queries at the positions from `oldest` to `newest` all see all of `keys`. False is no promise where the
    /// keys are partly in the sink only.
    pub(crate) fn all_see(self, oldest: usize, newest: usize, keys: &Range<usize>) -> bool {
        keys.end <= oldest + 1 && (keys.start >= self.first(newest) || keys.end <= self.sink)
    }
}

/// Attention of every segment's rows over what its view holds: softmax of `q . k / sqrt(head_dim)`, values weighted by
/// it, times `sigmoid(gate)`.
///
/// A row's result depends on its query and on the keys and values that it sees; not on how they are cut into blocks, nor
/// on other rows.
///
/// # Shapes
/// `q`: `[rows, heads, head_dim]`; `gate`: `[rows, heads * head_dim]`; both f32, the segments' rows end to end. Blocks:
/// `[_, kv_heads, head_dim]`, f32, f16 or bf16. Result: `[rows, heads * head_dim]`, f32.
///
/// # Errors
/// Another shape, type or device, not contiguous, a gate where there must be none or the other way about, blocks that
/// are not in ascending order, or a view that lacks a position that a row sees.
pub fn attention(
    backend: Backend,
    shape: &AttentionShape,
    q: &Tensor,
    gate: Option<&Tensor>,
    segments: &[AttentionSegment<'_>],
) -> Result<Tensor> {
    shape.check(OP)?;
    let AttentionShape { heads, head_dim, .. } = *shape;
    let rows = check_rows(q, segments)?;
    OP.shape("q", q, &[rows, heads, head_dim])?;
    OP.dtype("q", q, DType::F32)?;
    match gate {
        Some(gate) if shape.gated => {
            OP.shape("gate", gate, &[rows, heads * head_dim])?;
            OP.dtype("gate", gate, DType::F32)?;
        }
        None if !shape.gated => {}
        _ => {
            return Err(OP.value(format!(
                "the shape says gated = {}, and a gate was {}given",
                shape.gated,
                if gate.is_some() { "" } else { "not " }
            )))
        }
    }
    for (index, segment) in segments.iter().enumerate() {
        check_view(shape, index, segment)?;
    }
    if backend == Backend::Composed {
        return composed::attention(shape, q, gate, segments);
    }
    let q = OP.hold("q", q)?;
    let gate = gate.map(|gate| OP.hold("gate", gate)).transpose()?;
    let mut held = Vec::with_capacity(segments.len());
    for segment in segments {
        let mut blocks = Vec::with_capacity(segment.view.blocks.len());
        for block in &segment.view.blocks {
            blocks.push((OP.hold("keys", &block.keys)?, OP.hold("values", &block.values)?));
        }
        held.push(blocks);
    }
    let mut queries = Vec::with_capacity(segments.len());
    let mut row = 0;
    for (segment, held) in segments.iter().zip(&held) {
        let mut blocks = Vec::with_capacity(held.len());
        for (block, (keys, values)) in segment.view.blocks.iter().zip(held) {
            blocks.push(kernel::Block {
                positions: block.start..block.start + block.rows,
                keys: elements(keys, block.keys.dtype())?,
                values: elements(values, block.values.dtype())?,
            });
        }
        queries.push(kernel::Segment {
            row,
            rows: segment.rows,
            position: segment.position,
            sight: Sight::of(segment.view),
            blocks,
        });
        row += segment.rows;
    }
    let gate = gate.as_ref().map(Held::f32).transpose()?;
    let mut out = vec![0.0; rows * heads * head_dim];
    kernel::attention(shape, q.f32()?, gate, &queries, &mut out);
    tensor(out, &[rows, heads * head_dim])
}

/// Elements of a cached array, in the type that they are stored in.
#[derive(Clone, Copy)]
pub(crate) enum Elements<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    Bf16(&'a [bf16]),
}

fn elements<'a>(held: &'a Held<'_>, dtype: DType) -> Result<Elements<'a>> {
    Ok(match dtype {
        DType::F16 => Elements::F16(held.slice()?),
        DType::BF16 => Elements::Bf16(held.slice()?),
        _ => Elements::F32(held.slice()?),
    })
}

fn check_rows(q: &Tensor, segments: &[AttentionSegment<'_>]) -> Result<usize> {
    let rows = q.dims().first().copied().unwrap_or(0);
    let sum = segments
        .iter()
        .try_fold(0_usize, |sum, segment| sum.checked_add(segment.rows));
    if sum != Some(rows) {
        let expected = format!("[rows, heads, head_dim] with the segments' {sum:?} rows");
        return Err(OP.shape_error("q", q, expected));
    }
    Ok(rows)
}

/// Refuses blocks of another shape or out of order, and a hole where a row of the segment looks.
fn check_view(shape: &AttentionShape, index: usize, segment: &AttentionSegment<'_>) -> Result<()> {
    let view = segment.view;
    let mut end = 0;
    for block in &view.blocks {
        for (operand, array) in [("keys", &block.keys), ("values", &block.values)] {
            match *array.dims() {
                [rows, kv_heads, head_dim]
                    if rows >= block.rows && kv_heads == shape.kv_heads && head_dim == shape.head_dim => {}
                _ => {
                    let expected = format!(
                        "[at least {}, {}, {}]",
                        block.rows, shape.kv_heads, shape.head_dim
                    );
                    return Err(OP.shape_error(operand, array, expected));
                }
            }
            OP.float(operand, array)?;
        }
        let next = block.start.checked_add(block.rows);
        end = match next {
            Some(next) if block.start >= end => next,
            _ => {
                return Err(OP.value(format!(
                    "segment {index}: a block of {} rows at position {} follows one that ends at {end}; \
                     blocks must be in ascending order and not overlap",
                    block.rows, block.start
                )))
            }
        };
    }
    if segment.rows == 0 {
        return Ok(());
    }
    let Some(last) = segment
        .position
        .checked_add(segment.rows - 1)
        .filter(|last| *last < usize::MAX)
    else {
        return Err(OP.value(format!(
            "segment {index}: position {} is too large",
            segment.position
        )));
    };
    let sight = Sight::of(view);
    if view.window == Some(0) {
        return Err(OP.value(format!("segment {index}: the window is 0; a row must see itself")));
    }
    let hole = |range: std::ops::Range<usize>| {
        let mut next = range.start;
        for block in &view.blocks {
            if block.start <= next {
                next = next.max(block.start + block.rows);
            }
        }
        (next < range.end).then_some(next)
    };
    let first = sight.first(segment.position);
    let missing = hole(0..view.sink.min(first)).or_else(|| hole(first..last + 1));
    match missing {
        None => Ok(()),
        Some(missing) => Err(Error::Hole {
            segment: index,
            query: missing.max(segment.position),
            missing,
        }),
    }
}
