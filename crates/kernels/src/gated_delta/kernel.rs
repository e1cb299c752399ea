//! One key head of one segment, with its value heads.

use std::mem::MaybeUninit;
use std::ops::Range;

use crate::pool::{Shared, Unwritten, LINE};
use crate::rows::RmsNorm;
use crate::simd::{self, Kernel, Simd, LANES, WIDE};

use super::tile::{add, find, put, store, wide, Decay, Group, State, Token, COLUMNS, GROUP, ROWS, WIDTH};
use super::GatedDeltaShape;

/// Added to the sum of squares of a query or key.
const L2_EPS: f32 = 1e-6;

/// Weights as slices, and gates as far as they do not depend on a token.
pub(super) struct Layer<'a> {
    pub(super) shape: &'a GatedDeltaShape,
    /// `[conv_kernel, channels]`
    pub(super) conv: &'a [f32],
    pub(super) a_log: &'a [f32],
    pub(super) dt_bias: &'a [f32],
    pub(super) norm: &'a [f32],
}

/// One token's record.
#[derive(Clone, Copy)]
pub(super) struct Record<'a> {
    /// `[key_heads, key_dim]`
    pub(super) key: &'a [f32],
    /// `[value_heads]`
    pub(super) decay: &'a [f32],
    /// `[value_heads, value_dim]`
    pub(super) update: &'a [f32],
    /// `[channels]`
    pub(super) input: &'a [f32],
}

/// Where records go.
pub(super) struct Records<'a> {
    pub(super) key: Shared<'a, MaybeUninit<f32>>,
    /// Head by head, [`apart`].
    pub(super) decay: Shared<'a, f32>,
    pub(super) update: Shared<'a, MaybeUninit<f32>>,
    pub(super) input: Shared<'a, MaybeUninit<f32>>,
}

/// From the numbers of a head to those of the next, of which there are `len`: whole cache lines, since threads that write to one
/// line wait for each other.
pub(super) fn apart(len: usize) -> usize {
    len.max(1).next_multiple_of(LINE)
}

/// The last rows before the convolution, and where they go.
pub(super) struct Window<'a> {
    rows: Vec<&'a [f32]>,
    /// `[conv_kernel - 1, channels]`
    to: Shared<'a, MaybeUninit<f32>>,
}

impl<'a> Window<'a> {
    /// The window after all of `rows`.
    pub(super) fn new(shape: &GatedDeltaShape, mut rows: Vec<&'a [f32]>, to: &'a mut Unwritten) -> Self {
        rows.drain(..rows.len() + 1 - shape.conv_kernel);
        Self {
            rows,
            to: to.shared(),
        }
    }
}

/// One segment.
pub(super) struct Segment<'a> {
    /// `[rows, projected]`
    pub(super) projected: &'a [f32],
    pub(super) rows: usize,
    /// The `conv_kernel - 1` rows before the first.
    pub(super) history: Vec<&'a [f32]>,
    pub(super) fold: Vec<Record<'a>>,
    pub(super) replay: Vec<Record<'a>>,
    pub(super) state: State<'a>,
    /// `[value_heads]`
    pub(super) scale: &'a [f32],
    /// Where the scale goes, if it moves: a number of each head, [`apart`].
    pub(super) new_scale: Option<Shared<'a, f32>>,
    /// The convolution's window for the next call, if it moves.
    pub(super) window: Option<Window<'a>>,
    /// Where the records go, if the call is recorded.
    pub(super) records: Option<Records<'a>>,
    /// `[rows, value_heads * value_dim]`
    pub(super) mixed: Shared<'a, f32>,
}

impl<'a> Segment<'a> {
    /// Row `at` of history and new rows: the one that meets tap `tap` for row `row` is `row + tap`.
    #[inline(always)]
    fn input(&self, shape: &GatedDeltaShape, at: usize) -> &'a [f32] {
        match self.history.get(at) {
            Some(row) => row,
            None => &self.projected[(at - self.history.len()) * shape.projected()..][..shape.channels()],
        }
    }
}

/// All of a segment that belongs to one key head.
pub(super) struct Unit<'a> {
    pub(super) layer: &'a Layer<'a>,
    pub(super) segment: &'a Segment<'a>,
    pub(super) key_head: usize,
    /// [`Unit::scratch`] numbers.
    pub(super) scratch: &'a mut [f32],
}

