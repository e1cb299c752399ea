//! Scales and biases of groups.

use std::ops::Range;

use half::{bf16, f16};

use crate::simd::{Line, Simd, WIDE};

use super::kernel::{STRIPS, TILE};
use super::lines::Lines;
use super::steps::{Numbers, Steps, BYTE_ZERO};

/// So many runs of groups after those in use their scales are asked for from memory: nothing else asks for them in time.
const AHEAD: usize = 2;

/// A number of each output and group, in one level or in two.
pub(super) struct Scales {
    numbers: Plane,
    factors: Option<Factors>,
}

/// What runs of numbers are multiplied with: a group has the factor `group >> shift`.
struct Factors {
    plane: Plane,
    shift: u32,
}

/// A number of each output and group, in its stored type: `[tile][group][output of the tile]`. A line of bytes has two groups, of
/// each output of a strip the four numbers `[group][strip]`.
struct Plane {
    lines: Lines,
    kind: Kind,
    groups: usize,
    tile_lines: usize,
}

/// [`Scales`] of a tile.
pub(super) struct TileScales<'a> {
    numbers: &'a [Line],
    kind: Kind,
    /// With their shift.
    factors: Option<(&'a [Line], u32)>,
}

impl TileScales<'_> {
    /// Asks for the scales that come a few runs after those of a run of groups, all at once: memory gives lines that lie side by
    /// side faster than lines that are asked for one by one between those of the weights.
    #[inline(always)]
    pub(super) fn ask<S: Simd>(&self, s: S, groups: Range<usize>) {
        let numbers = match self.kind {
            Kind::F32 => 2 * groups.start..2 * groups.end,
            Kind::F16 | Kind::Bf16 => groups.clone(),
            Kind::Byte => groups.start / 2..groups.end.div_ceil(2),
        };
        ask(s, self.numbers, numbers);
        if let Some((factors, shift)) = self.factors {
            ask(s, factors, groups.start >> shift..((groups.end - 1) >> shift) + 1);
        }
    }

    /// Those of a group.
    #[inline(always)]
    pub(super) fn load<S: Simd>(&self, s: S, group: usize) -> [S::W; STRIPS] {
        let numbers = match self.kind {
            Kind::F32 => {
                let [a, b] = [&self.numbers[2 * group], &self.numbers[2 * group + 1]];
                [s.wide_load(a.view()), s.wide_load(b.view())]
            }
            Kind::F16 => f16s(s, &self.numbers[group]),
            Kind::Bf16 => {
                let [a, b] = self.numbers[group].view::<[bf16; WIDE], STRIPS>();
                [s.wide_bf16(a), s.wide_bf16(b)]
            }
            Kind::Byte => {
                let line = &self.numbers[group / 2];
                let shift = (group % 2 * 8 * STRIPS) as i32;
                let zero = s.wide_splat(f32::from(BYTE_ZERO));
                [
                    s.wide_sub(s.byte(line, shift), zero),
                    s.wide_sub(s.byte(line, shift + 8), zero),
                ]
            }
        };
        let Some((factors, shift)) = self.factors else {
            return numbers;
        };
        let [a, b] = numbers;
        let [of_a, of_b] = f16s(s, &factors[group >> shift]);
        // Exact, so that sums are those of one level.
        [s.wide_mul(of_a, a), s.wide_mul(of_b, b)]
    }
}

#[inline(always)]
fn f16s<S: Simd>(s: S, line: &Line) -> [S::W; STRIPS] {
    let [a, b] = line.view::<[f16; WIDE], STRIPS>();
    [s.wide_f16(a), s.wide_f16(b)]
}

#[derive(Clone, Copy)]
enum Kind {
    F32,
    F16,
    Bf16,
    /// Whole numbers plus [`BYTE_ZERO`].
    Byte,
}

impl Kind {
    /// Bytes of a number.
    fn size(self) -> usize {
        match self {
            Self::F32 => size_of::<f32>(),
            Self::F16 | Self::Bf16 => size_of::<u16>(),
            Self::Byte => size_of::<u8>(),
        }
    }
}

impl Scales {
    /// Those of several matrices, each `[outputs, groups]`, stacked. All are of one form, and there is one.
    pub(super) fn new(parts: &[Steps<'_>], groups: usize) -> Self {
        let numbers: Vec<_> = parts.iter().map(|part| part.numbers).collect();
        let factors: Option<Vec<_>> = parts.iter().map(|part| part.factors).collect();
        Self {
            numbers: Plane::new(&numbers, groups),
            factors: factors.map(|factors| {
                let shift = parts[0].shift;
                let factors: Vec<_> = factors.into_iter().map(Numbers::F16).collect();
                Factors {
                    plane: Plane::new(&factors, groups >> shift),
                    shift,
                }
            }),
        }
    }

    /// Those of a tile.
    #[inline(always)]
    pub(super) fn tile(&self, tile: usize) -> TileScales<'_> {
        TileScales {
            numbers: self.numbers.tile(tile),
            kind: self.numbers.kind,
            factors: self
                .factors
                .as_ref()
                .map(|factors| (factors.plane.tile(tile), factors.shift)),
        }
    }

