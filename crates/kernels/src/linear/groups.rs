//! Weights of 8 and 4 bits, in groups that share a scale.

use std::ops::Range;

use crate::pool::{self, Shared};
use crate::simd::{Line, Simd, WIDE};

use super::codes::{Bytes, Code, Nibbles};
use super::format::Groups;
use super::kernel::{Matrix, Tile, STRIPS, TILE};
use super::lines::Lines;
use super::rows::{self, ByteRows, FloatRows, CHUNK};
use super::scales::{Scales, TileScales};

/// Lines of a strip's chunk.
const fn lines_of(bits: usize) -> usize {
    CHUNK * bits * WIDE / 8 / size_of::<Line>()
}

/// A weight matrix: `[tile][group]`, and of each group first the weights, `[line][strip]`, zeros after the last output, then scales
/// and biases, unless they are in two levels. A line has some of a group's features, in order, for each output of a strip; which
/// bits of it are whose, the code says.
pub(super) struct Packed<C> {
    code: C,
    lines: Lines,
    scales: Scales,
    biases: Option<Scales>,
    /// Features of a partial sum.
    step: usize,
    /// Steps of a group.
    per_group: usize,
    groups: usize,
    /// Lines of a tile's step, which the compiler is not to know.
    step_lines: usize,
    /// Lines of a tile's group, those behind its weights included.
    group_lines: usize,
    out_features: usize,
}

impl<C: Code> Packed<C> {
    const LINES: usize = lines_of(C::BITS);