impl Unit<'_> {
    pub(super) fn scratch(shape: &GatedDeltaShape, rows: usize) -> usize {
        let wide = shape.value_dim.next_multiple_of(COLUMNS);
        rows * (2 * shape.key_dim + 2 * wide + 2) + shape.key_dim * COLUMNS
    }
}

impl Kernel for Unit<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self {
            layer,
            segment,
            key_head,
            scratch,
        } = self;
        let shape = layer.shape;
        let (rows, key_dim) = (segment.rows, shape.key_dim);
        let wide = shape.value_dim.next_multiple_of(COLUMNS);
        // In front, where it begins with a cache line.
        let (tile, scratch) = scratch.split_at_mut(key_dim * COLUMNS);
        let tile = tile.as_chunks_mut::<COLUMNS>().0;
        let (q, scratch) = scratch.split_at_mut(rows * key_dim);
        let (k, scratch) = scratch.split_at_mut(rows * key_dim);
        let (v, scratch) = scratch.split_at_mut(rows * wide);
        let (o, scratch) = scratch.split_at_mut(rows * wide);
        let (decays, scratch) = scratch.split_at_mut(rows);
        let betas = &mut scratch[..rows];

        for record in segment.fold.iter().chain(&segment.replay) {
            ask(s, &record.key[key_head * key_dim..][..key_dim]);
            let values = shape.group() * shape.value_dim;
            ask(s, &record.update[key_head * values..][..values]);
        }
        let q_channel = key_head * key_dim;
        let k_channel = shape.keys() + q_channel;
        convolve(s, layer, segment, q_channel, key_dim, q, key_dim);
        convolve(s, layer, segment, k_channel, key_dim, k, key_dim);
        for q in q.chunks_exact_mut(key_dim) {
            l2_norm(s, q, 1.0 / (key_dim as f32).sqrt());
        }
        for (row, k) in k.chunks_exact_mut(key_dim).enumerate() {
            l2_norm(s, k, 1.0);
            if let Some(records) = &segment.records {
                let at = row * shape.keys() + q_channel;
                // SAFETY: one unit has this key head of this row.
                unsafe { records.key.write(at, k) };
            }
        }
        leave_inputs(shape, segment, q_channel..q_channel + key_dim);
        leave_inputs(shape, segment, k_channel..k_channel + key_dim);
        if key_head + 1 < shape.key_heads {
            ask_inputs(s, layer, segment, q_channel + key_dim, key_dim);
            ask_inputs(s, layer, segment, k_channel + key_dim, key_dim);
        }
        for head in key_head * shape.group()..(key_head + 1) * shape.group() {
            let channel = 2 * shape.keys() + head * shape.value_dim;
            if head + 1 < shape.value_heads {
                ask_inputs(s, layer, segment, channel + shape.value_dim, shape.value_dim);
            }
            v.fill(0.0);
            convolve(s, layer, segment, channel, shape.value_dim, v, wide);
            leave_inputs(shape, segment, channel..channel + shape.value_dim);
            for (row, (g, b)) in decays.iter_mut().zip(betas.iter_mut()).enumerate() {
                *g = decay(layer, segment, row, head);
                *b = beta(layer, segment, row, head);
                if let Some(records) = &segment.records {
                    let at = head * apart(rows) + row;
                    // SAFETY: one unit has this value head.
                    unsafe { records.decay.part(at..at + 1) }.fill(*g);
                }
            }
            let mut head = Head {
                layer,
                segment,
                key_head,
                head,
                q,
                k,
                v,
                o,
                decays,
                betas,
                wide,
                tile,
            };
            for start in (0..shape.value_dim).step_by(COLUMNS) {
                head.columns(s, start, COLUMNS.min(shape.value_dim - start));
            }
            head.finish(s);
        }
    }
}

/// Asks for the lines of some numbers.
#[inline(always)]
fn ask<S: Simd>(s: S, x: &[f32]) {
    for line in x.chunks(16) {
        s.prefetch(line.as_ptr());
    }
}

/// Asks for one half of what comes so many numbers after a row of a tile: the machine does not guess it.
#[inline(always)]
fn ask_half<S: Simd>(s: S, row: &[f32], following: usize, half: usize) {
    const LINES: usize = COLUMNS / LINE / 2;
    for line in LINES * half..LINES * (half + 1) {
        s.prefetch(row.as_ptr().wrapping_add(following + LINE * line));
    }
}

