//! Attention on the CPU: who computes what.
//!
//! Positions are cut into spans of [`SPAN`], at its multiples. For each query and each span in which it sees anything there
//! is a *partial*: the greatest score, the sum of the exponentials relative to it, and the sum of the values weighted by
//! them. A query's partials are merged one after the other in ascending order of their spans. A score is a dot product of
//! its own; within a span the sum of the exponentials goes by lanes, position modulo 8, and the sum of the values by
//! ascending position; an unseen position takes no part in either. So neither the cache's blocks, nor the rows that share a
//! call, nor which thread computes which spans leave a trace; and what is kept does not grow with the context.

use std::cell::Cell;
use std::ops::Range;

use crate::pool::{self, Shared};
use crate::simd::{self, Isa, Kernel, Simd, LANES, WIDE};

use super::partial::{Partial, Record, QUAD};
use super::tile::{IN_PLACE, TILE};
use super::{AttentionShape, Elements, Sight};

/// Positions whose softmax is computed together. Results depend on it, so it is the same everywhere.
pub(super) const SPAN: usize = 256;

/// Queries that share one reading of keys and values, at most, unless one row has more: 16 rows of four heads.
const QUERIES: usize = 64;

/// Groups are split by spans if one of them has [`SPANS`], and they are fewer than so many a thread or of so few queries that
/// memory decides. Shorter contexts lie in a cache, and leave little to share out.
const GROUPS_A_THREAD: usize = 3;
const SPANS: usize = 8;

/// Numbers that a thread's share of the partials of a wave may take, about.
const PARTIALS: usize = 256 * 1024;

/// Tasks of a thread in a wave of a split call, at least.
const TASKS_A_THREAD: usize = 8;

pub(super) struct Block<'a> {
    pub(super) positions: Range<usize>,
    pub(super) keys: Elements<'a>,
    pub(super) values: Elements<'a>,
}

pub(super) struct Segment<'a> {
    /// First row in the call.
    pub(super) row: usize,
    pub(super) rows: usize,
    /// Position of the first row.
    pub(super) position: usize,
    pub(super) sight: Sight,
    pub(super) blocks: Vec<Block<'a>>,
}

/// The queries of some rows that read one key/value head.
pub(super) struct Group<'a> {
    pub(super) shape: &'a AttentionShape,
    pub(super) segment: &'a Segment<'a>,
    rows: Range<usize>,
    pub(super) head: usize,
}

impl<'a> Group<'a> {
    pub(super) fn queries(&self) -> usize {
        self.rows.len() * self.shape.group()
    }

    /// Queries in whole quads.
    fn quads(&self) -> usize {
        self.queries().next_multiple_of(QUAD)
    }

    /// `head_dim` in whole wide vectors.
    pub(super) fn stride(&self) -> usize {
        self.shape.head_dim.next_multiple_of(WIDE)
    }

    /// Position of a query. Those that fill the last quad are at that of the last.
    pub(super) fn position(&self, query: usize) -> usize {
        let row = query / self.shape.group();
        self.segment.position + self.rows.start + row.min(self.rows.len() - 1)
    }

    /// Where a query lies in `[rows, heads, head_dim]`.
    fn place(&self, query: usize) -> Range<usize> {
        let AttentionShape { heads, head_dim, .. } = *self.shape;
        let group = self.shape.group();
        let row = self.segment.row + self.rows.start + query / group;
        let start = (row * heads + self.head * group + query % group) * head_dim;
        start..start + head_dim
    }

    /// What some row sees of some positions: sinks, and the rows' windows.
    fn seen(&self, positions: &Range<usize>) -> [Range<usize>; 2] {
        let first = self.segment.position;
        let (oldest, newest) = (first + self.rows.start, first + self.rows.end - 1);
        self.segment.sight.seen(oldest, newest, positions)
    }

    /// The spans that hold what some row sees, in ascending order.
    fn spans(&self) -> impl Iterator<Item = usize> {
        let [sinks, window] = self.seen(&(0..usize::MAX));
        let sinks = sinks.end.div_ceil(SPAN);
        (0..sinks).chain((window.start / SPAN).max(sinks)..window.end.div_ceil(SPAN))
    }

    /// Runs of positions of a span that lie in one block and that some row may see, in ascending order.
    pub(super) fn runs(&self, span: usize) -> impl Iterator<Item = (&'a Block<'a>, Range<usize>)> {
        let positions = positions(span);
        let blocks = &self.segment.blocks;
        let first = blocks.partition_point(|block| block.positions.end <= positions.start);
        let seen = self.seen(&positions);
        blocks[first..]
            .iter()
            .take_while(move |block| block.positions.start < positions.end)
            .flat_map(move |block| {
                seen.clone().into_iter().filter_map(move |seen| {
                    let start = seen.start.max(block.positions.start);
                    let end = seen.end.min(block.positions.end);
                    (start < end).then_some((block, start..end))
                })
            })
    }

