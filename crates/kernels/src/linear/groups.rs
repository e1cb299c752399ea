//! Weights of 8 and 4 bits, in groups that share a scale.

use std::ops::Range;

use crate::pool::{self, Shared};
use crate::simd::{Line, Simd, WIDE};

use super::format::{Coding, Groups};
use super::kernel::{Matrix, Tile, STRIPS, TILE};
use super::lines::Lines;
use super::rows::{self, ByteRows, FloatRows, CHUNK};
use super::scales::Scales;

/// Lines of a strip's chunk.
const fn lines_of(bits: usize) -> usize {
    CHUNK * bits * WIDE / 8 / size_of::<Line>()
}

/// A weight matrix of `BITS` bits: `[tile][chunk][line][strip]`, zeros after the last output.
///
/// Of 8 bits, line `i` of a strip's chunk has for each output the features `4 i ..` of the chunk, side by side. Of 4 bits, it
/// has the features `8 i ..`: of each output's four bytes the low halves have the first four, the high halves the rest.
pub(super) struct Packed<const BITS: usize> {
    lines: Lines,
    scales: Scales,
    biases: Option<Scales>,
    zero: u8,
    /// Features of a partial sum.
    step: usize,
    /// Steps of a group.
    per_group: usize,
    steps: usize,
    /// Lines of a tile's step, `STRIPS * LINES` of a chunk, which the compiler is not to know.
    step_lines: usize,
    out_features: usize,
}

impl<const BITS: usize> Packed<BITS> {
    const LINES: usize = lines_of(BITS);

    /// Packs matrices of one format, stacked by output row.
    pub(super) fn new(parts: &[&Groups<'_>]) -> Self {
        let format = parts[0];
        let chunks = format.in_features / CHUNK;
        let rows: Vec<&[u8]> = parts
            .iter()
            .flat_map(|part| part.quants.chunks_exact(part.in_features * BITS / 8))
            .collect();
        let tiles = rows.len().div_ceil(TILE);
        let len = chunks * STRIPS * Self::LINES;
        let mut lines = Lines::new(tiles * len);
        let shared = Shared::new(&mut lines);
        pool::for_each(tiles, rows.len() * chunks * CHUNK, &|tile| {
            // SAFETY: one task a tile, and tiles do not overlap.
            let lines = unsafe { shared.part(tile * len..(tile + 1) * len) };
            for (output, row) in rows[tile * TILE..].iter().take(TILE).enumerate() {
                for feature in 0..chunks * CHUNK {
                    let (line, byte, shift) = place(BITS, output, feature);
                    lines[line].0[byte] |= stored(BITS, row, feature) << shift;
                }
            }
        });
        let groups = format.in_features / format.group;
        let step = rows::step(format.group);
        let scales: Vec<_> = parts.iter().map(|part| part.scales).collect();
        let biases: Option<Vec<_>> = parts.iter().map(|part| part.biases).collect();
        Self {
            lines,
            scales: Scales::new(&scales, groups),
            biases: biases.map(|biases| Scales::new(&biases, groups)),
            zero: match format.coding {
                Coding::Whole { zero, .. } => zero,
                _ => 0,
            },
            step,
            per_group: format.group / step,
            steps: format.in_features / step,
            step_lines: std::hint::black_box(STRIPS * Self::LINES * step / CHUNK),
            out_features: rows.len(),
        }
    }

    pub(super) fn in_features(&self) -> usize {
        self.steps * self.step
    }

    pub(super) fn out_features(&self) -> usize {
        self.out_features
    }

    pub(super) fn bytes(&self) -> usize {
        size_of_val::<[Line]>(&self.lines)
            + self.scales.bytes()
            + self.biases.as_ref().map_or(0, Scales::bytes)
    }

    /// Features of a partial sum: what rows are to be cut into.
    pub(super) fn step(&self) -> usize {
        self.step
    }

    /// What [`ByteRows`] are to begin a step's sum with, times the sum of its bytes.
    pub(super) fn start(&self, byte_offset: i32) -> i32 {
        let offset = if BITS == 8 { byte_offset } else { 0 };
        offset - i32::from(self.zero)
    }

    /// The number of an output and a feature.
    fn quant(&self, output: usize, feature: usize) -> u8 {
        let (line, byte, shift) = place(BITS, output % TILE, feature);
        let tile = output / TILE * self.steps * self.step_lines;
        (self.lines[tile + line].0[byte] >> shift) & mask(BITS)
    }

    /// One output's weights: `scale * (q - zero) + bias`, rounded once where there is a bias.
    pub(super) fn row(&self, row: usize) -> impl Iterator<Item = f32> + '_ {
        (0..self.in_features()).map(move |feature| {
            let group = feature / self.step / self.per_group;
            let centred = f32::from(self.quant(row, feature)) - f32::from(self.zero);
            let scale = self.scales.get(row, group);
            match &self.biases {
                Some(biases) => scale.mul_add(centred, biases.get(row, group)),
                None => scale * centred,
            }
        })
    }

