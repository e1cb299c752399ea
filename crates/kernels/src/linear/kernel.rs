//! Rows times packed weights.
//!
//! An output of a row is one lane, summed in the order that its kind of weights says. Nothing else enters, so it does not
//! depend on how many rows or tiles are computed beside it: those only decide how many registers are busy and how often a
//! weight is read.

use std::ops::Range;

use crate::simd::{Kernel, Simd, WIDE};

use super::rows::Grouping;
use super::sink::Sink;

/// Strips of a tile: what one row needs to keep two chains of additions busy.
pub(super) const STRIPS: usize = 2;

/// Outputs of a tile.
pub(super) const TILE: usize = STRIPS * WIDE;

/// A row's totals of a tile.
pub(super) type Tile = [[f32; WIDE]; STRIPS];

/// Input features that are used for all rows before the next: a tile's weights for them (16 KB in bf16) stay in the
/// first-level cache while several groups of rows pass over them. Sums of floats are cut here too: short sums lose less to
/// rounding.
pub(super) const BLOCK: usize = 256;

/// Most rows whose totals are held at a time.
const PANEL: usize = 48;

/// Rows whose totals are held at a time.
pub(super) fn panel(grouping: Grouping) -> usize {
    grouping.size * grouping.groups().clamp(1, PANEL / grouping.size)
}

/// Packed weights.
pub(super) trait Matrix: Sync {
    /// Activations as its kernel reads them.
    type Rows: Sync;

    fn in_features(&self) -> usize;

    fn out_features(&self) -> usize;

    fn tiles(&self) -> usize {
        self.out_features().div_ceil(TILE)
    }

    /// Adds the products of one block of features with a group of `R` rows to the group's totals of a tile.
    fn add<S: Simd, const R: usize>(
        &self,
        s: S,
        tile: usize,
        features: Range<usize>,
        rows: &Self::Rows,
        group: usize,
        totals: &mut [Tile; R],
    );
}

/// What one run of a call's tasks does.
pub(super) struct Task<'a> {
    pub(super) tiles: Range<usize>,
    /// The first of the tasks.
    pub(super) number: usize,
    /// Where among all outputs those of the matrix begin.
    pub(super) first: usize,
    /// Of all outputs.
    pub(super) bias: Option<&'a [f32]>,
    pub(super) sink: &'a Sink<'a>,
}

impl Task<'_> {
    /// Hands on a row's totals of a tile of a matrix of `outputs`.
    fn give(&self, row: usize, tile: usize, outputs: usize, totals: &mut [f32]) {
        let count = TILE.min(outputs - tile * TILE);
        let column = self.first + tile * TILE;
        let totals = &mut totals[..count];
        if let Some(bias) = self.bias {
            for (total, bias) in totals.iter_mut().zip(&bias[column..column + count]) {
                *total += bias;
            }
        }
        self.sink.take(self.number, row, column, totals);
    }
}

/// The outputs of some tiles, for all rows.
pub(super) struct Columns<'a, M: Matrix> {
    pub(super) matrix: &'a M,
    pub(super) rows: &'a M::Rows,
    pub(super) grouping: Grouping,
    pub(super) task: &'a Task<'a>,
    /// Of [`panel`] rows.
    pub(super) totals: &'a mut [Tile],
}

impl<M: Matrix> Kernel for Columns<'_, M> {
    const ASKS: bool = true;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.grouping.size {
            1 => self.groups::<S, 1>(s),
            2 => self.groups::<S, 2>(s),
            4 if S::ROWS >= 4 => self.groups::<S, 4>(s),
            5 if S::ROWS >= 5 => self.groups::<S, 5>(s),
            6 if S::ROWS >= 6 => self.groups::<S, 6>(s),
            8 if S::ROWS >= 8 => self.groups::<S, 8>(s),
            12 if S::ROWS >= 12 => self.groups::<S, 12>(s),
            size => unreachable!("groups of {size} rows"),
        }
    }
}

impl<M: Matrix> Columns<'_, M> {
    #[inline(always)]
    fn groups<S: Simd, const R: usize>(self, s: S) {
        let Self {
            matrix,
            rows,
            grouping,
            task,
            totals,
        } = self;
        let k = matrix.in_features();
        let totals = totals.as_chunks_mut::<R>().0;
        let groups = grouping.groups();
        for first in (0..groups).step_by(totals.len()) {
            let panel = first..groups.min(first + totals.len());
            let totals = &mut totals[..panel.len()];
            for tile in task.tiles.clone() {
                totals.as_flattened_mut().fill(Tile::default());
                for start in (0..k).step_by(BLOCK) {
                    let features = start..k.min(start + BLOCK);
                    for (group, totals) in panel.clone().zip(&mut *totals) {
                        let features = features.clone();
                        matrix.add::<S, R>(s, tile, features, rows, group, totals);
                    }
                }
                for (group, totals) in panel.clone().zip(&mut *totals) {
                    for (row, totals) in grouping.members(group).zip(totals) {
                        task.give(row, tile, matrix.out_features(), totals.as_flattened_mut());
                    }
                }
            }
        }
    }
}
