//! Weights of f32, bf16 and f16.

use std::ops::Range;

use candle_core::WithDType;
use half::{bf16, f16};

use crate::pool::{self, Shared};
use crate::simd::{Line, Plain, Simd, WIDE};

use super::kernel::{Matrix, Tile, BLOCK, STRIPS, TILE};
use super::lines::Lines;
use super::rows::FloatRows;

/// An element type of weights.
pub(super) trait Element: WithDType + Plain + Sync {
    /// Lines of two features' weights for a strip.
    const LINES: usize;

    /// Where among the elements of those lines the weight of an output and a feature is.
    fn place(output: usize, feature: usize) -> (usize, usize);

    /// The two features' weights.
    fn widen<S: Simd>(s: S, lines: &[Line]) -> [S::W; 2];

    fn elements(line: &Line) -> &[Self];

    fn elements_mut(line: &mut Line) -> &mut [Self];

    fn to_f32(self) -> f32;
}

impl Element for f32 {
    const LINES: usize = 2;

    fn place(output: usize, feature: usize) -> (usize, usize) {
        (feature, output)
    }

    #[inline(always)]
    fn widen<S: Simd>(s: S, lines: &[Line]) -> [S::W; 2] {
        [s.wide_load(lines[0].view()), s.wide_load(lines[1].view())]
    }

    fn elements(line: &Line) -> &[Self] {
        line.view::<_, WIDE>()
    }

    fn elements_mut(line: &mut Line) -> &mut [Self] {
        line.view_mut::<_, WIDE>()
    }

    fn to_f32(self) -> f32 {
        self
    }
}

impl Element for f16 {
    const LINES: usize = 1;

    fn place(output: usize, feature: usize) -> (usize, usize) {
        (0, feature * WIDE + output)
    }

    #[inline(always)]
    fn widen<S: Simd>(s: S, lines: &[Line]) -> [S::W; 2] {
        lines[0]
            .view::<[f16; WIDE], 2>()
            .each_ref()
            .map(|x| s.wide_f16(x))
    }

    fn elements(line: &Line) -> &[Self] {
        line.view::<_, { 2 * WIDE }>()
    }

    fn elements_mut(line: &mut Line) -> &mut [Self] {
        line.view_mut::<_, { 2 * WIDE }>()
    }

    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }
}

impl Element for bf16 {
    const LINES: usize = 1;

    fn place(output: usize, feature: usize) -> (usize, usize) {
        (0, 2 * output + feature)
    }

    #[inline(always)]
    fn widen<S: Simd>(s: S, lines: &[Line]) -> [S::W; 2] {
        s.bf16_pairs(&lines[0])
    }

    fn elements(line: &Line) -> &[Self] {
        line.view::<_, { 2 * WIDE }>()
    }

    fn elements_mut(line: &mut Line) -> &mut [Self] {
        line.view_mut::<_, { 2 * WIDE }>()
    }

    fn to_f32(self) -> f32 {
        bf16::to_f32(self)
    }
}

/// A weight matrix: `[tile][two features][strip][line]`, zeros after the last output and the last feature.
///
/// A lane sums the products of a block of features in order, and adds the sums of blocks in order.
pub(super) struct Floats<T> {
    lines: Lines,
    in_features: usize,
    out_features: usize,
    of: std::marker::PhantomData<T>,
}

impl<T: Element> Floats<T> {
    /// Packs rows of `in_features` each, which is not 0.
    pub(super) fn new(rows: &[&[T]], in_features: usize) -> Self {
        let mut new = Self {
            lines: Lines::new(0),
            in_features,
            out_features: rows.len(),
            of: std::marker::PhantomData,
        };
        let len = new.tile_lines();
        new.lines = Lines::new(new.tiles() * len);
        let shared = Shared::new(&mut new.lines);
        pool::for_each(rows.len().div_ceil(TILE), rows.len() * in_features, &|tile| {
            // SAFETY: one task a tile, and tiles do not overlap.
            let lines = unsafe { shared.part(tile * len..(tile + 1) * len) };
            for (output, row) in rows[tile * TILE..].iter().take(TILE).enumerate() {
                for (pair, two) in row.chunks(2).enumerate() {
                    for (feature, weight) in two.iter().enumerate() {
                        let (line, at) = T::place(output % WIDE, feature);
                        let line = (pair * STRIPS + output / WIDE) * T::LINES + line;
                        T::elements_mut(&mut lines[line])[at] = *weight;
                    }
                }
            }
        });
        new
    }

