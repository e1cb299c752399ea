//! A group's partials of one span: scores, exponentials, weighted values.

use std::ops::Range;

use half::{bf16, f16};

use crate::simd::{self, Kernel, Simd, LANES};

use super::kernel::{Block, Group, SPAN};
use super::tile::{copy_rows, Cached, Rows, TILE};
use super::Elements;

/// A query's partial, or several of them merged: the greatest score, the sum of the exponentials relative to it, padding, and
/// from [`LANES`] on the sum of the weighted values.
///
/// Where the query saw nothing the greatest score is minus infinity, and the rest means nothing.
pub(super) struct Record;

impl Record {
    /// Numbers in one, for values of `stride` numbers.
    pub(super) fn len(stride: usize) -> usize {
        LANES + stride
    }

    /// Records of queries that have seen nothing.
    #[inline(always)]
    pub(super) fn clear(records: &mut [f32], stride: usize) {
        for record in records.chunks_exact_mut(Self::len(stride)) {
            record[0] = f32::NEG_INFINITY;
        }
    }

    /// The sum of the exponentials and that of the weighted values.
    #[inline(always)]
    pub(super) fn read(record: &[f32]) -> (f32, &[[f32; LANES]]) {
        (record[1], record[LANES..].as_chunks().0)
    }

    /// Takes the next span's partial into `total`. The result depends on the order in which this is done.
    #[inline(always)]
    pub(super) fn merge<S: Simd>(s: S, total: &mut [f32], partial: &[f32]) {
        if partial[0] == f32::NEG_INFINITY {
            return;
        }
        if total[0] == f32::NEG_INFINITY {
            total.copy_from_slice(partial);
            return;
        }
        let max = total[0].max(partial[0]);
        let (a, b) = (s.splat(total[0] - max), s.splat(partial[0] - max));
        let (a, b) = (simd::exp(s, a), simd::exp(s, b));
        let (total, partial) = (total.as_chunks_mut::<LANES>().0, partial.as_chunks::<LANES>().0);
        for (total, partial) in total.iter_mut().zip(partial) {
            let sum = s.fma(s.load(total), a, s.mul(s.load(partial), b));
            s.store(sum, total);
        }
        total[0][0] = max;
    }
}

/// What computes a group's partials of any span.
pub(super) struct Partial<'a> {
    pub(super) group: &'a Group<'a>,
    /// `head_dim` in whole vectors.
    pub(super) stride: usize,
    /// `[queries, stride]`
    pub(super) q: &'a mut [f32],
    /// `[queries, SPAN]`: scores, then their exponentials.
    pub(super) scores: &'a mut [f32],
    /// `[TILE, stride]`: for keys and values that are not read in place.
    pub(super) tile: &'a mut [f32],
}

/// What a walk over the span's positions does with a tile of their rows.
trait Walk {
    /// Keys or values of a block.
    fn elements<'a>(block: &Block<'a>) -> Elements<'a>;

    /// The step of `Q` queries over a tile, `W` of its rows or of their vectors side by side.
    fn step<S: Simd, T: Cached, const Q: usize, const W: usize>(
        partial: &mut Partial<'_>,
        s: S,
        records: &mut [f32],
        query: usize,
        positions: Range<usize>,
        rows: Rows<'_, T>,
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
    fn step<S: Simd, T: Cached, const Q: usize, const W: usize>(
        partial: &mut Partial<'_>,
        s: S,
        _: &mut [f32],
        query: usize,
        positions: Range<usize>,
        rows: Rows<'_, T>,
    ) {
        partial.score::<S, T, Q, W>(s, query, positions, rows);
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
    fn step<S: Simd, T: Cached, const Q: usize, const W: usize>(
        partial: &mut Partial<'_>,
        s: S,
        records: &mut [f32],
        query: usize,
        positions: Range<usize>,
        rows: Rows<'_, T>,
    ) {
        partial.sum::<S, T, Q, W>(s, records, query, positions, rows);
    }
}

/// The computation of one span's partials, written to the queries' records.
pub(super) struct Part<'t, 'a> {
    partial: &'t mut Partial<'a>,
    span: usize,
    records: &'t mut [f32],
}

impl Kernel for Part<'_, '_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        self.partial.compute(s, self.span, self.records);
    }
}