/// Asks for what [`convolve`] is to read for the next head: short pieces, which the machine does not guess.
#[inline(always)]
fn ask_inputs<S: Simd>(s: S, layer: &Layer<'_>, segment: &Segment<'_>, channel: usize, width: usize) {
    /// More rows would push each other out of the cache before they are read.
    const ROWS: usize = 16;
    for weights in layer.conv.chunks_exact(layer.shape.channels()) {
        ask(s, &weights[channel..channel + width]);
    }
    for x in &segment.history {
        ask(s, &x[channel..channel + width]);
    }
    for x in segment.projected.chunks_exact(layer.shape.projected()).take(ROWS) {
        ask(s, &x[channel..channel + width]);
    }
}

/// Convolution and SiLU of `width` channels, one row of `to` after `stride` numbers.
#[inline(always)]
fn convolve<S: Simd>(
    s: S,
    layer: &Layer<'_>,
    segment: &Segment<'_>,
    channel: usize,
    width: usize,
    to: &mut [f32],
    stride: usize,
) {
    const BLOCK: usize = 8 * LANES;
    let shape = layer.shape;
    for (row, to) in to.chunks_exact_mut(stride).enumerate() {
        let (blocks, rest) = to[..width].as_chunks_mut::<BLOCK>();
        let tail = channel + blocks.len() * BLOCK;
        for (block, to) in blocks.iter_mut().enumerate() {
            let at = channel + block * BLOCK;
            let mut sums = [s.zero(); BLOCK / LANES];
            for (tap, weights) in layer.conv.chunks_exact(shape.channels()).enumerate() {
                let x = segment.input(shape, row + tap)[at..at + BLOCK].as_chunks().0;
                let weights = weights[at..at + BLOCK].as_chunks().0;
                for ((sum, x), weights) in sums.iter_mut().zip(x).zip(weights) {
                    *sum = s.fma(s.load(weights), s.load(x), *sum);
                }
            }
            for (sum, to) in sums.into_iter().zip(to.as_chunks_mut().0) {
                s.store(simd::silu(s, sum), to);
            }
        }
        for (part, to) in rest.chunks_mut(LANES).enumerate() {
            let at = tail + part * LANES..tail + part * LANES + to.len();
            let mut sum = s.zero();
            for (tap, weights) in layer.conv.chunks_exact(shape.channels()).enumerate() {
                let x = &segment.input(shape, row + tap)[at.clone()];
                sum = s.fma(s.load_part(&weights[at.clone()]), s.load_part(x), sum);
            }
            s.store_part(simd::silu(s, sum), to);
        }
    }
}

/// `x / sqrt(sum(x^2) + eps) * scale`
#[inline(always)]
fn l2_norm<S: Simd>(s: S, x: &mut [f32], scale: f32) {
    let inverse = s.splat(1.0 / (simd::sum_of_squares(s, x) + L2_EPS).sqrt());
    let scale = s.splat(scale);
    for x in x.chunks_mut(LANES) {
        s.store_part(s.mul(s.mul(s.load_part(x), inverse), scale), x);
    }
}

/// The factor by which the state decays: `exp(-exp(a_log) softplus(a + dt_bias))`, in [0, 1].
///
/// In f64: there the product cannot be infinity times zero for any finite f32.
fn decay(layer: &Layer<'_>, segment: &Segment<'_>, row: usize, head: usize) -> f32 {
    let shape = layer.shape;
    let a = segment.projected[(row + 1) * shape.projected() - shape.value_heads + head];
    let x = f64::from(a + layer.dt_bias[head]).clamp(f64::from(f32::MIN), f64::from(f32::MAX));
    let softplus = if x > 20.0 { x } else { x.exp().ln_1p() };
    let rate = f64::from(layer.a_log[head]).exp().min(f64::MAX);
    (-(rate * softplus)).exp() as f32
}

/// How much of the update is taken: the sigmoid of b.
fn beta(layer: &Layer<'_>, segment: &Segment<'_>, row: usize, head: usize) -> f32 {
    let shape = layer.shape;
    let b = segment.projected[(row + 1) * shape.projected() - 2 * shape.value_heads + head];
    (1.0 / (1.0 + (-f64::from(b)).exp())) as f32
}

