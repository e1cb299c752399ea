//! Scales and biases of groups.

use std::ops::Range;

use half::{bf16, f16};

use crate::simd::{Line, Simd, WIDE};

use super::kernel::{STRIPS, TILE};
use super::lines::Lines;
use super::steps::{Numbers, Steps, BYTE_ZERO};

/// A number of each output and group, in one level or in two.
pub(super) enum Scales {
    /// Behind the weights of its group, so that memory is read from end to end.
    Behind {
        kind: Kind,
        /// The first of its lines behind the weights.
        first: usize,
    },
    TwoLevel(TwoLevel),
}

/// The type of numbers behind weights: `[output of the tile]`.
#[derive(Clone, Copy)]
pub(super) enum Kind {
    F32,
    F16,
    Bf16,
}

/// Whole numbers times factors: a group has the factor `group >> shift`.
pub(super) struct TwoLevel {
    /// Plus [`BYTE_ZERO`]: `[tile][pair of groups]`, of each output of a strip four bytes `[group][strip]`.
    numbers: Lines,
    /// f16: `[tile][run of groups][output of the tile]`.
    factors: Lines,
    groups: usize,
    shift: u32,
}

/// [`Scales`] of a tile.
pub(super) enum TileScales<'a> {
    Behind {
        kind: Kind,
        first: usize,
    },
    TwoLevel {
        numbers: &'a [Line],
        factors: &'a [Line],
        shift: u32,
    },
}

impl TileScales<'_> {
    /// Asks for those that come a few runs after those of a run of groups, all at once, unless they are behind weights: memory
    /// gives lines that lie side by side faster than lines that are asked for one by one between those of the weights.
    #[inline(always)]
    pub(super) fn ask<S: Simd>(&self, s: S, groups: Range<usize>) {
        if let Self::TwoLevel {
            numbers,
            factors,
            shift,
        } = self
        {
            ask(s, numbers, groups.start / 2..groups.end.div_ceil(2));
            ask(s, factors, groups.start >> shift..((groups.end - 1) >> shift) + 1);
        }
    }

    /// Those of a group, with the lines behind its weights.
    #[inline(always)]
    pub(super) fn load<S: Simd>(&self, s: S, behind: &[Line], group: usize) -> [S::W; STRIPS] {
        match *self {
            Self::Behind { kind, first } => match kind {
                Kind::F32 => {
                    let [a, b] = [&behind[first], &behind[first + 1]];
                    [s.wide_load(a.view()), s.wide_load(b.view())]
                }
                Kind::F16 => f16s(s, &behind[first]),
                Kind::Bf16 => {
                    let [a, b] = behind[first].view::<[bf16; WIDE], STRIPS>();
                    [s.wide_bf16(a), s.wide_bf16(b)]
                }
            },
            Self::TwoLevel {
                numbers,
                factors,
                shift,
            } => {
                let line = &numbers[group / 2];
                let byte = (group % 2 * 8 * STRIPS) as i32;
                let zero = s.wide_splat(f32::from(BYTE_ZERO));
                let [of_a, of_b] = f16s(s, &factors[group >> shift]);
                // Exact, so that sums are those of one level.
                [
                    s.wide_mul(of_a, s.wide_sub(s.byte(line, byte), zero)),
                    s.wide_mul(of_b, s.wide_sub(s.byte(line, byte + 8), zero)),
                ]
            }
        }
    }
}

#[inline(always)]
fn f16s<S: Simd>(s: S, line: &Line) -> [S::W; STRIPS] {
    let [a, b] = line.view::<[f16; WIDE], STRIPS>();
    [s.wide_f16(a), s.wide_f16(b)]
}

impl Kind {
    /// Bytes of a number.
    fn size(self) -> usize {
        match self {
            Self::F32 => size_of::<f32>(),
            Self::F16 | Self::Bf16 => size_of::<u16>(),
        }
    }

    /// The line of an output's number, and the byte in it, where those of the tile begin with line `first`.
    fn at(self, first: usize, output: usize) -> (usize, usize) {
        let at = output % TILE * self.size();
        (first + at / size_of::<Line>(), at % size_of::<Line>())
    }
}

impl Scales {
    /// Those of several matrices, each `[outputs, groups]`, stacked. All are of one form, and there is one. If they are to be
    /// behind weights, from line `first` on, [`put`](Self::put) takes them there.
    pub(super) fn new(parts: &[Steps<'_>], groups: usize, first: usize) -> Self {
        let kind = match parts[0].numbers {
            Numbers::F32(_) => Kind::F32,
            Numbers::F16(_) => Kind::F16,
            Numbers::Bf16(_) => Kind::Bf16,
            Numbers::Bytes(_) => return Self::TwoLevel(TwoLevel::new(parts, groups)),
        };
        Self::Behind { kind, first }
    }

    /// How many lines there are behind the weights of a group.
    pub(super) fn lines(&self) -> usize {
        match self {
            Self::Behind { kind, .. } => TILE * kind.size() / size_of::<Line>(),
            Self::TwoLevel(_) => 0,
        }
    }

    /// Puts number `i` of a matrix behind the weights of its group, if that is where they are.
    pub(super) fn put(&self, numbers: Numbers<'_>, i: usize, behind: &mut [Line], output: usize) {
        let Self::Behind { kind, first } = *self else {
            return;
        };
        let (line, byte) = kind.at(first, output);
        let to = &mut behind[line].0[byte..][..kind.size()];
        match numbers {
            Numbers::F32(x) => to.copy_from_slice(&x[i].to_ne_bytes()),
            Numbers::F16(x) => to.copy_from_slice(&x[i].to_ne_bytes()),
            Numbers::Bf16(x) => to.copy_from_slice(&x[i].to_ne_bytes()),
            Numbers::Bytes(_) => {}
        }
    }

    /// Copies the number of an output from behind the weights of its group to behind those of another matrix.
    pub(super) fn copy(&self, (from, output): (&[Line], usize), (to, new): (&mut [Line], usize)) {
        let Self::Behind { kind, first } = *self else {
            return;
        };
        let (at, new_at) = (kind.at(first, output), kind.at(first, new));
        let (size, from) = (kind.size(), &from[at.0].0[at.1..]);
        to[new_at.0].0[new_at.1..][..size].copy_from_slice(&from[..size]);
    }

    /// Those of a tile.
    #[inline(always)]
    pub(super) fn tile(&self, tile: usize) -> TileScales<'_> {
        match self {
            Self::Behind { kind, first } => TileScales::Behind {
                kind: *kind,
                first: *first,
            },
            Self::TwoLevel(scales) => scales.tile(tile),
        }
    }

