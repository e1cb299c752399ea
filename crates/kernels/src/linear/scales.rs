//! Scales and biases of groups.

use half::{bf16, f16};

use crate::simd::{Line, Simd, WIDE};

use super::format::Numbers;
use super::kernel::{STRIPS, TILE};
use super::lines::Lines;

/// Lines between the scales in use and those asked for from memory: nothing else asks for them in time.
const AHEAD: usize = 16;

/// A number of each output and group: `[tile][group][output of the tile]`, in its stored type.
pub(super) struct Scales {
    lines: Lines,
    kind: Kind,
    groups: usize,
}

#[derive(Clone, Copy)]
enum Kind {
    F32,
    F16,
    Bf16,
}

impl Kind {
    /// Bytes of a number.
    fn size(self) -> usize {
        match self {
            Self::F32 => size_of::<f32>(),
            Self::F16 | Self::Bf16 => size_of::<u16>(),
        }
    }
}

impl Scales {
    /// Those of several matrices, each `[outputs, groups]`, stacked. All are of one type, and there is one.
    pub(super) fn new(parts: &[Numbers<'_>], groups: usize) -> Self {
        let kind = match parts[0] {
            Numbers::F32(_) => Kind::F32,
            Numbers::F16(_) => Kind::F16,
            Numbers::Bf16(_) => Kind::Bf16,
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
            }
            first += part.len() / groups;
        }
        new
    }

    fn empty(kind: Kind, groups: usize, outputs: usize) -> Self {
        let bytes = outputs.div_ceil(TILE) * groups * TILE * kind.size();
        Self {
            lines: Lines::new(bytes / size_of::<Line>()),
            kind,
            groups,
        }
    }

    /// The line of a number, and where in it.
    fn place(&self, output: usize, group: usize) -> (usize, usize) {
        let number = (output / TILE * self.groups + group) * TILE + output % TILE;
        let at = number * self.kind.size();
        (at / size_of::<Line>(), at % size_of::<Line>())
    }

    fn put(&mut self, output: usize, group: usize, bytes: &[u8]) {
        let (line, at) = self.place(output, group);
        self.lines[line].0[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// A tile's numbers of a group.
    #[inline(always)]
    pub(super) fn load<S: Simd>(&self, s: S, tile: usize, group: usize) -> [S::W; STRIPS] {
        let at = tile * self.groups + group;
        let ask = |line: &Line| s.prefetch_once(std::ptr::from_ref(line).wrapping_add(AHEAD));
        match self.kind {
            Kind::F32 => {
                let [a, b] = [&self.lines[2 * at], &self.lines[2 * at + 1]];
                ask(a);
                ask(b);
                [s.wide_load(a.view()), s.wide_load(b.view())]
            }
            Kind::F16 => {
                let line = &self.lines[at];
                ask(line);
                let [a, b] = line.view::<[f16; WIDE], STRIPS>();
                [s.wide_f16(a), s.wide_f16(b)]
            }
            Kind::Bf16 => {
                let line = &self.lines[at];
                ask(line);
                let [a, b] = line.view::<[bf16; WIDE], STRIPS>();
                [s.wide_bf16(a), s.wide_bf16(b)]
            }
        }
    }

    pub(super) fn get(&self, output: usize, group: usize) -> f32 {
        let (line, at) = self.place(output, group);
        let line = &self.lines[line];
        match self.kind {
            Kind::F32 => line.view::<f32, 16>()[at / 4],
            Kind::F16 => line.view::<f16, 32>()[at / 2].to_f32(),
            Kind::Bf16 => line.view::<bf16, 32>()[at / 2].to_f32(),
        }
    }

    pub(super) fn bytes(&self) -> usize {
        size_of_val::<[Line]>(&self.lines)
    }

    /// Those of some outputs.
    pub(super) fn select(&self, outputs: &[u32]) -> Self {
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