impl<'a> Partial<'a> {
    /// The partials of a span, to be written to the queries' records.
    pub(super) fn of<'t>(&'t mut self, span: usize, records: &'t mut [f32]) -> Part<'t, 'a> {
        Part {
            partial: self,
            span,
            records,
        }
    }

    #[inline(always)]
    fn compute<S: Simd>(&mut self, s: S, span: usize, records: &mut [f32]) {
        let start = span * SPAN;
        let end = self.group.runs(span).last().map_or(start, |(_, run)| run.end);
        // Whole vectors up to the last position seen.
        let len = (end - start).next_multiple_of(LANES);
        for scores in self.scores.chunks_exact_mut(SPAN) {
            scores[..len].fill(f32::NEG_INFINITY);
        }
        self.walk::<S, Scores>(s, span, records);
        let sight = self.group.segment.sight;
        let records_of = records.chunks_exact_mut(Record::len(self.stride));
        for (query, (scores, record)) in self.scores.chunks_exact_mut(SPAN).zip(records_of).enumerate() {
            let position = self.group.position(query);
            let seen = sight.seen(position, position, &(start..end));
            record[0] = f32::NEG_INFINITY;
            if !seen.iter().all(Range::is_empty) {
                (record[0], record[1]) = exponentials(s, &mut scores[..len]);
                record[2..].fill(0.0);
            }
        }
        self.walk::<S, Values>(s, span, records);
    }

    /// Takes a step for all queries and all positions of a span, a tile of rows at a time.
    #[inline(always)]
    fn walk<S: Simd, W: Walk>(&mut self, s: S, span: usize, records: &mut [f32]) {
        for (block, run) in self.group.runs(span) {
            for start in run.clone().step_by(TILE) {
                let positions = start..run.end.min(start + TILE);
                let first = start - block.positions.start;
                // Taken out so that the rest can be borrowed beside it.
                let tile = std::mem::take(&mut self.tile);
                let count = positions.len();
                let widened = match W::elements(block) {
                    Elements::F32(x) => Some(match self.in_place(x, first) {
                        Some(rows) => rows,
                        None => self.widened(s, x, first, count, tile),
                    }),
                    Elements::F16(x) => match self.in_place(x, first) {
                        Some(rows) => {
                            self.queries::<S, W, f16>(s, records, positions.clone(), rows);
                            None
                        }
                        None => Some(self.widened(s, x, first, count, tile)),
                    },
                    Elements::Bf16(x) => match self.in_place(x, first) {
                        Some(rows) => {
                            self.queries::<S, W, bf16>(s, records, positions.clone(), rows);
                            None
                        }
                        None => Some(self.widened(s, x, first, count, tile)),
                    },
                };
                if let Some(rows) = widened {
                    self.queries::<S, W, f32>(s, records, positions, rows);
                }
                self.tile = tile;
            }
        }
    }

    /// The rows from `first` of a block on, if they may be read where they are.
    #[inline(always)]
    fn in_place<'t, T: Cached>(&self, x: &'t [T], first: usize) -> Option<Rows<'t, T>> {
        let width = self.group.shape.head_dim;
        let stride = self.group.shape.kv_heads * width;
        let start = first * stride + self.group.head * width;
        (width == self.stride && self.group.queries() <= T::IN_PLACE)
            .then(|| Rows::new(&x[start..], stride, width, true))
    }

    /// `count` rows from `first` of a block on, widened and padded.
    #[inline(always)]
    fn widened<'t, S: Simd, T: Cached>(
        &self,
        s: S,
        x: &[T],
        first: usize,
        count: usize,
        tile: &'t mut [f32],
    ) -> Rows<'t, f32> {
        let width = self.group.shape.head_dim;
        let stride = self.group.shape.kv_heads * width;
        let start = first * stride + self.group.head * width;
        copy_rows(s, &x[start..], (stride, width, self.stride), count, tile);
        Rows::new(tile, self.stride, self.stride, false)
    }

    #[inline(always)]
    fn queries<S: Simd, W: Walk, T: Cached>(
        &mut self,
        s: S,
        records: &mut [f32],
        positions: Range<usize>,
        rows: Rows<'_, T>,
    ) {
        let mut query = 0;
        while query < self.group.queries() {
            match self.group.queries() - query {
                4.. => {
                    W::step::<S, T, 4, 2>(self, s, records, query, positions.clone(), rows);
                    query += 4;
                }
                2.. => {
                    W::step::<S, T, 2, 4>(self, s, records, query, positions.clone(), rows);
                    query += 2;
                }
                _ => {
                    W::step::<S, T, 1, 8>(self, s, records, query, positions.clone(), rows);
                    query += 1;
                }
            }
        }
    }

    /// `Q` queries by the tile's keys, `P` at a time: together eight products.
    #[inline(always)]
    fn score<S: Simd, T: Cached, const Q: usize, const P: usize>(
        &mut self,
        s: S,
        query: usize,
        positions: Range<usize>,
        keys: Rows<'_, T>,
    ) {
        let sight = self.group.segment.sight;
        let (oldest, newest) = (self.group.position(query), self.group.position(query + Q - 1));
        if sight.seen(oldest, newest, &positions).iter().all(Range::is_empty) {
            return;
        }
        let chunks = self.stride / LANES;
        let q: [&[[f32; LANES]]; Q] = std::array::from_fn(|i| {
            &self.q[(query + i) * self.stride..][..self.stride].as_chunks().0[..chunks]
        });
        let scale = s.splat(1.0 / (self.group.shape.head_dim as f32).sqrt());
        let place = positions.start % SPAN;
        let count = positions.len();
        for first in (0..count).step_by(P) {
            // Beyond the last row it is taken again.
            let k: [&[[T; LANES]]; P] =
                std::array::from_fn(|i| &keys.row((first + i).min(count - 1))[..chunks]);
            if query == 0 && keys.in_place {
                for row in first..first + P {
                    keys.ask_row(s, row);
                }
            }
            let mut sums = [[s.zero(); P]; Q];
            for chunk in 0..chunks {
                let mut k_lanes = [s.zero(); P];
                for (lanes, k) in k_lanes.iter_mut().zip(k) {
                    *lanes = T::widen(s, &k[chunk]);
                }
                for (sums, q) in sums.iter_mut().zip(q) {
                    let q = s.load(&q[chunk]);
                    for (sum, k) in sums.iter_mut().zip(k_lanes) {
                        *sum = s.fma(q, k, *sum);
                    }
                }
            }
            let products = s.sums(std::array::from_fn(|i| sums[i / P][i % P]));
            let products = s.lanes(s.mul(products, scale));
            let valid = P.min(count - first);
            for (i, products) in products.chunks_exact(P).enumerate() {
                let to = (query + i) * SPAN + place + first;
                self.scores[to..to + valid].copy_from_slice(&products[..valid]);
            }
        }
        if !sight.all_see(oldest, newest, &positions) {
            for query in query..query + Q {
                let seer = self.group.position(query);
                for key in positions.clone().filter(|key| !sight.sees(seer, *key)) {
                    self.scores[query * SPAN + key % SPAN] = f32::NEG_INFINITY;
                }
            }
        }
    }

    /// Adds the tile's values to the sums of `Q` queries: together if they see the same of it, else one by one.
    #[inline(always)]
    fn sum<S: Simd, T: Cached, const Q: usize, const W: usize>(
        &mut self,
        s: S,
        records: &mut [f32],
        query: usize,
        positions: Range<usize>,
        values: Rows<'_, T>,
    ) {
        let sight = self.group.segment.sight;
        let (oldest, newest) = (self.group.position(query), self.group.position(query + Q - 1));
        let start = positions.start;
        if oldest == newest || sight.all_see(oldest, newest, &positions) {
            for seen in sight
                .seen(oldest, oldest, &positions)
                .into_iter()
                .filter(|run| !run.is_empty())
            {
                let rows = seen.start - start..seen.end - start;
                self.weigh::<S, T, Q, W>(s, records, query, start, rows, values);
            }
            return;
        }
        for query in query..query + Q {
            let seer = self.group.position(query);
            for seen in sight
                .seen(seer, seer, &positions)
                .into_iter()
                .filter(|run| !run.is_empty())
            {
                let rows = seen.start - start..seen.end - start;
                self.weigh::<S, T, 1, 8>(s, records, query, start, rows, values);
            }
        }
    }

    /// `sums[query] += weight[query] * value`, for `Q` queries and the rows `rows` of a tile that begins at `position`.
    #[inline(always)]
    fn weigh<S: Simd, T: Cached, const Q: usize, const W: usize>(
        &mut self,
        s: S,
        records: &mut [f32],
        query: usize,
        position: usize,
        rows: Range<usize>,
        values: Rows<'_, T>,
    ) {
        values.assert_holds(rows.end);
        let chunks = self.stride / LANES;
        let mut chunk = 0;
        while chunk + W <= chunks {
            self.weigh_chunks::<S, T, Q, W>(s, records, query, position, rows.clone(), values, chunk);
            chunk += W;
        }
        while chunk < chunks {
            self.weigh_chunks::<S, T, Q, 1>(s, records, query, position, rows.clone(), values, chunk);
            chunk += 1;
        }
    }

    #[inline(always)]
    #[allow(clippy::too_many_arguments)]
    fn weigh_chunks<S: Simd, T: Cached, const Q: usize, const W: usize>(
        &self,
        s: S,
        records: &mut [f32],
        query: usize,
        position: usize,
        rows: Range<usize>,
        values: Rows<'_, T>,
        chunk: usize,
    ) {
        let count = rows.len();
        let weights: [&[f32]; Q] = std::array::from_fn(|i| {
            &self.scores[(query + i) * SPAN + position % SPAN + rows.start..][..count]
        });
        let records = records.as_chunks_mut::<LANES>().0;
        let place = |i: usize| (query + i) * (1 + self.stride / LANES) + 1 + chunk;
        let mut sums = [[s.zero(); W]; Q];
        for (i, sums) in sums.iter_mut().enumerate() {
            for (sum, total) in sums.iter_mut().zip(&records[place(i)..]) {
                *sum = s.load(total);
            }
        }
        for (at, row) in rows.enumerate() {
            if query == 0 && values.in_place {
                values.ask_chunks::<S, W>(s, row, chunk);
            }
            let mut lanes = [s.zero(); W];
            for (i, lanes) in lanes.iter_mut().enumerate() {
                // SAFETY: `weigh`, the only caller, asserts that the tile has the rows, and goes over a row's chunks.
                *lanes = T::widen(s, unsafe { values.chunk(row, chunk + i) });
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
            for (sum, total) in sums.into_iter().zip(&mut records[place(i)..]) {
                s.store(sum, total);
            }
        }
    }
}

/// Makes `e^(x - max)` of scores, and gives the greatest one and the exponentials' sum. An unseen position's minus infinity
/// becomes 0.
#[inline(always)]
fn exponentials<S: Simd>(s: S, scores: &mut [f32]) -> (f32, f32) {
    let scores = scores.as_chunks_mut::<LANES>().0;
    // Finite, so that a span whose scores are all minus infinity has weights of 0, as it has beside others.
    let mut max = s.splat(f32::MIN);
    for scores in scores.iter() {
        max = s.max(s.load(scores), max);
    }
    let max = s.lanes(max).into_iter().fold(f32::MIN, f32::max);
    let mut sum = s.zero();
    for scores in scores {
        let weights = simd::exp(s, s.sub(s.load(scores), s.splat(max)));
        s.store(weights, scores);
        sum = s.add(sum, weights);
    }
    (max, s.sum(sum))
}