/// Keeps some channels of the rows before the convolution: as records, and for the next call.
fn leave_inputs(shape: &GatedDeltaShape, segment: &Segment<'_>, channels: Range<usize>) {
    let leave = |to: &Shared<'_, MaybeUninit<f32>>, row: usize, from: &[f32]| {
        // SAFETY: one unit has these channels of this row.
        unsafe { to.write(row * shape.channels() + channels.start, &from[channels.clone()]) };
    };
    if let Some(records) = &segment.records {
        for (row, from) in segment.projected.chunks_exact(shape.projected()).enumerate() {
            leave(&records.input, row, from);
        }
    }
    if let Some(window) = &segment.window {
        for (row, from) in window.rows.iter().enumerate() {
            leave(&window.to, row, from);
        }
    }
}

/// One value head.
struct Head<'a> {
    layer: &'a Layer<'a>,
    segment: &'a Segment<'a>,
    key_head: usize,
    head: usize,
    /// `[rows, key_dim]`
    q: &'a [f32],
    /// `[rows, key_dim]`
    k: &'a [f32],
    /// `[rows, wide]`, zeros after `value_dim`
    v: &'a [f32],
    /// `[rows, wide]`
    o: &'a mut [f32],
    /// `[rows]`
    decays: &'a [f32],
    /// `[rows]`
    betas: &'a [f32],
    /// `value_dim` in whole tiles.
    wide: usize,
    /// `[key_dim]` rows of state columns.
    tile: &'a mut [[f32; COLUMNS]],
}

impl<'a> Head<'a> {
    /// Runs all tokens over the state columns `start..start + width`.
    #[inline(always)]
    fn columns<S: Simd>(&mut self, s: S, start: usize, width: usize) {
        let Segment {
            rows, fold, replay, ..
        } = self.segment;
        let one = *rows == 1 && replay.is_empty() && width == COLUMNS;
        let in_place = match (fold.len(), &self.segment.records) {
            (0, None) if one => self.in_place::<S, false>(s, start),
            (1, Some(_)) if one => self.in_place::<S, true>(s, start),
            _ => None,
        };
        let scale = match in_place {
            Some(scale) => scale,
            None => self.in_tile(s, start, width),
        };
        if let Some(new_scale) = &self.segment.new_scale {
            let at = self.head * apart(1);
            // SAFETY: one unit has this value head.
            unsafe { new_scale.part(at..at + 1) }.fill(scale);
        }
    }

    /// One token, which the state takes up, or if `FOLD` one after a record, which it takes up in place of the token. Gives the
    /// scale that is left behind, or nothing, and nothing is done, if a decay changes numbers.
    ///
    /// Both walks read the state itself. What the first makes of a row with the record, the second makes again, which takes less
    /// than a copy.
    #[inline(always)]
    fn in_place<S: Simd, const FOLD: bool>(&mut self, s: S, start: usize) -> Option<f32> {
        let Segment { fold, state, .. } = self.segment;
        let State::Write(state) = state else { return None };
        let GatedDeltaShape {
            key_dim, value_dim, ..
        } = *self.layer.shape;
        let mut scale = self.segment.scale[self.head];
        let group = self.group(s, fold, &mut scale, start, COLUMNS);
        let decay = Decay::new(scale, self.decays[0]);
        if group.moves || decay.moves() {
            return None;
        }
        let (q, k) = (&self.q[..key_dim], &self.k[..key_dim]);
        let (folded, fold) = match FOLD {
            true => (group.keys[0], wide(s, &group.updates[0])),
            false => (k, [s.wide_splat(0.0); WIDTH]),
        };
        let following = self.following(start, COLUMNS);
        let size = key_dim * value_dim;
        // SAFETY: one unit has this value head.
        let state = unsafe { state.part(self.head * size..(self.head + 1) * size) };

        let mut kv = [s.wide_splat(0.0); WIDTH];
        for ((row, k), folded) in state.chunks_exact(value_dim).zip(k).zip(folded) {
            let row = &row[start..].as_chunks::<COLUMNS>().0[0];
            ask_half(s, row, following, 0);
            let mut x = wide(s, row);
            if FOLD {
                add(s, &mut x, *folded, &fold);
            }
            find(s, &x, *k, &mut kv);
        }
        let update = self.update(s, 0, decay, kv, start, COLUMNS);
        let mut out = [s.wide_splat(0.0); WIDTH];
        let rows = state.chunks_exact_mut(value_dim).zip(k).zip(q).zip(folded);
        for (((row, k), q), folded) in rows {
            let row = &mut row[start..].as_chunks_mut::<COLUMNS>().0[0];
            ask_half(s, row, following, 1);
            let mut x = wide(s, row);
            if FOLD {
                add(s, &mut x, *folded, &fold);
                store(s, x, row);
            }
            add(s, &mut x, *k, &update);
            find(s, &x, *q, &mut out);
            if !FOLD {
                store(s, x, row);
            }
        }
        self.leave_output(s, 0, decay.scale, out, start);
        Some(if FOLD { scale } else { decay.scale })
    }

