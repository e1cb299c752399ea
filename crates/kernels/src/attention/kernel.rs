//! Attention on the CPU.
//!
//! For each query: the scores of the positions that it sees, their exact maximum, exponentials, and the sum of the
//! values. A score is a dot product of its own. The sum of the exponentials goes by lanes, position modulo 8, and the
//! sum of the values by ascending position; an unseen position takes no part in either. So where blocks begin, and which
//! queries share a task, leaves no trace.

use std::ops::Range;

use half::{bf16, f16};

use crate::pool::{self, Shared};
use crate::simd::{self, Kernel, Simd, LANES};

use super::{AttentionShape, Elements, Sight};

/// Positions whose keys or values are passed over by all queries of a task before the next: 32 KB at a width of 256.
const TILE: usize = 32;

/// Queries of a task, about: each reads every key, so the more share one reading the better.
const QUERIES: usize = 32;

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

pub(super) fn attention(
    shape: &AttentionShape,
    q: &[f32],
    gate: Option<&[f32]>,
    segments: &[Segment<'_>],
    out: &mut [f32],
) {
    let per_task = (QUERIES / shape.group()).max(1);
    let mut tasks = Vec::new();
    let mut work = 0;
    for segment in segments {
        for first in (0..segment.rows).step_by(per_task) {
            let rows = first..segment.rows.min(first + per_task);
            work += 2 * rows.len() * shape.heads * shape.head_dim * (segment.position + rows.end);
            for head in 0..shape.kv_heads {
                tasks.push((segment, rows.clone(), head));
            }
        }
    }
    let shared = Shared::new(out);
    let isa = simd::isa();
    pool::for_each(tasks.len(), work, &|task| {
        let (segment, rows, head) = &tasks[task];
        let index = Index::new(segment, rows);
        let queries = rows.len() * shape.group();
        let stride = shape.head_dim.next_multiple_of(LANES);
        let sizes = [
            queries * stride,
            queries * stride,
            TILE * stride,
            queries * index.len,
        ];
        pool::with_scratch(sizes.iter().sum(), |scratch| {
            let (q_wide, scratch) = scratch.split_at_mut(sizes[0]);
            let (sums, scratch) = scratch.split_at_mut(sizes[1]);
            let (tile, scores) = scratch.split_at_mut(sizes[2]);
            simd::run(
                isa,
                Task {
                    shape,
                    q,
                    gate,
                    segment,
                    rows: rows.clone(),
                    head: *head,
                    index,
                    stride,
                    q_wide,
                    sums,
                    tile,
                    scores,
                    out: &shared,
                },
            );
        });
    });
}

/// Where the score of a position lies, lane by position modulo 8.
///
/// Sinks come first; then, from a multiple of 8 on, what the window of the oldest row shows.
#[derive(Clone, Copy)]
struct Index {
    sinks: usize,
    /// First position by the oldest row's window.
    first: usize,
    /// Position from which on scores lie at `position - base + offset`; before, at `position`.
    base: usize,
    offset: usize,
    /// One more than the newest position.
    end: usize,
    len: usize,
}

impl Index {
    fn new(segment: &Segment<'_>, rows: &Range<usize>) -> Self {
        let first = segment.sight.first(segment.position + rows.start);
        let end = segment.position + rows.end;
        let sinks = segment.sight.sink.min(first);
        let base = first - first % LANES;
        let (base, offset) = if base <= sinks {
            (0, 0)
        } else {
            (base, sinks.next_multiple_of(LANES))
        };
        Self {
            sinks,
            first,
            base,
            offset,
            end,
            len: (end - base + offset).next_multiple_of(LANES),
        }
    }

    fn at(self, position: usize) -> usize {
        if position < self.base {
            position
        } else {
            position - self.base + self.offset
        }
    }

    /// Runs of at most [`TILE`] positions of a block that some row may see, in order.
    fn tiles(self, block: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        [0..self.sinks, self.first..self.end]
            .into_iter()
            .flat_map(move |seen| {
                let (start, end) = (seen.start.max(block.start), seen.end.min(block.end));
                (start..end)
                    .step_by(TILE)
                    .map(move |tile| tile..end.min(tile + TILE))
            })
    }
}

/// Keys or values of one head at the positions of a tile, padded to whole vectors.
#[derive(Clone, Copy)]
struct Tile<'a> {
    data: &'a [f32],
    stride: usize,
    width: usize,
}

impl<'a> Tile<'a> {
    #[inline(always)]
    fn row(self, row: usize) -> &'a [[f32; LANES]] {
        self.data[row * self.stride..][..self.width].as_chunks().0
    }
}

