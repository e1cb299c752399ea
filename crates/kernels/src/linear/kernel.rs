//! Rows times packed weights.
//!
//! An output is one lane. It is the sum, in order, of the sums over blocks of [`BLOCK`] input features, each summed in
//! order by fused multiply-adds. Nothing else enters, so an output does not depend on how many rows or tiles are
//! computed beside it: those only decide how many registers are busy and how often a weight is read.

use std::ops::Range;

use crate::pool::{self, Shared};
use crate::simd::{self, Isa, Kernel, Simd, LANES};

use super::packed::{Element, Packed, Strip, TILE};

/// Input features summed before the sum is added to the total. Short sums lose less to rounding, and a block of a tile
/// (16 KB in bf16) stays in the first-level cache while several groups of rows pass over it.
const BLOCK: usize = 512;

/// Tiles of a task: what one row needs to keep eight accumulators busy.
const TASK: usize = 4;

/// Most rows of a group: twelve accumulators, two weights and a broadcast are fifteen of sixteen registers.
const GROUP: usize = 6;

/// Bytes between the weights in use and those asked for from memory.
const AHEAD: usize = 8192;

/// Most rows whose totals a task holds at a time.
const PANEL: usize = 48;

/// `y[row, out] = x[row, in] . w[out, in] + bias[out]`
pub(super) fn forward<T: Element>(isa: Isa, w: &Packed<T>, bias: Option<&[f32]>, x: &[f32], y: &mut [f32]) {
    let rows = y.len() / w.out_features;
    let work = rows * w.out_features * w.in_features;
    let shared = Shared::new(y);
    pool::for_each(w.tiles().div_ceil(TASK), work, &|task| {
        simd::run(
            isa,
            Columns {
                w,
                bias,
                x,
                first: task * TASK,
                y: &shared,
            },
        );
    });
}

/// The output columns of up to [`TASK`] tiles, for all rows.
struct Columns<'a, T> {
    w: &'a Packed<T>,
    bias: Option<&'a [f32]>,
    x: &'a [f32],
    first: usize,
    y: &'a Shared<'a, f32>,
}

impl<T: Element> Kernel for Columns<'_, T> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { w, x, first, .. } = self;
        let k = w.in_features;
        let tiles = TASK.min(w.tiles() - first);
        let columns = first * TILE..((first + tiles) * TILE).min(w.out_features);
        let mut totals = [[[0.0_f32; TILE]; TASK]; PANEL];
        for (panel, x) in x.chunks(PANEL * k).enumerate() {
            let rows = x.len() / k;
            let totals = &mut totals[..rows];
            totals.fill([[0.0; TILE]; TASK]);
            // A few rows wait for the weights, and take each tile from end to end: memory is fastest in order. Many rows
            // wait for each other's features, and use a block of them for all tiles.
            let together = match rows {
                1 => 4,
                2 => 2,
                3..=16 => 1,
                _ => TASK,
            };
            for tile in (0..tiles).step_by(together) {
                let last = tiles.min(tile + together);
                for start in (0..k).step_by(BLOCK) {
                    let end = k.min(start + BLOCK);
                    let mut weights: [&[Strip<T>]; TASK] = [&[]; TASK];
                    for (i, weights) in weights[tile..last].iter_mut().enumerate() {
                        *weights = &w.tile(first + tile + i)[start..end];
                    }
                    let block = Block { k, start, end, x };
                    block.add(s, &weights, tile..last, totals);
                }
            }
            for (i, totals) in totals.iter().enumerate() {
                let at = (panel * PANEL + i) * w.out_features;
                // SAFETY: one task has these columns, and rows do not overlap.
                let y = unsafe { self.y.part(at + columns.start..at + columns.end) };
                y.copy_from_slice(&totals.as_flattened()[..y.len()]);
                if let Some(bias) = self.bias {
                    for (y, bias) in y.iter_mut().zip(&bias[columns.clone()]) {
                        *y += bias;
                    }
                }
            }
        }
    }
}