    /// Any tokens after any records, in a copy of the columns. Gives the scale that is left behind.
    ///
    /// One walk over the tile folds records, and one walk a token adds its update: what the next token finds under its key is
    /// known when the walk before it ends.
    #[inline(always)]
    fn in_tile<S: Simd>(&mut self, s: S, start: usize, width: usize) -> f32 {
        let Segment {
            rows,
            fold,
            replay,
            state,
            records,
            ..
        } = self.segment;
        let kept = fold.len().div_ceil(GROUP);
        let passes = (kept + replay.len().div_ceil(GROUP)).max(1);
        let mut groups = fold.chunks(GROUP).chain(replay.chunks(GROUP));
        let mut kv = [s.wide_splat(0.0); WIDTH];
        let mut scale = self.segment.scale[self.head];
        let mut folded = scale;
        let mut token = None;
        for pass in 1..=passes {
            let last = pass == passes;
            let records_of_pass = groups.next().unwrap_or_default();
            let group = self.group(s, records_of_pass, &mut scale, start, width);
            if pass == kept {
                folded = scale;
            }
            if last {
                token = self.token(0, scale);
            }
            let pass = Pass {
                from: (pass == 1).then_some(*state),
                // A state that is not recorded is written once all tokens are in it.
                keep: match records {
                    Some(_) => pass == kept,
                    None => last && *rows == 0,
                },
                next: token,
            };
            kv = self.pass(s, &group, &pass, start, width);
        }
        let mut row = 0;
        while let Some(Token { decay, .. }) = token {
            scale = decay.scale;
            let update = self.update(s, row, decay, kv, start, width);
            token = self.token(row + 1, scale);
            kv = self.advance(s, (row, scale), update, token, start, width);
            row += 1;
        }
        if records.is_some() {
            folded
        } else {
            scale
        }
    }

    /// The update of a row's token from what its key found, divided by the scale. Goes into the records too.
    #[inline(always)]
    fn update<S: Simd>(
        &self,
        s: S,
        row: usize,
        decay: Decay,
        kv: [S::W; WIDTH],
        start: usize,
        width: usize,
    ) -> [S::W; WIDTH] {
        let at = row * self.wide + start;
        let (beta, minus, inverse) = (
            s.wide_splat(self.betas[row]),
            s.wide_splat(-decay.scale),
            s.wide_splat(decay.inverse()),
        );
        let mut update = [0.0; COLUMNS];
        let mut scaled = [s.wide_splat(0.0); WIDTH];
        let v = self.v[at..at + COLUMNS].as_chunks::<WIDE>().0;
        for (((update, scaled), v), kv) in update
            .as_chunks_mut::<WIDE>()
            .0
            .iter_mut()
            .zip(&mut scaled)
            .zip(v)
            .zip(kv)
        {
            let u = s.wide_mul(beta, s.wide_fma(minus, kv, s.wide_load(v)));
            s.wide_store(u, update);
            *scaled = s.wide_mul(u, inverse);
        }
        if let Some(records) = &self.segment.records {
            let shape = self.layer.shape;
            let at = (row * shape.value_heads + self.head) * shape.value_dim + start;
            // SAFETY: one unit has these columns of this value head of this row.
            unsafe { records.update.write(at, &update[..width]) };
        }
        scaled
    }

