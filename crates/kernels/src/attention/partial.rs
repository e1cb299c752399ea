//! A group's partials of one span: scores, exponentials, weighted values.

use std::ops::Range;

use half::{bf16, f16};

use crate::simd::{self, Kernel, Simd, LANES, WIDE};

use super::kernel::{Block, Group, SPAN};
use super::tile::{copy_rows, Cached, Rows, IN_PLACE};
use super::{AttentionShape, Elements};

/// A query's partial, or several of them merged: the greatest score, the sum of the exponentials relative to it, padding, and
/// from [`WIDE`] on the sum of the weighted values.
///
/// Where the query saw nothing the greatest score is minus infinity, and the rest means nothing.
pub(super) struct Record;

impl Record {
    /// Numbers in one, for values of `stride` numbers.
    pub(super) fn len(stride: usize) -> usize {
        WIDE + stride
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
        (record[1], record[WIDE..].as_chunks().0)
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

/// Queries that are passed over keys and values together.
pub(super) const QUAD: usize = 4;

/// What computes a group's partials of any span.
pub(super) struct Partial<'a> {
    pub(super) group: &'a Group<'a>,
    /// `head_dim` in whole wide vectors.
    pub(super) stride: usize,
    /// Queries in whole quads, of which each is `[stride / 8, 4, 8]`.
    pub(super) q: &'a mut [f32],
    /// `[queries, SPAN]`: scores, then their exponentials.
    pub(super) scores: &'a mut [f32],
    /// `[TILE, stride]`: for keys and values that are not read in place.
    pub(super) tile: &'a mut [f32],
}

/// The computation of one span's partials, written to the queries' records.
pub(super) struct Part<'t, 'a> {
    partial: &'t mut Partial<'a>,
    span: usize,
    records: &'t mut [f32],
}

impl Kernel for Part<'_, '_> {
    const ASKS: bool = true;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        self.partial.compute(s, self.span, self.records);
    }
}

/// What a walk over the span's positions does with a tile of their rows.
trait Walk {
    /// Keys or values of a block.
    fn elements<'a>(block: &Block<'a>) -> Elements<'a>;

    /// What is read after the last tile of a span.
    fn after<'a>(group: &Group<'a>, span: usize) -> Option<Place<'a>>;

    /// The step of a quad over a tile.
    fn step<S: Simd, T: Cached>(
        partial: &mut Partial<'_>,
        s: S,
        records: &mut [f32],
        query: usize,
        positions: &Range<usize>,
        rows: Rows<'_, T>,
    );
}

/// Rows of a head, from one of a block on.
struct Place<'a> {
    elements: Elements<'a>,
    row: usize,
    head: usize,
}

impl<'a> Place<'a> {
    /// Those of a head that a walk reads in a tile.
    #[inline(always)]
    fn of<W: Walk>((block, positions): (&Block<'a>, &Range<usize>), head: usize) -> Self {
        Self {
            elements: W::elements(block),
            row: positions.start - block.positions.start,
            head,
        }
    }

    /// Where they lie, as an address only.
    #[inline(always)]
    fn address(&self, shape: &AttentionShape) -> *const u8 {
        let at = (self.row * shape.kv_heads + self.head) * shape.head_dim;
        match self.elements {
            Elements::F32(x) => x.as_ptr().wrapping_add(at).cast(),
            Elements::F16(x) => x.as_ptr().wrapping_add(at).cast(),
            Elements::Bf16(x) => x.as_ptr().wrapping_add(at).cast(),
        }
    }
}

/// Where a walk over a span begins, for a head.
#[inline(always)]
fn beginning<'a, W: Walk>(group: &Group<'a>, span: usize, head: usize) -> Option<Place<'a>> {
    let first = group.tiles(span).next();
    first.map(|(block, positions)| Place::of::<W>((block, &positions), head))
}

/// Queries times keys.
struct Scores;