/// The queries of some rows that read one key/value head.
struct Task<'a> {
    shape: &'a AttentionShape,
    q: &'a [f32],
    gate: Option<&'a [f32]>,
    segment: &'a Segment<'a>,
    rows: Range<usize>,
    head: usize,
    index: Index,
    /// `head_dim` in whole vectors.
    stride: usize,
    /// `[queries, stride]`
    q_wide: &'a mut [f32],
    /// `[queries, stride]`: of weighted values.
    sums: &'a mut [f32],
    /// `[TILE, stride]`: for keys and values that cannot be read in place.
    tile: &'a mut [f32],
    /// `[queries, index.len]`: scores, then their exponentials.
    scores: &'a mut [f32],
    out: &'a Shared<'a, f32>,
}

impl Kernel for Task<'_> {
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        self.load_queries();
        self.score(s);
        self.sums.fill(0.0);
        self.sum_values(s);
        self.finish(s);
    }
}

impl Task<'_> {
    fn queries(&self) -> usize {
        self.rows.len() * self.shape.group()
    }

    /// Where a query lies in `[rows, heads, head_dim]`.
    fn place(&self, query: usize) -> Range<usize> {
        let AttentionShape { heads, head_dim, .. } = *self.shape;
        let group = self.shape.group();
        let row = self.segment.row + self.rows.start + query / group;
        let start = (row * heads + self.head * group + query % group) * head_dim;
        start..start + head_dim
    }

    fn sees(&self, query: usize, key: usize) -> bool {
        let position = self.segment.position + self.rows.start + query / self.shape.group();
        self.segment.sight.sees(position, key)
    }

    fn load_queries(&mut self) {
        for query in 0..self.queries() {
            let from = self.place(query);
            let to = &mut self.q_wide[query * self.stride..][..self.stride];
            let (to, pad) = to.split_at_mut(from.len());
            to.copy_from_slice(&self.q[from]);
            pad.fill(0.0);
        }
    }

    #[inline(always)]
    fn score<S: Simd>(&mut self, s: S) {
        self.scores.fill(f32::NEG_INFINITY);
        for block in &self.segment.blocks {
            for positions in self.index.tiles(block.positions.clone()) {
                let first = positions.start - block.positions.start;
                // Taken out of the task so that the rest of it can be borrowed beside it.
                let scratch = std::mem::take(&mut self.tile);
                let keys = widen(
                    s,
                    self.shape,
                    block.keys,
                    first,
                    positions.len(),
                    self.head,
                    scratch,
                );
                let mut query = 0;
                while query < self.queries() {
                    match self.queries() - query {
                        4.. => {
                            self.score_queries::<S, 4, 2>(s, query, positions.clone(), keys);
                            query += 4;
                        }
                        2.. => {
                            self.score_queries::<S, 2, 4>(s, query, positions.clone(), keys);
                            query += 2;
                        }
                        _ => {
                            self.score_queries::<S, 1, 8>(s, query, positions.clone(), keys);
                            query += 1;
                        }
                    }
                }
                self.tile = scratch;
            }
        }
    }

    /// `Q` queries by the tile's keys, `P` at a time.
    #[inline(always)]
    fn score_queries<S: Simd, const Q: usize, const P: usize>(
        &mut self,
        s: S,
        query: usize,
        positions: Range<usize>,
        keys: Tile<'_>,
    ) {
        let mut at = 0;
        while at + P <= positions.len() {
            self.dots::<S, Q, P>(s, query, positions.start, at, keys);
            at += P;
        }
        while at < positions.len() {
            self.dots::<S, Q, 1>(s, query, positions.start, at, keys);
            at += 1;
        }
    }

    #[inline(always)]
    fn dots<S: Simd, const Q: usize, const P: usize>(
        &mut self,
        s: S,
        query: usize,
        start: usize,
        at: usize,
        keys: Tile<'_>,
    ) {
        let chunks = self.stride / LANES;
        let q: [&[[f32; LANES]]; Q] = std::array::from_fn(|i| {
            &self.q_wide[(query + i) * self.stride..][..self.stride]
                .as_chunks()
                .0[..chunks]
        });
        let k: [&[[f32; LANES]]; P] = std::array::from_fn(|i| &keys.row(at + i)[..chunks]);
        let mut sums = [[s.zero(); P]; Q];
        for chunk in 0..chunks {
            let mut k_lanes = [s.zero(); P];
            for (lanes, k) in k_lanes.iter_mut().zip(k) {
                *lanes = s.load(&k[chunk]);
            }
            for (sums, q) in sums.iter_mut().zip(q) {
                let q = s.load(&q[chunk]);
                for (sum, k) in sums.iter_mut().zip(k_lanes) {
                    *sum = s.fma(q, k, *sum);
                }
            }
        }
        let scale = 1.0 / (self.shape.head_dim as f32).sqrt();
        for (i, sums) in sums.into_iter().enumerate() {
            for (j, sum) in sums.into_iter().enumerate() {
                let position = start + at + j;
                if self.sees(query + i, position) {
                    self.scores[(query + i) * self.index.len + self.index.at(position)] = s.sum(sum) * scale;
                }
            }
        }
    }

    #[inline(always)]
    fn sum_values<S: Simd>(&mut self, s: S) {
        // Scores become weights, their sum still to be divided by.
        for scores in self.scores.chunks_exact_mut(self.index.len) {
            exponentials(s, scores);
        }
        for block in &self.segment.blocks {
            for positions in self.index.tiles(block.positions.clone()) {
                let first = positions.start - block.positions.start;
                let scratch = std::mem::take(&mut self.tile);
                let values = widen(
                    s,
                    self.shape,
                    block.values,
                    first,
                    positions.len(),
                    self.head,
                    scratch,
                );
                let mut query = 0;
                while query < self.queries() {
                    match self.queries() - query {
                        4.. => {
                            self.sum_queries::<S, 4, 2>(s, query, positions.clone(), values);
                            query += 4;
                        }
                        2.. => {
                            self.sum_queries::<S, 2, 4>(s, query, positions.clone(), values);
                            query += 2;
                        }
                        _ => {
                            self.sum_queries::<S, 1, 8>(s, query, positions.clone(), values);
                            query += 1;
                        }
                    }
                }
                self.tile = scratch;
            }
        }
    }

    /// Adds the tile's values to the sums of `Q` queries: together where all of them see a position, else one by one.
    #[inline(always)]
    fn sum_queries<S: Simd, const Q: usize, const W: usize>(
        &mut self,
        s: S,
        query: usize,
        positions: Range<usize>,
        values: Tile<'_>,
    ) {
        let mut start = positions.start;
        while start < positions.end {
            let all_see = |key: usize| (query..query + Q).all(|query| self.sees(query, key));
            let together = all_see(start);
            let mut end = start + 1;
            while end < positions.end && all_see(end) == together {
                end += 1;
            }
            let rows = start - positions.start..end - positions.start;
            if together {
                self.weigh::<S, Q, W>(s, query, start, rows, values);
            } else {
                for (key, row) in (start..end).zip(rows) {
                    for query in query..query + Q {
                        if self.sees(query, key) {
                            self.weigh::<S, 1, 8>(s, query, key, row..row + 1, values);
                        }
                    }
                }
            }
            start = end;
        }
    }

    /// `sums[query] += weight[query] * value`, for `Q` queries and the tile's rows `rows`, which begin at `position`.
    #[inline(always)]
    fn weigh<S: Simd, const Q: usize, const W: usize>(
        &mut self,
        s: S,
        query: usize,
        position: usize,
        rows: Range<usize>,
        values: Tile<'_>,
    ) {
        let chunks = self.stride / LANES;
        let mut chunk = 0;
        while chunk + W <= chunks {
            self.weigh_chunks::<S, Q, W>(s, query, position, rows.clone(), values, chunk);
            chunk += W;
        }
        while chunk < chunks {
            self.weigh_chunks::<S, Q, 1>(s, query, position, rows.clone(), values, chunk);
            chunk += 1;
        }
    }

    #[inline(always)]
    fn weigh_chunks<S: Simd, const Q: usize, const W: usize>(
        &mut self,
        s: S,
        query: usize,
        position: usize,
        rows: Range<usize>,
        values: Tile<'_>,
        chunk: usize,
    ) {
        let count = rows.len();
        let weights: [&[f32]; Q] = std::array::from_fn(|i| {
            &self.scores[(query + i) * self.index.len + self.index.at(position)..][..count]
        });
        let totals = self.sums.as_chunks_mut::<LANES>().0;
        let place = |i: usize| (query + i) * (self.stride / LANES) + chunk;
        let mut sums = [[s.zero(); W]; Q];
        for (i, sums) in sums.iter_mut().enumerate() {
            for (sum, total) in sums.iter_mut().zip(&totals[place(i)..]) {
                *sum = s.load(total);
            }
        }
        for (at, row) in rows.enumerate() {
            let v = &values.row(row)[chunk..chunk + W];
            let mut lanes = [s.zero(); W];
            for (lanes, v) in lanes.iter_mut().zip(v) {
                *lanes = s.load(v);
            }
            for (sums, weights) in sums.iter_mut().zip(weights) {
                let weight = s.splat(weights[at]);
                for (sum, v) in sums.iter_mut().zip(lanes) {
                    *sum = s.fma(weight, v, *sum);
                }
            }
        }
        for (i, sums) in sums.into_iter().enumerate() {
            for (sum, total) in sums.into_iter().zip(&mut totals[place(i)..]) {
                s.store(sum, total);
            }
        }
    }

    /// Divides by the sum of the weights, and gates.
    #[inline(always)]
    fn finish<S: Simd>(self, s: S) {
        for query in 0..self.queries() {
            let weights = self.scores[query * self.index.len..][..self.index.len]
                .as_chunks::<LANES>()
                .0;
            let mut sum = s.zero();
            for weights in weights {
                sum = s.add(sum, s.load(weights));
            }
            let sum = s.splat(s.sum(sum));
            let place = self.place(query);
            let gate = self.gate.map(|gate| &gate[place.clone()]);
            // SAFETY: one task has this head of this row.
            let out = unsafe { self.out.part(place) };
            let values = self.sums[query * self.stride..][..self.stride]
                .as_chunks::<LANES>()
                .0;
            for (i, (out, value)) in out.chunks_mut(LANES).zip(values).enumerate() {
                let mut y = s.div(s.load(value), sum);
                if let Some(gate) = gate {
                    let gate = s.load_part(&gate[i * LANES..][..out.len()]);
                    y = s.mul(y, simd::sigmoid(s, gate));
                }
                s.store_part(y, out);
            }
        }
    }
}