    /// Packs matrices of one format, stacked by output row.
    pub(super) fn new(code: C, parts: &[&Groups<'_>]) -> Self {
        let format = parts[0];
        let (group, groups) = (format.group, format.in_features / format.group);
        let step = rows::step(group);
        let step_lines = STRIPS * Self::LINES * step / CHUNK;
        let weight_lines = group / step * step_lines;

        let scales: Vec<_> = parts.iter().map(|part| part.scales).collect();
        let scales_of = Scales::new(&scales, groups, 0);
        let biases: Option<Vec<_>> = parts.iter().map(|part| part.biases).collect();
        let biases_of = biases.map(|biases| Scales::new(&biases, groups, scales_of.lines()));
        let behind = scales_of.lines() + biases_of.as_ref().map_or(0, Scales::lines);
        let outputs: usize = parts.iter().map(|part| part.out_features()).sum();
        let empty = Self {
            code,
            lines: Lines::new(0),
            scales: scales_of,
            biases: biases_of,
            step,
            per_group: group / step,
            groups,
            step_lines: std::hint::black_box(step_lines),
            group_lines: weight_lines + behind,
            out_features: outputs,
        };
        Self {
            lines: empty.pack(parts),
            ..empty
        }
    }

    /// The lines of matrices: everything but scales in two levels.
    fn pack(&self, parts: &[&Groups<'_>]) -> Lines {
        // Of each output its matrix, and its row there.
        let rows: Vec<(&Groups<'_>, usize)> = parts
            .iter()
            .flat_map(|part| (0..part.out_features()).map(move |row| (*part, row)))
            .collect();
        let (tiles, len, weights) = (rows.len().div_ceil(TILE), self.tile_lines(), self.weight_lines());
        let mut lines = Lines::new(tiles * len);
        let shared = Shared::new(&mut lines);
        pool::for_each(tiles, rows.len() * self.in_features(), &|tile| {
            // SAFETY: one task a tile, and tiles do not overlap.
            let lines = unsafe { shared.part(tile * len..(tile + 1) * len) };
            for (output, (part, row)) in rows[tile * TILE..].iter().take(TILE).enumerate() {
                let quants = part.in_features * C::BITS / 8;
                let quants = &part.quants[row * quants..][..quants];
                for (group, lines) in lines.chunks_exact_mut(self.group_lines).enumerate() {
                    for feature in 0..part.group {
                        let (line, byte, shift) = place::<C>(output, feature);
                        let bits = stored(C::BITS, quants, group * part.group + feature);
                        lines[line].0[byte] |= bits << shift;
                    }
                    let behind = &mut lines[weights..];
                    let number = row * self.groups + group;
                    self.scales.put(part.scales.numbers, number, behind, output);
                    if let (Some(own), Some(biases)) = (&self.biases, &part.biases) {
                        own.put(biases.numbers, number, behind, output);
                    }
                }
            }
        });
        lines
    }

    pub(super) fn code(&self) -> C {
        self.code
    }

    pub(super) fn in_features(&self) -> usize {
        self.groups * self.group()
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

    /// Features of a group.
    fn group(&self) -> usize {
        self.per_group * self.step
    }

    /// Lines of the weights of a tile's group.
    #[inline(always)]
    fn weight_lines(&self) -> usize {
        self.per_group * self.step_lines
    }

    #[inline(always)]
    fn tile_lines(&self) -> usize {
        self.groups * self.group_lines
    }

    /// The lines of a tile.
    #[inline(always)]
    fn tile(&self, tile: usize) -> &[Line] {
        let len = self.tile_lines();
        &self.lines[tile * len..][..len]
    }

    /// One output's weights: `scale * number + bias`, rounded once.
    pub(super) fn row(&self, row: usize) -> impl Iterator<Item = f32> + '_ {
        let groups = self.tile(row / TILE).chunks_exact(self.group_lines).enumerate();
        groups.flat_map(move |(group, lines)| {
            let behind = &lines[self.weight_lines()..];
            let scale = self.scales.get(behind, row, group);
            let bias = self.biases.as_ref().map(|biases| biases.get(behind, row, group));
            (0..self.group()).map(move |feature| {
                let number = self.code.number(bits::<C>(lines, row, feature));
                match bias {
                    Some(bias) => scale.mul_add(number, bias),
                    None => scale * number,
                }
            })
        })
    }

    /// Some of the outputs.
    pub(super) fn select(&self, outputs: &[u32]) -> Self {
        let (len, weights) = (self.tile_lines(), self.weight_lines());
        let mut lines = Lines::new(outputs.len().div_ceil(TILE) * len);
        for (to, from) in outputs.iter().enumerate() {
            let from = *from as usize;
            let new = lines[to / TILE * len..][..len].chunks_exact_mut(self.group_lines);
            let old = self.tile(from / TILE).chunks_exact(self.group_lines);
            for (new, old) in new.zip(old) {
                for feature in 0..self.group() {
                    let (line, byte, shift) = place::<C>(to, feature);
                    new[line].0[byte] |= bits::<C>(old, from, feature) << shift;
                }
                for scales in [Some(&self.scales), self.biases.as_ref()].into_iter().flatten() {
                    scales.copy((&old[weights..], from), (&mut new[weights..], to));
                }
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

    /// Some steps of a tile: of each its lines, the strips' interleaved, those behind the weights of its group, and the group.
    #[inline(always)]
    fn walk(&self, tile: usize, steps: Range<usize>) -> impl Iterator<Item = (&[Line], &[Line], usize)> {
        let tile = self.tile(tile);
        let (mut group, mut before) = (steps.start / self.per_group, steps.start % self.per_group);
        steps.map(move |_| {
            let lines = &tile[group * self.group_lines..][..self.group_lines];
            let (weights, behind) = lines.split_at(self.weight_lines());
            let found = (
                &weights[before * self.step_lines..][..self.step_lines],
                behind,
                group,
            );
            before += 1;
            if before == self.per_group {
                (group, before) = (group + 1, 0);
            }
            found
        })
    }

    /// What a tile's numbers are multiplied with, and what is added to them. Those of later steps than these are on their way
    /// then.
    #[inline(always)]
    fn scales<S: Simd>(
        &self,
        s: S,
        tile: usize,
        steps: &Range<usize>,
    ) -> (TileScales<'_>, Option<TileScales<'_>>) {
        let groups = steps.start / self.per_group..steps.end.div_ceil(self.per_group);
        let scales = self.scales.tile(tile);
        let biases = self.biases.as_ref().map(|biases| biases.tile(tile));
        scales.ask(s, groups.clone());
        if let Some(biases) = &biases {
            biases.ask(s, groups);
        }
        (scales, biases)
    }
}

fn mask(bits: usize) -> u8 {
    (0xff_u16 >> (8 - bits)) as u8
}

/// A weight out of a row's little-endian bits.
fn stored(bits: usize, row: &[u8], feature: usize) -> u8 {
    (row[feature * bits / 8] >> (feature * bits % 8)) & mask(bits)
}

/// Line in the group, byte in the line and shift in the byte of the weight of an output and a feature of the group.
fn place<C: Code>(output: usize, feature: usize) -> (usize, usize, u32) {
    let per_line = CHUNK / lines_of(C::BITS);
    let line = feature / per_line * STRIPS + output % TILE / WIDE;
    let (byte, shift) = C::place(output % WIDE, feature % per_line);
    (line, byte, shift)
}

/// The bits of that weight.
fn bits<C: Code>(group: &[Line], output: usize, feature: usize) -> u8 {
    let (line, byte, shift) = place::<C>(output, feature);
    (group[line].0[byte] >> shift) & mask(C::BITS)
}

/// Activations of full width: a lane sums the products of a step in order, and adds its scale times that to the total.
pub(super) struct Full<'a, C>(pub(super) &'a Packed<C>);

impl<C: Code> Matrix for Full<'_, C> {
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

impl<C: Code> Full<'_, C> {
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
        let per_line = CHUNK / Packed::<C>::LINES;
        let constant = self.0.code.constant(s);
        let width = self.0.step;
        let steps = features.start / width..features.end / width;
        let (scales, biases) = self.0.scales(s, tile, &steps);
        let sums = rows.sums::<R>(group, steps.clone());
        let x = rows.group::<R>(group, steps.start * width..steps.end * width);
        for (i, ((lines, behind, its), x)) in self.0.walk(tile, steps).zip(x.chunks_exact(width)).enumerate()
        {
            let mut parts = [[s.wide_splat(0.0); W]; R];
            for (lines, x) in lines.chunks_exact(STRIPS).zip(x.chunks_exact(per_line)) {
                let lines = &lines[first..first + W];
                s.ask(lines);
                for (pair, x) in x.as_chunks::<2>().0.iter().enumerate() {
                    let mut weights = [[s.wide_splat(0.0); 2]; W];
                    for (weights, line) in weights.iter_mut().zip(lines) {
                        *weights = C::widen(s, constant, line, pair);
                    }
                    for (feature, x) in x.iter().enumerate() {
                        for (parts, x) in parts.iter_mut().zip(x) {
                            let x = s.wide_splat(*x);
                            for (part, weights) in parts.iter_mut().zip(&weights) {
                                *part = s.wide_fma(x, weights[feature], *part);
                            }
                        }
                    }
                }
            }
            s.ask(behind);
            let scales = scales.load(s, behind, its);
            let biases = biases
                .as_ref()
                .map(|biases| (biases.load(s, behind, its), &sums[i]));
            for (r, (totals, parts)) in totals.iter_mut().zip(&parts).enumerate() {
                for (strip, (total, part)) in (first..).zip(totals[first..].iter_mut().zip(parts)) {
                    let part = C::whole(s, constant, *part);
                    let mut sum = s.wide_fma(scales[strip], part, s.wide_load(total));
                    if let Some((biases, sums)) = &biases {
                        sum = s.wide_fma(biases[strip], s.wide_splat(sums[r]), sum);
                    }
                    s.wide_store(sum, total);
                }
            }
        }
    }
}

/// What a [`Whole`] multiplies with whole numbers.
pub(super) trait Dot: Copy + Sync {
    type Code: Code;

    /// Sums of products of a step's lines, as those of [`Simd`].
    fn dot<S: Simd, const R: usize>(
        self,
        s: S,
        lines: &[Line],
        x: &[[i32; R]],
        from: &[i32; R],
    ) -> [[S::W; STRIPS]; R];
}

/// Bytes.
#[derive(Clone, Copy)]
pub(super) struct ByBytes;

impl Dot for ByBytes {
    type Code = Bytes;

    #[inline(always)]
    fn dot<S: Simd, const R: usize>(
        self,
        s: S,
        lines: &[Line],
        x: &[[i32; R]],
        from: &[i32; R],
    ) -> [[S::W; STRIPS]; R] {
        s.dot_bytes(lines, x, from)
    }
}

/// Half bytes as they are.
#[derive(Clone, Copy)]
pub(super) struct ByNibbles;

impl Dot for ByNibbles {
    type Code = Nibbles;

    #[inline(always)]
    fn dot<S: Simd, const R: usize>(
        self,
        s: S,
        lines: &[Line],
        x: &[[i32; R]],
        from: &[i32; R],
    ) -> [[S::W; STRIPS]; R] {
        s.dot_nibbles(lines, x, from)
    }
}

/// What a table of bytes has for half bytes.
#[derive(Clone, Copy)]
pub(super) struct ByTable(pub(super) [u8; 16]);

impl Dot for ByTable {
    type Code = Nibbles;

    #[inline(always)]
    fn dot<S: Simd, const R: usize>(
        self,
        s: S,
        lines: &[Line],
        x: &[[i32; R]],
        from: &[i32; R],
    ) -> [[S::W; STRIPS]; R] {
        s.dot_codes(lines, &self.0, x, from)
    }
}

/// Activations of 8 bits: a lane sums the products of a step exactly, in whole numbers, and adds the product of both scales
/// times that to the total.
pub(super) struct Whole<'a, D: Dot>(pub(super) &'a Packed<D::Code>, pub(super) D);

impl<D: Dot> Matrix for Whole<'_, D> {
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
        let steps = features.start / width..features.end / width;
        let (scales, biases) = self.0.scales(s, tile, &steps);
        let rows = rows.steps::<R>(group, steps.clone());
        let mut sums = [[s.wide_splat(0.0); STRIPS]; R];
        for (sums, totals) in sums.iter_mut().zip(&*totals) {
            for (sum, total) in sums.iter_mut().zip(totals) {
                *sum = s.wide_load(total);
            }
        }
        for ((lines, behind, its), x) in self.0.walk(tile, steps).zip(rows) {
            let dots = self.1.dot(s, lines, x.quads, x.starts);
            s.ask(behind);
            let scales = scales.load(s, behind, its);
            for ((sums, dots), d) in sums.iter_mut().zip(&dots).zip(x.scales) {
                let d = s.wide_splat(*d);
                for ((sum, dot), scale) in sums.iter_mut().zip(dots).zip(scales) {
                    *sum = s.wide_fma(s.wide_mul(scale, d), *dot, *sum);
                }
            }
            if let Some(biases) = &biases {
                let biases = biases.load(s, behind, its);
                for (sums, x) in sums.iter_mut().zip(x.sums) {
                    let x = s.wide_splat(*x);
                    for (sum, bias) in sums.iter_mut().zip(biases) {
                        *sum = s.wide_fma(bias, x, *sum);
                    }
                }
            }
        }
        for (sums, totals) in sums.iter().zip(totals) {
            for (sum, total) in sums.iter().zip(totals) {
                s.wide_store(*sum, total);
            }
        }
    }
}