impl Walk for Scores {
    #[inline(always)]
    fn elements<'a>(block: &Block<'a>) -> Elements<'a> {
        block.keys
    }

    #[inline(always)]
    fn after<'a>(group: &Group<'a>, span: usize) -> Option<Place<'a>> {
        beginning::<Values>(group, span, group.head)
    }

    #[inline(always)]
    fn step<S: Simd, T: Cached>(
        partial: &mut Partial<'_>,
        s: S,
        _: &mut [f32],
        query: usize,
        positions: &Range<usize>,
        rows: Rows<'_, T>,
    ) {
        // Eight wide sums, or with fewer registers four.
        if S::REGISTERS > 16 {
            partial.score::<S, T, 4>(s, query, positions, rows);
        } else {
            partial.score::<S, T, 2>(s, query, positions, rows);
        }
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
    fn after<'a>(group: &Group<'a>, span: usize) -> Option<Place<'a>> {
        if group.head + 1 < group.shape.kv_heads {
            beginning::<Scores>(group, span, group.head + 1)
        } else {
            beginning::<Scores>(group, span + 1, 0)
        }
    }

    #[inline(always)]
    fn step<S: Simd, T: Cached>(
        partial: &mut Partial<'_>,
        s: S,
        records: &mut [f32],
        query: usize,
        positions: &Range<usize>,
        rows: Rows<'_, T>,
    ) {
        partial.sum(s, records, query, positions, rows);
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
        let group = self.group;
        let mut tiles = group.tiles(span).peekable();
        while let Some((block, positions)) = tiles.next() {
            let next = match tiles.peek() {
                Some((block, positions)) => Some(Place::of::<W>((*block, positions), group.head)),
                None => W::after(group, span),
            };
            let next = next.map(|next| next.address(group.shape));
            let first = positions.start - block.positions.start;
            // Taken out so that the rest can be borrowed beside it.
            let tile = std::mem::take(&mut self.tile);
            let count = positions.len();
            let widened = match W::elements(block) {
                Elements::F32(x) => Some(match self.in_place(x, first, next) {
                    Some(rows) => rows,
                    None => self.widened(s, x, first, count, tile),
                }),
                Elements::F16(x) => match self.in_place(x, first, next) {
                    Some(rows) => {
                        self.quads::<S, W, f16>(s, records, &positions, rows);
                        None
                    }
                    None => Some(self.widened(s, x, first, count, tile)),
                },
                Elements::Bf16(x) => match self.in_place(x, first, next) {
                    Some(rows) => {
                        self.quads::<S, W, bf16>(s, records, &positions, rows);
                        None
                    }
                    None => Some(self.widened(s, x, first, count, tile)),
                },
            };
            if let Some(rows) = widened {
                self.quads::<S, W, f32>(s, records, &positions, rows);
            }
            self.tile = tile;
        }
    }

    /// The rows from `first` of a block on, if they may be read where they are.
    #[inline(always)]
    fn in_place<'t, T: Cached>(
        &self,
        x: &'t [T],
        first: usize,
        next: Option<*const u8>,
    ) -> Option<Rows<'t, T>> {
        let width = self.group.shape.head_dim;
        let stride = self.group.shape.kv_heads * width;
        let start = first * stride + self.group.head * width;
        (width == self.stride && self.group.queries() <= IN_PLACE)
            .then(|| Rows::new(&x[start..], stride, width, next.map(<*const u8>::cast)))
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
        Rows::new(tile, self.stride, self.stride, None)
    }

    #[inline(always)]
    fn quads<S: Simd, W: Walk, T: Cached>(
        &mut self,
        s: S,
        records: &mut [f32],
        positions: &Range<usize>,
        rows: Rows<'_, T>,
    ) {
        for query in (0..self.group.queries()).step_by(QUAD) {
            W::step::<S, T>(self, s, records, query, positions, rows);
        }
    }

    /// Positions of a quad's first and last query.
    #[inline(always)]
    fn seers(&self, query: usize) -> (usize, usize) {
        (self.group.position(query), self.group.position(query + QUAD - 1))
    }

    /// A quad by the tile's keys, `K` at a time.
    #[inline(always)]
    fn score<S: Simd, T: Cached, const K: usize>(
        &mut self,
        s: S,
        query: usize,
        positions: &Range<usize>,
        keys: Rows<'_, T>,
    ) {
        let sight = self.group.segment.sight;
        let (oldest, newest) = self.seers(query);
        if sight.seen(oldest, newest, positions).iter().all(Range::is_empty) {
            return;
        }
        let chunks = self.stride / LANES;
        let quad = &self.q[query * self.stride..][..QUAD * self.stride];
        let quad: &[[[f32; WIDE]; 2]] = &quad.as_chunks().0.as_chunks().0[..chunks];
        let scale = s.splat(1.0 / (self.group.shape.head_dim as f32).sqrt());
        let place = positions.start % SPAN;
        let count = positions.len();
        for first in (0..count).step_by(K) {
            // Beyond the last row it is taken again.
            let k: [&[[T; LANES]]; K] =
                std::array::from_fn(|i| &keys.row((first + i).min(count - 1))[..chunks]);
            if query == 0 {
                for row in first..first + K {
                    keys.ask_row(s, row);
                }
            }
            // Of two queries each, side by side.
            let mut sums = [[s.wide_splat(0.0); 2]; K];
            for (chunk, quad) in quad.iter().enumerate() {
                let [a, b] = [s.wide_load(&quad[0]), s.wide_load(&quad[1])];
                for (sums, k) in sums.iter_mut().zip(k) {
                    let k = s.twice(T::widen(s, &k[chunk]));
                    sums[0] = s.wide_fma(a, k, sums[0]);
                    sums[1] = s.wide_fma(b, k, sums[1]);
                }
            }
            for (pair, sums) in sums.as_chunks::<2>().0.iter().enumerate() {
                // By query and then by key. No closures: they would not be compiled for the instruction set.
                let mut eight = [s.zero(); LANES];
                for (key, of_key) in sums.iter().enumerate() {
                    for (queries, sums) in of_key.iter().enumerate() {
                        let [a, b] = s.halves(*sums);
                        eight[4 * queries + key] = a;
                        eight[4 * queries + 2 + key] = b;
                    }
                }
                let products = s.lanes(s.mul(s.sums(eight), scale));
                let first = first + 2 * pair;
                let valid = count.saturating_sub(first).min(2);
                for (i, products) in products.as_chunks::<2>().0.iter().enumerate() {
                    let to = (query + i) * SPAN + place + first;
                    if valid == 2 {
                        self.scores[to..to + 2].copy_from_slice(products);
                    } else if valid == 1 {
                        self.scores[to] = products[0];
                    }
                }
            }
        }
        if !sight.all_see(oldest, newest, positions) {
            for query in query..query + QUAD {
                let seer = self.group.position(query);
                for key in positions.clone().filter(|key| !sight.sees(seer, *key)) {
                    self.scores[query * SPAN + key % SPAN] = f32::NEG_INFINITY;
                }
            }
        }
    }

    /// Adds the tile's values to the sums of a quad: together if its queries see the same of it, else one by one.
    #[inline(always)]
    fn sum<S: Simd, T: Cached>(
        &mut self,
        s: S,
        records: &mut [f32],
        query: usize,
        positions: &Range<usize>,
        values: Rows<'_, T>,
    ) {
        let sight = self.group.segment.sight;
        let (oldest, newest) = self.seers(query);
        let rows_of = |seer| {
            let runs = sight.seen(seer, seer, positions).into_iter();
            let runs = runs.filter(|run| !run.is_empty());
            runs.map(|run| run.start - positions.start..run.end - positions.start)
        };
        let place = positions.start % SPAN;
        if oldest == newest || sight.all_see(oldest, newest, positions) {
            for rows in rows_of(oldest) {
                // Eight wide sums, or with fewer registers four.
                if S::REGISTERS > 16 {
                    self.weigh::<S, T, QUAD, 2>(s, records, query, place, rows, values);
                } else {
                    self.weigh::<S, T, QUAD, 1>(s, records, query, place, rows, values);
                }
            }
            return;
        }
        for query in query..query + QUAD {
            for rows in rows_of(self.group.position(query)) {
                self.weigh::<S, T, 1, 4>(s, records, query, place, rows, values);
            }
        }
    }

    /// `sums[query] += weight[query] * value`, for `Q` queries and some rows of a tile that begins at `place` of the span.
    #[inline(always)]
    fn weigh<S: Simd, T: Cached, const Q: usize, const W: usize>(
        &mut self,
        s: S,
        records: &mut [f32],
        query: usize,
        place: usize,
        rows: Range<usize>,
        values: Rows<'_, T>,
    ) {
        values.assert_holds(rows.end);
        let weights: [&[f32]; Q] =
            std::array::from_fn(|i| &self.scores[(query + i) * SPAN + place..][rows.clone()]);
        let strips = self.stride / WIDE;
        let records = records.as_chunks_mut::<WIDE>().0;
        let asks = query == 0;
        let mut strip = 0;
        while strip < strips {
            // A record begins with its scalars.
            let sums_at = |i: usize| (query + i) * (1 + strips) + 1 + strip;
            // SAFETY: the rows are there by the assertion, and the strips are a row's.
            unsafe {
                if strip + W <= strips {
                    weigh_strips::<S, T, Q, W>(
                        s,
                        records,
                        sums_at,
                        weights,
                        rows.clone(),
                        values,
                        strip,
                        asks,
                    );
                    strip += W;
                } else {
                    weigh_strips::<S, T, Q, 1>(
                        s,
                        records,
                        sums_at,
                        weights,
                        rows.clone(),
                        values,
                        strip,
                        asks,
                    );
                    strip += 1;
                }
            }
        }
    }
}