    /// Lines of a tile.
    fn tile_lines(&self) -> usize {
        self.in_features.div_ceil(2) * STRIPS * T::LINES
    }

    pub(super) fn bytes(&self) -> usize {
        size_of_val::<[Line]>(&self.lines)
    }

    /// One output's weights.
    pub(super) fn row(&self, row: usize) -> impl Iterator<Item = T> + '_ {
        let tile = &self.lines[row / TILE * self.tile_lines()..];
        let output = row % TILE;
        (0..self.in_features).map(move |feature| {
            let (line, at) = T::place(output % WIDE, feature % 2);
            T::elements(&tile[(feature / 2 * STRIPS + output / WIDE) * T::LINES + line])[at]
        })
    }

    /// Some of the outputs.
    pub(super) fn select(&self, outputs: &[u32]) -> Self {
        let rows: Vec<Vec<T>> = outputs
            .iter()
            .map(|row| self.row(*row as usize).collect())
            .collect();
        Self::new(
            &rows.iter().map(Vec::as_slice).collect::<Vec<_>>(),
            self.in_features,
        )
    }
}

impl<T: Element> Matrix for Floats<T> {
    type Rows = FloatRows;

    fn in_features(&self) -> usize {
        self.in_features
    }

    fn out_features(&self) -> usize {
        self.out_features
    }

    #[inline(always)]
    fn add<S: Simd, const R: usize>(
        &self,
        s: S,
        tile: usize,
        features: Range<usize>,
        rows: &FloatRows,
        group: usize,
        totals: &mut [Tile; R],
    ) {
        debug_assert!(features.len() <= BLOCK && features.start.is_multiple_of(2));
        let pairs = features.start / 2..features.end.div_ceil(2);
        let width = STRIPS * T::LINES;
        let at = tile * self.tile_lines();
        let lines = &self.lines[at + pairs.start * width..at + pairs.end * width];
        let x = rows.group::<R>(group, 2 * pairs.start..2 * pairs.end);
        if R <= S::BOTH {
            sum::<S, T, R, 2>(s, lines, 0, x, totals);
        } else {
            sum::<S, T, R, 1>(s, lines, 0, x, totals);
            sum::<S, T, R, 1>(s, lines, 1, x, totals);
        }
    }
}

/// Adds the products of `W` strips from `first` on.
#[inline(always)]
fn sum<S: Simd, T: Element, const R: usize, const W: usize>(
    s: S,
    lines: &[Line],
    first: usize,
    x: &[[f32; R]],
    totals: &mut [Tile; R],
) {
    let mut sums = [[s.wide_splat(0.0); W]; R];
    for (lines, x) in lines.chunks_exact(STRIPS * T::LINES).zip(x.as_chunks::<2>().0) {
        let mut weights = [[s.wide_splat(0.0); 2]; W];
        for (i, weights) in weights.iter_mut().enumerate() {
            let lines = &lines[(first + i) * T::LINES..(first + i + 1) * T::LINES];
            s.ask(lines);
            *weights = T::widen(s, lines);
        }
        for (feature, x) in x.iter().enumerate() {
            for (sums, x) in sums.iter_mut().zip(x) {
                let x = s.wide_splat(*x);
                for (sum, weights) in sums.iter_mut().zip(&weights) {
                    *sum = s.wide_fma(x, weights[feature], *sum);
                }
            }
        }
    }
    for (total, sums) in totals.iter_mut().zip(sums) {
        for (total, sum) in total[first..].iter_mut().zip(sums) {
            s.wide_store(s.wide_add(s.wide_load(total), sum), total);
        }
    }
}