    /// Some of the outputs.
    pub(super) fn select(&self, outputs: &[u32]) -> Self {
        let len = self.steps * self.step_lines;
        let mut lines = Lines::new(outputs.len().div_ceil(TILE) * len);
        for (to, from) in outputs.iter().enumerate() {
            for feature in 0..self.in_features() {
                let (line, byte, shift) = place(BITS, to % TILE, feature);
                lines[to / TILE * len + line].0[byte] |= self.quant(*from as usize, feature) << shift;
            }
        }
        Self {
            lines,
            scales: self.scales.select(outputs),
            biases: self.biases.as_ref().map(|biases| biases.select(outputs)),
            out_features: outputs.len(),
            ..*self
        }
    }

    /// Adds a step's biases of some strips, if there are any, times the rows' sums.
    #[inline(always)]
    fn add_biases<S: Simd, const R: usize>(
        &self,
        s: S,
        (tile, step): (usize, usize),
        sums: &[f32; R],
        strips: Range<usize>,
        totals: &mut [Tile; R],
    ) {
        let Some(biases) = &self.biases else { return };
        let biases = biases.load(s, tile, step / self.per_group);
        for (totals, sum) in totals.iter_mut().zip(sums) {
            let sum = s.wide_splat(*sum);
            for (total, bias) in totals[strips.clone()].iter_mut().zip(&biases[strips.clone()]) {
                s.wide_store(s.wide_fma(*bias, sum, s.wide_load(total)), total);
            }
        }
    }

    /// Lines of a tile's step, its strips' interleaved.
    #[inline(always)]
    fn lines(&self, tile: usize, step: usize) -> &[Line] {
        let len = self.step_lines;
        &self.lines[(tile * self.steps + step) * len..][..len]
    }
}

fn mask(bits: usize) -> u8 {
    (0xff_u16 >> (8 - bits)) as u8
}

/// A weight out of a row's little-endian bits.
fn stored(bits: usize, row: &[u8], feature: usize) -> u8 {
    (row[feature * bits / 8] >> (feature * bits % 8)) & mask(bits)
}

/// Line in the tile, byte in the line and shift in the byte of a weight.
fn place(bits: usize, output: usize, feature: usize) -> (usize, usize, u32) {
    let per_line = CHUNK / lines_of(bits);
    let line = feature / per_line * STRIPS + output / WIDE;
    let in_line = feature % per_line;
    (line, output % WIDE * 4 + in_line % 4, (in_line / 4 * 4) as u32)
}

/// Activations of full width: a lane sums the products of a step in order, and adds its scale times that to the total.
pub(super) struct Full<'a, const BITS: usize>(pub(super) &'a Packed<BITS>);

impl<const BITS: usize> Matrix for Full<'_, BITS> {
    type Rows = FloatRows;

    fn in_features(&self) -> usize {
        self.0.in_features()
    }

    fn out_features(&self) -> usize {
        self.0.out_features
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
        if R <= S::BOTH {
            self.sum::<S, R, 2>(s, tile, features, rows, group, 0, totals);
        } else {
            self.sum::<S, R, 1>(s, tile, features.clone(), rows, group, 0, totals);
            self.sum::<S, R, 1>(s, tile, features, rows, group, 1, totals);
        }
    }
}