/// # Safety
/// `values` hold `rows`, of which a row has `W` wide vectors from `strip` on; there is a weight for each row.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn weigh_strips<S: Simd, T: Cached, const Q: usize, const W: usize>(
    s: S,
    records: &mut [[f32; WIDE]],
    sums_at: impl Fn(usize) -> usize,
    weights: [&[f32]; Q],
    rows: Range<usize>,
    values: Rows<'_, T>,
    strip: usize,
    asks: bool,
) {
    let mut sums = [[s.wide_splat(0.0); W]; Q];
    for (i, sums) in sums.iter_mut().enumerate() {
        for (sum, total) in sums.iter_mut().zip(&records[sums_at(i)..]) {
            *sum = s.wide_load(total);
        }
    }
    for (at, row) in rows.enumerate() {
        let mut lanes = [s.wide_splat(0.0); W];
        for (i, lanes) in lanes.iter_mut().enumerate() {
            if asks {
                values.ask_strip(s, row, strip + i);
            }
            // SAFETY: by the caller's promise.
            *lanes = T::widen_wide(s, unsafe { values.strip(row, strip + i) });
        }
        for (sums, weights) in sums.iter_mut().zip(weights) {
            // SAFETY: by the caller's promise.
            let weight = s.wide_splat(unsafe { *weights.get_unchecked(at) });
            for (sum, v) in sums.iter_mut().zip(lanes) {
                *sum = s.wide_fma(weight, v, *sum);
            }
        }
    }
    for (i, sums) in sums.into_iter().enumerate() {
        for (sum, total) in sums.into_iter().zip(&mut records[sums_at(i)..]) {
            s.wide_store(sum, total);
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