    /// What a walk does for the token of a row after it, if there is one.
    fn token(&self, row: usize, scale: f32) -> Option<Token<'a>> {
        let key_dim = self.layer.shape.key_dim;
        (row < self.segment.rows).then(|| Token {
            decay: Decay::new(scale, self.decays[row]),
            key: &self.k[row * key_dim..][..key_dim],
        })
    }

    /// What a walk is to know of up to [`GROUP`] records. Moves the scale behind them.
    #[inline(always)]
    fn group<S: Simd>(
        &self,
        s: S,
        records: &[Record<'a>],
        scale: &mut f32,
        start: usize,
        width: usize,
    ) -> Group<'a> {
        let GatedDeltaShape {
            key_dim, value_dim, ..
        } = *self.layer.shape;
        let mut group = Group {
            len: records.len(),
            moves: false,
            decays: [Decay::NONE; GROUP],
            keys: [&[]; GROUP],
            updates: [[0.0; COLUMNS]; GROUP],
        };
        for (i, record) in records.iter().enumerate() {
            let decay = Decay::new(*scale, record.decay[self.head]);
            *scale = decay.scale;
            group.decays[i] = decay;
            group.moves |= decay.moves();
            group.keys[i] = &record.key[self.key_head * key_dim..][..key_dim];
            let update = &mut group.updates[i];
            update[..width].copy_from_slice(&record.update[self.head * value_dim + start..][..width]);
            let inverse = s.wide_splat(decay.inverse());
            for u in update.as_chunks_mut::<WIDE>().0 {
                s.wide_store(s.wide_mul(s.wide_load(u), inverse), u);
            }
        }
        group
    }

    /// From a row of some columns to the same row of the tile that is walked over next.
    fn following(&self, start: usize, width: usize) -> usize {
        let GatedDeltaShape {
            key_dim, value_dim, ..
        } = *self.layer.shape;
        if start + width < value_dim {
            COLUMNS
        } else {
            key_dim * value_dim - start
        }
    }

    /// Folds a group of records into the tile in one walk over it: each row gets all of them while it is in registers.
    #[inline(always)]
    fn pass<S: Simd>(
        &mut self,
        s: S,
        group: &Group<'_>,
        pass: &Pass<'_>,
        start: usize,
        width: usize,
    ) -> [S::W; WIDTH] {
        let shape = self.layer.shape;
        let columns = Columns {
            start: self.head * shape.key_dim * shape.value_dim + start,
            stride: shape.value_dim,
            width,
            following: self.following(start, width),
        };
        let state = self.segment.state;
        let mut kv = [s.wide_splat(0.0); WIDTH];
        if group.len == 0 {
            for (i, tile) in self.tile.iter_mut().enumerate() {
                pass.read(s, &columns, i, tile);
                pass.leave(s, &columns, state, i, tile, &mut kv);
            }
            return kv;
        }
        for (block, tiles) in self.tile.chunks_mut(ROWS).enumerate() {
            let first = block * ROWS;
            for (i, tile) in tiles.iter_mut().enumerate() {
                pass.read(s, &columns, first + i, tile);
            }
            match tiles.first_chunk_mut::<ROWS>() {
                Some(tiles) => group.fold_into(s, first, tiles),
                None => {
                    for (i, tile) in tiles.iter_mut().enumerate() {
                        group.fold_into(s, first + i, std::array::from_mut(tile));
                    }
                }
            }
            for (i, tile) in tiles.iter_mut().enumerate() {
                pass.leave(s, &columns, state, first + i, tile, &mut kv);
            }
        }
        kv
    }

    /// Adds the update of a row's token, divided by the scale, to the tile, which is decayed for it, and takes its output.
    #[inline(always)]
    fn advance<S: Simd>(
        &mut self,
        s: S,
        (row, scale): (usize, f32),
        update: [S::W; WIDTH],
        next: Option<Token<'_>>,
        start: usize,
        width: usize,
    ) -> [S::W; WIDTH] {
        let GatedDeltaShape {
            key_dim, value_dim, ..
        } = *self.layer.shape;
        let q = &self.q[row * key_dim..][..key_dim];
        let k = &self.k[row * key_dim..][..key_dim];
        let keep = next.is_none() && self.segment.records.is_none();
        let mut out = [s.wide_splat(0.0); WIDTH];
        let mut kv = [s.wide_splat(0.0); WIDTH];
        let rows = self.tile.iter_mut().zip(q).zip(k).enumerate();
        match &next {
            Some(token) => {
                for (i, ((tile, q), k)) in rows {
                    let mut x = wide(s, tile);
                    add(s, &mut x, *k, &update);
                    find(s, &x, *q, &mut out);
                    token.meet(s, i, &mut x, &mut kv);
                    store(s, x, tile);
                }
            }
            None => {
                for (i, ((tile, q), k)) in rows {
                    let mut x = wide(s, tile);
                    add(s, &mut x, *k, &update);
                    find(s, &x, *q, &mut out);
                    if keep {
                        let at = (self.head * key_dim + i) * value_dim + start;
                        put(s, x, self.segment.state, at..at + width);
                    }
                }
            }
        }
        self.leave_output(s, row, scale, out, start);
        kv
    }

    /// What a row's query found, times the scale.
    #[inline(always)]
    fn leave_output<S: Simd>(&mut self, s: S, row: usize, scale: f32, out: [S::W; WIDTH], start: usize) {
        let at = row * self.wide + start;
        let scale = s.wide_splat(scale);
        for (out, o) in out
            .into_iter()
            .zip(self.o[at..at + COLUMNS].as_chunks_mut::<WIDE>().0)
        {
            s.wide_store(s.wide_mul(scale, out), o);
        }
    }

    /// Norm and gate of all tokens' outputs.
    #[inline(always)]
    fn finish<S: Simd>(&self, s: S) {
        let shape = self.layer.shape;
        let width = shape.value_dim;
        for (row, o) in self.o.chunks_exact(self.wide).enumerate() {
            let at = row * shape.values() + self.head * width;
            // SAFETY: one unit has this value head of this row.
            let y = unsafe { self.segment.mixed.part(at..at + width) };
            RmsNorm {
                x: &o[..width],
                weight: self.layer.norm,
                eps: shape.eps as f32,
                y: &mut *y,
            }
            .run(s);
            let z = &self.segment.projected[row * shape.projected() + shape.channels() + self.head * width..]
                [..width];
            for (y, z) in y.chunks_mut(LANES).zip(z.chunks(LANES)) {
                s.store_part(s.mul(s.load_part(y), simd::silu(s, s.load_part(z))), y);
            }
        }
    }
}