    /// The same in pieces of a tile at most.
    pub(super) fn tiles(&self, span: usize) -> impl Iterator<Item = (&'a Block<'a>, Range<usize>)> {
        self.runs(span).flat_map(|(block, run)| {
            let starts = run.clone().step_by(TILE);
            starts.map(move |start| (block, start..start + TILE.min(run.end - start)))
        })
    }

    /// Multiply-adds over some positions, and a bit more.
    fn work(&self, positions: Range<usize>) -> usize {
        let seen: usize = self.seen(&positions).into_iter().map(|run| run.len()).sum();
        2 * self.queries() * self.stride() * seen
    }

    /// What one task over the group works in.
    fn scratch(&self) -> usize {
        self.quads() * (self.stride() + SPAN) + TILE * self.stride()
    }

    /// Numbers in its queries' records.
    fn records(&self) -> usize {
        self.quads() * Record::len(self.stride())
    }

    /// What computes its partials, of all the queries of a call.
    #[inline(always)]
    fn partial<'t>(&'t self, q: &[f32], scratch: &'t mut [f32]) -> Partial<'t> {
        let (queries, stride) = (self.quads(), self.stride());
        let (quads, scratch) = scratch.split_at_mut(queries * stride);
        let (scores, tile) = scratch.split_at_mut(queries * SPAN);
        quads.fill(0.0);
        for query in 0..self.queries() {
            let quad = &mut quads[query / QUAD * QUAD * stride..];
            let to = quad.chunks_exact_mut(LANES).skip(query % QUAD).step_by(QUAD);
            let (full, tail) = q[self.place(query)].as_chunks::<LANES>();
            let mut to = to.filter_map(|to| to.first_chunk_mut::<LANES>());
            for (from, to) in full.iter().zip(&mut to) {
                *to = *from;
            }
            if let Some(to) = to.next() {
                to[..tail.len()].copy_from_slice(tail);
            }
        }
        Partial {
            group: self,
            stride,
            q: quads,
            scores,
            tile,
        }
    }
}

/// What a split call works in. A thread keeps it, so that a decode step does not ask the system for memory; it is taken out
/// for the call, since a thread that waits for others may begin another one.
#[derive(Default)]
struct Held {
    numbers: Vec<f32>,
    /// Groups and spans.
    parts: Vec<(usize, usize)>,
    /// Groups, queries, and where the partials of the group's rows lie.
    merges: Vec<(usize, usize, Range<usize>)>,
}

thread_local!(static HELD: Cell<Held> = Cell::default());

/// What a call reads, and where it writes.
struct Call<'a> {
    q: &'a [f32],
    gate: Option<&'a [f32]>,
    out: Shared<'a, f32>,
    isa: Isa,
}

