//! What the bits of weights stand for, and where in a line they are.

use crate::simd::{Line, Simd, WIDE};

use super::format::Coding;

/// How bits are read.
pub(super) trait Code: Copy + Sync {
    /// Bits of a weight.
    const BITS: usize;

    /// Byte in the line and shift in the byte of the weight of an output of a strip and a feature of the line.
    fn place(output: usize, feature: usize) -> (usize, u32);

    /// What bits stand for.
    fn number(self, q: u8) -> f32;

    /// What [`widen`](Self::widen) and [`whole`](Self::whole) ask for.
    fn constant<S: Simd>(self, s: S) -> S::W;

    /// The numbers of a pair of the line's features, or a power of two times them.
    fn widen<S: Simd>(s: S, constant: S::W, line: &Line, pair: usize) -> [S::W; 2];

    /// A sum of products of what [`widen`](Self::widen) gives as one of products of the numbers.
    #[inline(always)]
    fn whole<S: Simd>(_: S, _: S::W, sum: S::W) -> S::W {
        sum
    }
}

/// Whole numbers of 8 bits, less a zero: for each output the features of the line side by side.
#[derive(Clone, Copy)]
pub(super) struct Bytes {
    zero: u8,
}

impl Bytes {
    pub(super) fn new(zero: u8) -> Self {
        Self { zero }
    }

    /// What the sum of products of a step with bytes is to begin with, times the sum of the bytes.
    pub(super) fn start(self, byte_offset: i32) -> i32 {
        byte_offset - i32::from(self.zero)
    }
}

impl Code for Bytes {
    const BITS: usize = 8;

    fn place(output: usize, feature: usize) -> (usize, u32) {
        (output * 4 + feature, 0)
    }

    fn number(self, q: u8) -> f32 {
        f32::from(q) - f32::from(self.zero)
    }

    #[inline(always)]
    fn constant<S: Simd>(self, s: S) -> S::W {
        s.wide_splat(f32::from(self.zero))
    }

    #[inline(always)]
    fn widen<S: Simd>(s: S, zero: S::W, line: &Line, pair: usize) -> [S::W; 2] {
        let shift = 16 * pair as i32;
        [
            s.wide_sub(s.byte(line, shift), zero),
            s.wide_sub(s.byte(line, shift + 8), zero),
        ]
    }
}

/// Codes of 4 bits: of each output's four bytes the low halves have the first four features of the line, the high halves the
/// others.
#[derive(Clone, Copy)]
pub(super) struct Nibbles {
    numbers: [f32; WIDE],
    /// The numbers less the smallest, unless they are 0 to 15.
    table: Option<[u8; 16]>,
    /// What became the smallest.
    zero: i32,
}

impl Nibbles {
    /// Whole numbers less a zero.
    pub(super) fn whole(zero: u8) -> Self {
        Self {
            numbers: std::array::from_fn(|q| q as f32 - f32::from(zero)),
            table: None,
            zero: i32::from(zero),
        }
    }

    /// Entries of a table.
    pub(super) fn looked_up(table: [i8; 16]) -> Self {
        let least = table.iter().copied().min().unwrap_or(0);
        Self {
            numbers: table.map(f32::from),
            table: Some(table.map(|number| number.abs_diff(least))),
            zero: -i32::from(least),
        }
    }

    /// The bytes to look up before products of whole numbers, if codes are not multiplied themselves.
    pub(super) fn table(self) -> Option<[u8; 16]> {
        self.table
    }

    /// As [`Bytes::start`] says.
    pub(super) fn start(self, byte_offset: i32) -> i32 {
        let offset = if self.table.is_some() { byte_offset } else { 0 };
        offset - self.zero
    }
}

impl Code for Nibbles {
    const BITS: usize = 4;

    fn place(output: usize, feature: usize) -> (usize, u32) {
        (output * 4 + feature % 4, (feature / 4 * 4) as u32)
    }

    fn number(self, q: u8) -> f32 {
        self.numbers[usize::from(q)]
    }

    #[inline(always)]
    fn constant<S: Simd>(self, s: S) -> S::W {
        s.wide_load(&self.numbers)
    }

    #[inline(always)]
    fn widen<S: Simd>(s: S, numbers: S::W, line: &Line, pair: usize) -> [S::W; 2] {
        let shift = (pair % 2 * 16 + pair / 2 * 4) as i32;
        [s.pick(numbers, line, shift), s.pick(numbers, line, shift + 8)]
    }
}

/// E4M3: for each output the first two features of the line side by side, and after those of all outputs the other two.
#[derive(Clone, Copy)]
pub(super) struct E4m3;

impl Code for E4m3 {
    const BITS: usize = 8;

    fn place(output: usize, feature: usize) -> (usize, u32) {
        (feature / 2 * 2 * WIDE + output * 2 + feature % 2, 0)
    }

    fn number(self, q: u8) -> f32 {
        Coding::E4m3.number(q)
    }

    #[inline(always)]
    fn constant<S: Simd>(self, s: S) -> S::W {
        s.wide_splat(256.0)
    }

    #[inline(always)]
    fn widen<S: Simd>(s: S, _: S::W, line: &Line, pair: usize) -> [S::W; 2] {
        s.e4m3_pairs(&line.view::<[[u8; 2]; WIDE], 2>()[pair])
    }

    #[inline(always)]
    fn whole<S: Simd>(s: S, factor: S::W, sum: S::W) -> S::W {
        s.wide_mul(sum, factor)
    }
}