/// `e^(x - max)`; an unseen position's minus infinity becomes 0.
#[inline(always)]
fn exponentials<S: Simd>(s: S, scores: &mut [f32]) {
    let scores = scores.as_chunks_mut::<LANES>().0;
    let mut max = s.splat(f32::NEG_INFINITY);
    for scores in scores.iter() {
        max = s.max(s.load(scores), max);
    }
    let max = s.lanes(max).into_iter().fold(f32::NEG_INFINITY, f32::max);
    let max = s.splat(max);
    for scores in scores {
        s.store(simd::exp(s, s.sub(s.load(scores), max)), scores);
    }
}

/// Rows of one head as f32 in whole vectors: in place if they are so already, else in `scratch`.
#[inline(always)]
fn widen<'a, S: Simd>(
    s: S,
    shape: &AttentionShape,
    elements: Elements<'a>,
    first: usize,
    count: usize,
    head: usize,
    scratch: &'a mut [f32],
) -> Tile<'a> {
    let width = shape.head_dim;
    let stride = shape.kv_heads * width;
    let start = first * stride + head * width;
    let wide = width.next_multiple_of(LANES);
    match elements {
        Elements::F32(x) if wide == width => {
            return Tile {
                data: &x[start..],
                stride,
                width,
            }
        }
        Elements::F32(x) => {
            for (to, from) in scratch
                .chunks_exact_mut(wide)
                .zip(x[start..].chunks(stride))
                .take(count)
            {
                to[..width].copy_from_slice(&from[..width]);
                to[width..].fill(0.0);
            }
        }
        Elements::F16(x) => {
            for (to, from) in scratch
                .chunks_exact_mut(wide)
                .zip(x[start..].chunks(stride))
                .take(count)
            {
                for (to, from) in to.as_chunks_mut().0.iter_mut().zip(from[..width].chunks(LANES)) {
                    let mut lanes = [f16::ZERO; LANES];
                    lanes[..from.len()].copy_from_slice(from);
                    s.store(s.f16(&lanes), to);
                }
            }
        }
        Elements::Bf16(x) => {
            for (to, from) in scratch
                .chunks_exact_mut(wide)
                .zip(x[start..].chunks(stride))
                .take(count)
            {
                for (to, from) in to.as_chunks_mut().0.iter_mut().zip(from[..width].chunks(LANES)) {
                    let mut lanes = [bf16::ZERO; LANES];
                    lanes[..from.len()].copy_from_slice(from);
                    s.store(s.bf16(&lanes), to);
                }
            }
        }
    }
    Tile {
        data: scratch,
        stride: wide,
        width: wide,
    }
}