    /// That of an output and a group, with the lines behind the group's weights.
    pub(super) fn get(&self, behind: &[Line], output: usize, group: usize) -> f32 {
        match self {
            Self::Behind { kind, first } => {
                let (line, byte) = kind.at(*first, output);
                let (line, at) = (&behind[line], byte / kind.size());
                match kind {
                    Kind::F32 => line.view::<f32, WIDE>()[at],
                    Kind::F16 => line.view::<f16, TILE>()[at].to_f32(),
                    Kind::Bf16 => line.view::<bf16, TILE>()[at].to_f32(),
                }
            }
            Self::TwoLevel(scales) => scales.get(output, group),
        }
    }

    /// Bytes of those that are not behind weights.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Behind { .. } => 0,
            Self::TwoLevel(scales) => {
                size_of_val::<[Line]>(&scales.numbers) + size_of_val::<[Line]>(&scales.factors)
            }
        }
    }

    /// Those of some outputs, but for those behind weights.
    pub(super) fn select(&self, outputs: &[u32]) -> Self {
        match *self {
            Self::Behind { kind, first } => Self::Behind { kind, first },
            Self::TwoLevel(ref scales) => Self::TwoLevel(scales.select(outputs)),
        }
    }
}

impl TwoLevel {
    fn new(parts: &[Steps<'_>], groups: usize) -> Self {
        let outputs = parts.iter().map(|part| part.numbers.len()).sum::<usize>() / groups;
        let mut new = Self::empty(groups, parts[0].shift, outputs);
        let mut first = 0;
        for part in parts {
            let (Numbers::Bytes(numbers), Some(factors)) = (part.numbers, part.factors) else {
                unreachable!("scales of one form, in two levels");
            };
            let rows = numbers
                .chunks_exact(groups)
                .zip(factors.chunks_exact(groups >> new.shift));
            for (output, (numbers, factors)) in (first..).zip(rows) {
                for (group, number) in numbers.iter().enumerate() {
                    let (line, byte) = new.number(output, group);
                    new.numbers[line].0[byte] = *number;
                }
                for (run, factor) in factors.iter().enumerate() {
                    let line = new.factor(output, run);
                    new.factors[line].view_mut::<f16, TILE>()[output % TILE] = *factor;
                }
            }
            first += numbers.len() / groups;
        }
        new
    }

    fn empty(groups: usize, shift: u32, outputs: usize) -> Self {
        let tiles = outputs.div_ceil(TILE);
        Self {
            numbers: Lines::new(tiles * groups.div_ceil(2)),
            factors: Lines::new(tiles * (groups >> shift)),
            groups,
            shift,
        }
    }

    /// The line of a number, and where in it.
    fn number(&self, output: usize, group: usize) -> (usize, usize) {
        let byte = output % WIDE * 4 + group % 2 * STRIPS + output % TILE / WIDE;
        (output / TILE * self.groups.div_ceil(2) + group / 2, byte)
    }

    /// The line of the factor of a run of groups.
    fn factor(&self, output: usize, run: usize) -> usize {
        output / TILE * (self.groups >> self.shift) + run
    }

    #[inline(always)]
    fn tile(&self, tile: usize) -> TileScales<'_> {
        let (pairs, runs) = (self.groups.div_ceil(2), self.groups >> self.shift);
        TileScales::TwoLevel {
            numbers: &self.numbers[tile * pairs..][..pairs],
            factors: &self.factors[tile * runs..][..runs],
            shift: self.shift,
        }
    }

    fn get(&self, output: usize, group: usize) -> f32 {
        let (line, byte) = self.number(output, group);
        let number = f32::from(self.numbers[line].0[byte]) - f32::from(BYTE_ZERO);
        let factors = &self.factors[self.factor(output, group >> self.shift)];
        factors.view::<f16, TILE>()[output % TILE].to_f32() * number
    }

    fn select(&self, outputs: &[u32]) -> Self {
        let mut new = Self::empty(self.groups, self.shift, outputs.len());
        for (to, from) in outputs.iter().enumerate() {
            let from = *from as usize;
            for group in 0..self.groups {
                let ((line, byte), (old_line, old_byte)) = (new.number(to, group), self.number(from, group));
                new.numbers[line].0[byte] = self.numbers[old_line].0[old_byte];
            }
            for run in 0..self.groups >> self.shift {
                let factor = self.factors[self.factor(from, run)].view::<f16, TILE>()[from % TILE];
                let line = new.factor(to, run);
                new.factors[line].view_mut::<f16, TILE>()[to % TILE] = factor;
            }
        }
        new
    }
}

/// Asks for the lines that come two runs after these: nothing else asks for them in time.
#[inline(always)]
fn ask<S: Simd>(s: S, lines: &[Line], run: Range<usize>) {
    let ahead = 2 * run.len();
    for i in run {
        s.prefetch_weights(lines.as_ptr().wrapping_add(i + ahead));
    }
}
