//! Attention on the CPU.
//!
//! For each query: the scores of the positions that it sees, their exact maximum, exponentials, and the sum of the
//! values. A score is a dot product of its own. The sum of the exponentials goes by lanes, position modulo 8, and the
//! sum of the values by ascending position; an unseen position takes no part in either. So where blocks begin, and which
//! queries share a task, leaves no trace.

use std::ops::Range;

use crate::pool::{self, Shared};
use crate::simd::{self, Kernel, Simd, LANES};

use super::tile::{copy_rows, Index, Tile, TILE};
use super::{AttentionShape, Elements, Sight};

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

/// What a walk over all positions does with a tile of their rows.
trait Walk {
    /// Keys or values of a block.
    fn elements<'a>(block: &Block<'a>) -> Elements<'a>;

    /// The step of `Q` queries over a tile, `W` of its rows or of their vectors side by side.
    fn step<S: Simd, const Q: usize, const W: usize>(
        task: &mut Task<'_>,
        s: S,
        query: usize,
        positions: Range<usize>,
        rows: Tile<'_>,
    );
}

/// Queries times keys.
struct Scores;

impl Walk for Scores {
    #[inline(always)]
    fn elements<'a>(block: &Block<'a>) -> Elements<'a> {
        block.keys
    }

    #[inline(always)]
    fn step<S: Simd, const Q: usize, const W: usize>(
        task: &mut Task<'_>,
        s: S,
        query: usize,
        positions: Range<usize>,
        rows: Tile<'_>,
    ) {
        task.score_queries::<S, Q, W>(s, query, positions, rows);
    }
}

/// Weights times values.
struct Values;

impl Walk for Values {
    #[inline(always)]
    fn elements<'a>(block: &Block<'a>) -> Elements<'a> {
        block.values
    }

    #[inline(always)]
    fn step<S: Simd, const Q: usize, const W: usize>(
        task: &mut Task<'_>,
        s: S,
        query: usize,
        positions: Range<usize>,
        rows: Tile<'_>,
    ) {
        task.sum_queries::<S, Q, W>(s, query, positions, rows);
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

    /// Positions of `Q` queries.
    #[inline(always)]
    fn positions<const Q: usize>(&self, query: usize) -> [usize; Q] {
        let group = self.shape.group();
        std::array::from_fn(|i| self.segment.position + self.rows.start + (query + i) / group)
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
        self.walk::<S, Scores>(s);
    }

    /// Takes a step of `W` for all queries and all positions, a tile of rows at a time.
    #[inline(always)]
    fn walk<S: Simd, W: Walk>(&mut self, s: S) {
        for block in &self.segment.blocks {
            for positions in self.index.tiles(block.positions.clone()) {
                let first = positions.start - block.positions.start;
                // Taken out of the task so that the rest of it can be borrowed beside it.
                let scratch = std::mem::take(&mut self.tile);
                let rows = self.widen(s, W::elements(block), first, positions.len(), scratch);
                let mut query = 0;
                while query < self.queries() {
                    match self.queries() - query {
                        4.. => {
                            W::step::<S, 4, 2>(self, s, query, positions.clone(), rows);
                            query += 4;
                        }
                        2.. => {
                            W::step::<S, 2, 4>(self, s, query, positions.clone(), rows);
                            query += 2;
                        }
                        _ => {
                            W::step::<S, 1, 8>(self, s, query, positions.clone(), rows);
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
        let seers = self.positions::<Q>(query);
        let mut at = 0;
        while at + P <= positions.len() {
            self.dots::<S, Q, P>(s, query, seers, positions.start, at, keys);
            at += P;
        }
        while at < positions.len() {
            self.dots::<S, Q, 1>(s, query, seers, positions.start, at, keys);
            at += 1;
        }
    }

    #[inline(always)]
    fn dots<S: Simd, const Q: usize, const P: usize>(
        &mut self,
        s: S,
        query: usize,
        seers: [usize; Q],
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
        if query == 0 && keys.in_place {
            for row in at..at + P {
                for chunk in (0..chunks).step_by(2) {
                    keys.ask(s, row, chunk);
                }
            }
        }
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
        for (i, (sums, seer)) in sums.into_iter().zip(seers).enumerate() {
            for (j, sum) in sums.into_iter().enumerate() {
                let position = start + at + j;
                if self.segment.sight.sees(seer, position) {
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
        self.walk::<S, Values>(s);
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
        let seers = self.positions::<Q>(query);
        let sight = self.segment.sight;
        let all_see = |key: usize| seers.iter().all(|&seer| sight.sees(seer, key));
        let mut start = positions.start;
        while start < positions.end {
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
                    for (i, seer) in seers.into_iter().enumerate() {
                        if sight.sees(seer, key) {
                            self.weigh::<S, 1, 8>(s, query + i, key, row..row + 1, values);
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
        assert!(rows.end <= values.rows());
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
            if query == 0 && values.in_place {
                for chunk in (chunk..chunk + W).step_by(2) {
                    values.ask(s, row, chunk);
                }
            }
            let mut lanes = [s.zero(); W];
            for (i, lanes) in lanes.iter_mut().enumerate() {
                // SAFETY: `weigh`, the only caller, asserts that the tile has the rows, and goes over a row's chunks.
                *lanes = s.load(unsafe { values.chunk(row, chunk + i) });
            }
            for (sums, weights) in sums.iter_mut().zip(weights) {
                // SAFETY: there is a weight for each of `rows`.
                let weight = s.splat(unsafe { *weights.get_unchecked(at) });
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

impl Task<'_> {
    /// `count` rows of the task's head from row `first` of a block on, as f32 in whole vectors.
    ///
    /// They are read in place if they are so already and few queries read them. Many would find them out of the cache
    /// again: rows that lie a power of two apart share few of its sets.
    #[inline(always)]
    fn widen<'t, S: Simd>(
        &self,
        s: S,
        elements: Elements<'t>,
        first: usize,
        count: usize,
        scratch: &'t mut [f32],
    ) -> Tile<'t> {
        let width = self.shape.head_dim;
        let stride = self.shape.kv_heads * width;
        let start = first * stride + self.head * width;
        let wide = self.stride;
        match elements {
            Elements::F32(x) if wide == width && self.queries() <= 8 => {
                return Tile {
                    data: &x[start..],
                    stride,
                    width,
                    in_place: true,
                }
            }
            Elements::F32(x) => copy_rows(s, &x[start..], (stride, width, wide), count, scratch),
            Elements::F16(x) => copy_rows(s, &x[start..], (stride, width, wide), count, scratch),
            Elements::Bf16(x) => copy_rows(s, &x[start..], (stride, width, wide), count, scratch),
        }
        Tile {
            data: scratch,
            stride: wide,
            width: wide,
            in_place: false,
        }
    }
}