pub(super) fn attention(
    shape: &AttentionShape,
    q: &[f32],
    gate: Option<&[f32]>,
    segments: &[Segment<'_>],
    out: &mut [f32],
) {
    let per_group = (QUERIES / shape.group()).max(1);
    let count: usize = segments
        .iter()
        .map(|segment| segment.rows.div_ceil(per_group))
        .sum();
    let mut groups = Vec::with_capacity(count * shape.kv_heads);
    for segment in segments {
        for first in (0..segment.rows).step_by(per_group) {
            let rows = first..segment.rows.min(first + per_group);
            groups.extend((0..shape.kv_heads).map(|head| Group {
                shape,
                segment,
                rows: rows.clone(),
                head,
            }));
        }
    }
    let call = Call {
        q,
        gate,
        out: Shared::new(out),
        isa: simd::isa(),
    };
    let threads = rayon::current_num_threads();
    let long = groups.iter().any(|group| group.spans().nth(SPANS - 1).is_some());
    let few =
        groups.len() < GROUPS_A_THREAD * threads || groups.iter().all(|group| group.queries() <= IN_PLACE);
    if long && few {
        call.split(&groups, shape.kv_heads, threads);
    } else {
        call.whole(&groups);
    }
}

/// Positions of a span.
fn positions(span: usize) -> Range<usize> {
    let start = span.saturating_mul(SPAN);
    start..start.saturating_add(SPAN)
}

impl Call<'_> {
    /// One task a group.
    fn whole(&self, groups: &[Group<'_>]) {
        let work = groups.iter().map(|group| group.work(0..usize::MAX)).sum();
        pool::for_each(groups.len(), work, &|task| {
            let group = &groups[task];
            let records = group.records();
            pool::with_scratch(group.scratch() + 2 * records, |scratch| {
                let (totals, scratch) = scratch.split_at_mut(records);
                let (partials, scratch) = scratch.split_at_mut(records);
                let mut partial = group.partial(self.q, scratch);
                Record::clear(totals, group.stride());
                for span in group.spans() {
                    simd::run(self.isa, partial.of(span, partials));
                    simd::run(
                        self.isa,
                        Merge {
                            totals,
                            partials,
                            first: 0,
                            step: records,
                            len: Record::len(group.stride()),
                        },
                    );
                }
                self.finish(group, totals);
            });
        });
    }

    /// One task for the heads of some rows and a span, or one a head where that gives too few, then one a query that merges;
    /// in waves, so that partials do not grow with the context.
    ///
    /// A row of a block holds all heads, so they are read one after the other while what was fetched beside the first of
    /// them is at hand.
    fn split(&self, groups: &[Group<'_>], heads: usize, threads: usize) {
        let Some(largest) = groups.iter().map(Group::records).max() else {
            return;
        };
        let mut held = HELD.take();
        let Held {
            numbers,
            parts,
            merges,
        } = &mut held;
        parts.clear();
        for rows in (0..groups.len()).step_by(heads) {
            let spans = groups[rows].spans();
            parts.extend(spans.flat_map(|span| (rows..rows + heads).map(move |index| (index, span))));
        }
        let together = if parts.len() < TASKS_A_THREAD * threads * heads {
            1
        } else {
            heads
        };
        let wave = (threads * (PARTIALS / largest).max(TASKS_A_THREAD)).next_multiple_of(heads);
        let len = (groups.len() + wave.min(parts.len())) * largest + pool::LINE;
        if numbers.len() < len {
            numbers.resize(len, 0.0);
        }
        let (totals, partials) = pool::aligned(&mut numbers[..len]).split_at_mut(groups.len() * largest);
        for (group, totals) in groups.iter().zip(totals.chunks_exact_mut(largest)) {
            Record::clear(totals, group.stride());
        }
        for parts in parts.chunks(wave) {
            let work = parts
                .iter()
                .map(|&(index, span)| groups[index].work(positions(span)));
            let work = work.sum();
            let shared = Shared::new(partials);
            pool::for_each(parts.len() / together, work, &|task| {
                let parts = parts.iter().enumerate().skip(task * together);
                for (part, &(index, span)) in parts.take(together) {
                    let group = &groups[index];
                    let start = part * largest;
                    // SAFETY: one task has this part.
                    let records = unsafe { shared.part(start..start + group.records()) };
                    pool::with_scratch(group.scratch(), |scratch| {
                        simd::run(self.isa, group.partial(self.q, scratch).of(span, records));
                    });
                }
            });
            merges.clear();
            let mut start = 0;
            for parts in parts.chunk_by(|a, b| a.0 / heads == b.0 / heads) {
                let end = start + parts.len() * largest;
                for &(index, _) in &parts[..heads] {
                    merges.extend((0..groups[index].queries()).map(|query| (index, query, start..end)));
                }
                start = end;
            }
            let totals = Shared::new(totals);
            pool::for_each(merges.len(), work / SPAN, &|task| {
                let (index, query, parts) = &merges[task];
                let len = Record::len(groups[*index].stride());
                let start = index * largest + query * len;
                let merge = Merge {
                    // SAFETY: one task has this query.
                    totals: unsafe { totals.part(start..start + len) },
                    partials: &partials[parts.clone()],
                    first: index % heads * largest + query * len,
                    step: heads * largest,
                    len,
                };
                simd::run(self.isa, merge);
            });
        }
        pool::for_each(groups.len(), totals.len(), &|index| {
            self.finish(
                &groups[index],
                &totals[index * largest..][..groups[index].records()],
            );
        });
        HELD.set(held);
    }

    fn finish(&self, group: &Group<'_>, totals: &[f32]) {
        let finish = Finish {
            call: self,
            group,
            totals,
        };
        simd::run(self.isa, finish);
    }
}

/// Merges partials of some spans, in ascending order, into the totals of some queries. The queries' records of one span lie
/// at `first` of every `step` numbers.
struct Merge<'a> {
    totals: &'a mut [f32],
    partials: &'a [f32],
    first: usize,
    step: usize,
    /// Of a record.
    len: usize,
}

impl Kernel for Merge<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for partials in self.partials.chunks_exact(self.step) {
            let partials = partials[self.first..].chunks_exact(self.len);
            for (total, partial) in self.totals.chunks_exact_mut(self.len).zip(partials) {
                Record::merge(s, total, partial);
            }
        }
    }
}

/// Divides by the sum of the exponentials, and gates.
struct Finish<'a> {
    call: &'a Call<'a>,
    group: &'a Group<'a>,
    totals: &'a [f32],
}

impl Kernel for Finish<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { call, group, totals } = self;
        for (query, total) in totals
            .chunks_exact(Record::len(group.stride()))
            .take(group.queries())
            .enumerate()
        {
            let place = group.place(query);
            let gate = call.gate.map(|gate| &gate[place.clone()]);
            // SAFETY: one task has this head of this row.
            let out = unsafe { call.out.part(place) };
            let (sum, values) = Record::read(total);
            for (i, (out, value)) in out.chunks_mut(LANES).zip(values).enumerate() {
                let mut y = s.div(s.load(value), s.splat(sum));
                if let Some(gate) = gate {
                    let gate = s.load_part(&gate[i * LANES..][..out.len()]);
                    y = s.mul(y, simd::sigmoid(s, gate));
                }
                s.store_part(y, out);
            }
        }
    }
}