/// Input features `start..end` of some rows of `k`.
struct Block<'a> {
    k: usize,
    start: usize,
    end: usize,
    x: &'a [f32],
}

impl Block<'_> {
    /// Adds the block's part of every row and of the tiles in `range`.
    #[inline(always)]
    fn add<S: Simd, T: Element>(
        &self,
        s: S,
        tiles: &[&[Strip<T>]; TASK],
        range: Range<usize>,
        totals: &mut [[[f32; TILE]; TASK]],
    ) {
        let rows = totals.len();
        let groups = rows.div_ceil(GROUP);
        let mut tile = range.start;
        while tile < range.end {
            let width = match (rows, range.end - tile) {
                (1, 4) => 4,
                (1 | 2, 2..) => 2,
                _ => 1,
            };
            // As even as can be: 7 rows are 3 and 4.
            let mut row = 0;
            for group in 0..groups {
                let size = (rows - row) / (groups - group);
                match (size, width) {
                    (1, 4) => self.group::<S, T, 1, 4>(s, tiles, tile, totals, row),
                    (1, 2) => self.group::<S, T, 1, 2>(s, tiles, tile, totals, row),
                    (1, _) => self.group::<S, T, 1, 1>(s, tiles, tile, totals, row),
                    (2, 2) => self.group::<S, T, 2, 2>(s, tiles, tile, totals, row),
                    (2, _) => self.group::<S, T, 2, 1>(s, tiles, tile, totals, row),
                    (3, _) => self.group::<S, T, 3, 1>(s, tiles, tile, totals, row),
                    (4, _) => self.group::<S, T, 4, 1>(s, tiles, tile, totals, row),
                    (5, _) => self.group::<S, T, 5, 1>(s, tiles, tile, totals, row),
                    _ => self.group::<S, T, 6, 1>(s, tiles, tile, totals, row),
                }
                row += size;
            }
            tile += width;
        }
    }

    /// `R` rows from `row` on times `W` tiles from `tile` on, all accumulators in registers.
    #[inline(always)]
    fn group<S: Simd, T: Element, const R: usize, const W: usize>(
        &self,
        s: S,
        tiles: &[&[Strip<T>]; TASK],
        tile: usize,
        totals: &mut [[[f32; TILE]; TASK]],
        row: usize,
    ) {
        let len = self.end - self.start;
        let tiles: [&[Strip<T>]; W] = std::array::from_fn(|i| &tiles[tile + i][..len]);
        let x: [&[f32]; R] =
            std::array::from_fn(|i| &self.x[(row + i) * self.k + self.start..(row + i) * self.k + self.end]);
        let mut sums = [[[s.zero(); 2]; W]; R];
        for at in 0..len {
            let mut weights = [[s.zero(); 2]; W];
            for (weights, tile) in weights.iter_mut().zip(tiles) {
                // SAFETY: every tile was cut to `len` strips.
                let strip = unsafe { tile.get_unchecked(at) };
                s.prefetch(std::ptr::from_ref(strip).wrapping_byte_add(AHEAD));
                *weights = T::widen(s, strip);
            }
            for (sums, x) in sums.iter_mut().zip(x) {
                // SAFETY: every row was cut to `len` features.
                let x = s.splat(unsafe { *x.get_unchecked(at) });
                for (sums, weights) in sums.iter_mut().zip(weights) {
                    sums[0] = s.fma(x, weights[0], sums[0]);
                    sums[1] = s.fma(x, weights[1], sums[1]);
                }
            }
        }
        for (totals, sums) in totals[row..].iter_mut().zip(sums) {
            for (totals, sums) in totals[tile..].iter_mut().zip(sums) {
                let (halves, _) = totals.as_chunks_mut::<LANES>();
                for (total, sum) in halves.iter_mut().zip(sums) {
                    s.store(s.add(s.load(total), sum), total);
                }
            }
        }
    }
}