impl<const BITS: usize> Full<'_, BITS> {
    /// Adds the products of `W` strips from `first` on.
    #[inline(always)]
    #[expect(clippy::too_many_arguments, reason = "those of `Matrix::add`, and the strip")]
    fn sum<S: Simd, const R: usize, const W: usize>(
        &self,
        s: S,
        tile: usize,
        features: Range<usize>,
        rows: &FloatRows,
        group: usize,
        first: usize,
        totals: &mut [Tile; R],
    ) {
        let per_line = CHUNK / Packed::<BITS>::LINES;
        let zero = s.wide_splat(f32::from(self.0.zero));
        let width = self.0.step;
        for step in features.start / width..features.end / width {
            let lines = self.0.lines(tile, step);
            let x = rows.group::<R>(group, step * width..(step + 1) * width);
            let mut parts = [[s.wide_splat(0.0); W]; R];
            for (lines, x) in lines.chunks_exact(STRIPS).zip(x.chunks_exact(per_line)) {
                let lines = &lines[first..first + W];
                s.ask(lines);
                for (feature, x) in x.iter().enumerate() {
                    let shift = (feature % 4 * 8 + feature / 4 * 4) as i32;
                    let mut weights = [s.wide_splat(0.0); W];
                    for (weight, line) in weights.iter_mut().zip(lines) {
                        *weight = s.wide_sub(s.bits(line, shift, i32::from(mask(BITS))), zero);
                    }
                    for (parts, x) in parts.iter_mut().zip(x) {
                        let x = s.wide_splat(*x);
                        for (part, weight) in parts.iter_mut().zip(weights) {
                            *part = s.wide_fma(x, weight, *part);
                        }
                    }
                }
            }
            let scales = self.0.scales.load(s, tile, step / self.0.per_group);
            for (totals, parts) in totals.iter_mut().zip(&parts) {
                for (i, part) in parts.iter().enumerate() {
                    let total = &mut totals[first + i];
                    s.wide_store(s.wide_fma(scales[first + i], *part, s.wide_load(total)), total);
                }
            }
            self.0
                .add_biases(s, (tile, step), rows.sums(group, step), first..first + W, totals);
        }
    }
}

/// Activations of 8 bits: a lane sums the products of a step exactly, in whole numbers, and adds the product of both scales
/// times that to the total.
pub(super) struct Whole<'a, const BITS: usize>(pub(super) &'a Packed<BITS>);

impl<const BITS: usize> Matrix for Whole<'_, BITS> {
    type Rows = ByteRows;

    fn in_features(&self) -> usize {
        self.0.in_features()
    }

    fn out_features(&self) -> usize {
        self.0.out_features
    }

    #[inline(always)]
    fn add<S: Simd, const R: usize>(
        &self,
        s: S,
        tile: usize,
        features: Range<usize>,
        rows: &ByteRows,
        group: usize,
        totals: &mut [Tile; R],
    ) {
        let width = self.0.step;
        for step in features.start / width..features.end / width {
            let lines = self.0.lines(tile, step);
            let x = rows.step::<R>(group, step);
            let dots = if BITS == 8 {
                s.dot_bytes(lines, x.quads, x.starts)
            } else {
                s.dot_nibbles(lines, x.quads, x.starts)
            };
            let scales = self.0.scales.load(s, tile, step / self.0.per_group);
            for ((totals, dots), d) in totals.iter_mut().zip(&dots).zip(x.scales) {
                let d = s.wide_splat(*d);
                for strip in 0..STRIPS {
                    let scale = s.wide_mul(scales[strip], d);
                    let sum = s.wide_fma(scale, dots[strip], s.wide_load(&totals[strip]));
                    s.wide_store(sum, &mut totals[strip]);
                }
            }
            self.0.add_biases(s, (tile, step), x.sums, 0..STRIPS, totals);
        }
    }
}