    pub(super) fn get(&self, output: usize, group: usize) -> f32 {
        let number = self.numbers.get(output, group);
        match &self.factors {
            Some(Factors { plane, shift }) => plane.get(output, group >> shift) * number,
            None => number,
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.numbers.bytes() + self.factors.as_ref().map_or(0, |factors| factors.plane.bytes())
    }

    /// Those of some outputs.
    pub(super) fn select(&self, outputs: &[u32]) -> Self {
        Self {
            numbers: self.numbers.select(outputs),
            factors: self.factors.as_ref().map(|factors| Factors {
                plane: factors.plane.select(outputs),
                ..*factors
            }),
        }
    }
}

impl Plane {
    fn new(parts: &[Numbers<'_>], groups: usize) -> Self {
        let kind = match parts[0] {
            Numbers::F32(_) => Kind::F32,
            Numbers::F16(_) => Kind::F16,
            Numbers::Bf16(_) => Kind::Bf16,
            Numbers::Bytes(_) => Kind::Byte,
        };
        let outputs = parts.iter().map(|part| part.len()).sum::<usize>() / groups;
        let mut new = Self::empty(kind, groups, outputs);
        let mut first = 0;
        for part in parts {
            let mut put = |i: usize, bytes: &[u8]| new.put(first + i / groups, i % groups, bytes);
            match part {
                Numbers::F32(x) => (0..).zip(*x).for_each(|(i, x)| put(i, &x.to_ne_bytes())),
                Numbers::F16(x) => (0..).zip(*x).for_each(|(i, x)| put(i, &x.to_ne_bytes())),
                Numbers::Bf16(x) => (0..).zip(*x).for_each(|(i, x)| put(i, &x.to_ne_bytes())),
                Numbers::Bytes(x) => (0..).zip(*x).for_each(|(i, x)| put(i, &[*x])),
            }
            first += part.len() / groups;
        }
        new
    }

    fn empty(kind: Kind, groups: usize, outputs: usize) -> Self {
        let tile_lines = (groups * TILE * kind.size()).div_ceil(size_of::<Line>());
        Self {
            lines: Lines::new(outputs.div_ceil(TILE) * tile_lines),
            kind,
            groups,
            tile_lines,
        }
    }

    /// The line of a number, and where in it.
    fn place(&self, output: usize, group: usize) -> (usize, usize) {
        let (tile, output) = (output / TILE, output % TILE);
        if let Kind::Byte = self.kind {
            let at = output % WIDE * 4 + group % 2 * STRIPS + output / WIDE;
            return (tile * self.tile_lines + group / 2, at);
        }
        let at = (group * TILE + output) * self.kind.size();
        (
            tile * self.tile_lines + at / size_of::<Line>(),
            at % size_of::<Line>(),
        )
    }

    fn put(&mut self, output: usize, group: usize, bytes: &[u8]) {
        let (line, at) = self.place(output, group);
        self.lines[line].0[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// A tile's lines.
    #[inline(always)]
    fn tile(&self, tile: usize) -> &[Line] {
        &self.lines[tile * self.tile_lines..][..self.tile_lines]
    }

    fn get(&self, output: usize, group: usize) -> f32 {
        let (line, at) = self.place(output, group);
        let line = &self.lines[line];
        match self.kind {
            Kind::F32 => line.view::<f32, 16>()[at / 4],
            Kind::F16 => line.view::<f16, 32>()[at / 2].to_f32(),
            Kind::Bf16 => line.view::<bf16, 32>()[at / 2].to_f32(),
            Kind::Byte => f32::from(line.0[at]) - f32::from(BYTE_ZERO),
        }
    }

    fn bytes(&self) -> usize {
        size_of_val::<[Line]>(&self.lines)
    }

    fn select(&self, outputs: &[u32]) -> Self {
        let mut new = Self::empty(self.kind, self.groups, outputs.len());
        for (to, from) in outputs.iter().enumerate() {
            for group in 0..self.groups {
                let (line, at) = self.place(*from as usize, group);
                new.put(to, group, &self.lines[line].0[at..at + self.kind.size()]);
            }
        }
        new
    }
}

/// Asks for the lines that come [`AHEAD`] runs after these.
#[inline(always)]
fn ask<S: Simd>(s: S, lines: &[Line], run: Range<usize>) {
    let ahead = AHEAD * run.len();
    for i in run {
        s.prefetch_once(lines.as_ptr().wrapping_add(i + ahead));
    }
}