/// A walk that folds records.
struct Pass<'a> {
    /// Where the tile comes from, if it is not there yet.
    from: Option<State<'a>>,
    /// Whether the result is written to the state as well.
    keep: bool,
    /// The token that comes after it.
    next: Option<Token<'a>>,
}

impl Pass<'_> {
    /// Reads a row, if the tile is still to be read.
    #[inline(always)]
    fn read<S: Simd>(&self, s: S, columns: &Columns, row: usize, tile: &mut [f32; COLUMNS]) {
        let Some(state) = self.from else { return };
        let from = match state {
            State::Read(state) => &state[columns.range(row)],
            // SAFETY: one unit has this value head, and it writes a row of columns only after this reading.
            State::Write(state) => unsafe { state.part(columns.range(row)) },
        };
        for half in 0..2 {
            ask_half(s, from, columns.following, half);
        }
        match from.first_chunk() {
            Some(from) => *tile = *from,
            None => {
                tile[..columns.width].copy_from_slice(from);
                tile[columns.width..].fill(0.0);
            }
        }
    }

    /// Leaves a row with its records in it: for the state, and for the next token.
    #[inline(always)]
    fn leave<S: Simd>(
        &self,
        s: S,
        columns: &Columns,
        state: State<'_>,
        row: usize,
        tile: &mut [f32; COLUMNS],
        kv: &mut [S::W; WIDTH],
    ) {
        let mut x = wide(s, tile);
        if self.keep {
            put(s, x, state, columns.range(row));
        }
        if let Some(token) = &self.next {
            token.meet(s, row, &mut x, kv);
            if token.decay.moves() {
                store(s, x, tile);
            }
        }
    }
}

/// Where a tile's rows are in a state.
struct Columns {
    /// Of the first row.
    start: usize,
    /// From a row to the next.
    stride: usize,
    width: usize,
    /// From a row to the same row of the tile that is walked over next.
    following: usize,
}

impl Columns {
    fn range(&self, row: usize) -> Range<usize> {
        let at = self.start + row * self.stride;
        at..at + self.width
    }
}
