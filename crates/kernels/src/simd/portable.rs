//! Any machine. Slow where `mul_add` is a library call, but the same bits.

use half::{bf16, f16};

use super::{Line, Simd, LANES, WIDE};

#[derive(Clone, Copy)]
pub(crate) struct Portable;

impl Simd for Portable {
    type F = [f32; LANES];

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        [x; LANES]
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::F {
        *from
    }

    #[inline(always)]
    fn store(self, x: Self::F, to: &mut [f32; LANES]) {
        *to = x;
    }

    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        std::array::from_fn(|i| a[i] + b[i])
    }

    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        std::array::from_fn(|i| a[i] - b[i])
    }

    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        std::array::from_fn(|i| a[i] * b[i])
    }

    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        std::array::from_fn(|i| a[i] / b[i])
    }

    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }

    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        std::array::from_fn(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        std::array::from_fn(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn sum(self, x: Self::F) -> f32 {
        ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]))
    }

    #[inline(always)]
    fn pow2(self, n: Self::F) -> Self::F {
        n.map(|n| f32::from_bits(((n as i32).wrapping_add(127) as u32) << 23))
    }

    #[inline(always)]
    fn bf16(self, from: &[bf16; LANES]) -> Self::F {
        from.map(bf16::to_f32)
    }

    #[inline(always)]
    fn f16(self, from: &[f16; LANES]) -> Self::F {
        from.map(f16::to_f32)
    }

    type W = [f32; WIDE];

    const ROWS: usize = 2;

    const BOTH: usize = 2;

    const BYTE_OFFSET: i32 = 0;

    const REGISTERS: usize = 8;

    #[inline(always)]
    fn twice(self, x: Self::F) -> Self::W {
        std::array::from_fn(|i| x[i % LANES])
    }

    #[inline(always)]
    fn halves(self, x: Self::W) -> [Self::F; 2] {
        [0, LANES].map(|half| std::array::from_fn(|i| x[half + i]))
    }

    #[inline(always)]
    fn wide_splat(self, x: f32) -> Self::W {
        [x; WIDE]
    }

    #[inline(always)]
    fn wide_load(self, from: &[f32; WIDE]) -> Self::W {
        *from
    }

    #[inline(always)]
    fn wide_store(self, x: Self::W, to: &mut [f32; WIDE]) {
        *to = x;
    }

    #[inline(always)]
    fn wide_add(self, a: Self::W, b: Self::W) -> Self::W {
        std::array::from_fn(|i| a[i] + b[i])
    }

    #[inline(always)]
    fn wide_sub(self, a: Self::W, b: Self::W) -> Self::W {
        std::array::from_fn(|i| a[i] - b[i])
    }

    #[inline(always)]
    fn wide_mul(self, a: Self::W, b: Self::W) -> Self::W {
        std::array::from_fn(|i| a[i] * b[i])
    }

    #[inline(always)]
    fn wide_fma(self, a: Self::W, b: Self::W, c: Self::W) -> Self::W {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }

    #[inline(always)]
    fn wide_f16(self, from: &[f16; WIDE]) -> Self::W {
        from.map(f16::to_f32)
    }

    #[inline(always)]
    fn wide_bf16(self, from: &[bf16; WIDE]) -> Self::W {
        from.map(bf16::to_f32)
    }

    #[inline(always)]
    fn bf16_pairs(self, line: &Line) -> [Self::W; 2] {
        let pairs: &[bf16; 2 * WIDE] = line.view();
        [0, 1].map(|j| std::array::from_fn(|lane| pairs[2 * lane + j].to_f32()))
    }

    #[inline(always)]
    fn byte(self, line: &Line, shift: i32) -> Self::W {
        let lanes: &[[u8; 4]; WIDE] = line.view();
        lanes.map(|x| (u32::from_le_bytes(x) >> shift & 255) as f32)
    }

    #[inline(always)]
    fn pick(self, table: Self::W, line: &Line, shift: i32) -> Self::W {
        let lanes: &[[u8; 4]; WIDE] = line.view();
        lanes.map(|x| table[(u32::from_le_bytes(x) >> shift & 15) as usize])
    }

    #[inline(always)]
    fn e4m3_pairs(self, from: &[[u8; 2]; WIDE]) -> [Self::W; 2] {
        // The sign to the front, exponent and mantissa to where f16 has the lower bits of its own, whose bias is 8 more.
        let number = |x: u8| f16::from_bits((i16::from(x.cast_signed()) << 7).cast_unsigned() & 0xbfff);
        [0, 1].map(|j| from.map(|pair| number(pair[j]).to_f32()))
    }

    #[inline(always)]
    fn dot_bytes<const R: usize>(self, lines: &[Line], x: &[[i32; R]], from: &[i32; R]) -> [[Self::W; 2]; R] {
        std::array::from_fn(|r| {
            [0, 1].map(|strip| {
                let mut sums = [from[r]; WIDE];
                for (lines, x) in lines.as_chunks::<2>().0.iter().zip(x) {
                    dot(&mut sums, lines[strip].view(), x[r]);
                }
                sums.map(|sum| sum as f32)
            })
        })
    }

    #[inline(always)]
    fn dot_nibbles<const R: usize>(
        self,
        lines: &[Line],
        x: &[[i32; R]],
        from: &[i32; R],
    ) -> [[Self::W; 2]; R] {
        std::array::from_fn(|r| {
            [0, 1].map(|strip| {
                let mut sums = [from[r]; WIDE];
                for (lines, x) in lines.as_chunks::<2>().0.iter().zip(x.as_chunks::<2>().0) {
                    let both: &[[u8; 4]; WIDE] = lines[strip].view();
                    dot(&mut sums, &both.map(|x| x.map(|x| x & 15)), x[0][r]);
                    dot(&mut sums, &both.map(|x| x.map(|x| x >> 4)), x[1][r]);
                }
                sums.map(|sum| sum as f32)
            })
        })
    }

    #[inline(always)]
    fn dot_codes<const R: usize>(
        self,
        lines: &[Line],
        table: &[u8; 16],
        x: &[[i32; R]],
        from: &[i32; R],
    ) -> [[Self::W; 2]; R] {
        let look_up = |x: u8| table[usize::from(x)];
        std::array::from_fn(|r| {
            [0, 1].map(|strip| {
                let mut sums = [from[r]; WIDE];
                for (lines, x) in lines.as_chunks::<2>().0.iter().zip(x.as_chunks::<2>().0) {
                    let both: &[[u8; 4]; WIDE] = lines[strip].view();
                    dot(&mut sums, &both.map(|x| x.map(|x| look_up(x & 15))), x[0][r]);
                    dot(&mut sums, &both.map(|x| x.map(|x| look_up(x >> 4))), x[1][r]);
                }
                sums.map(|sum| sum as f32)
            })
        })
    }

    #[inline(always)]
    fn magnitude(self, x: &[f32; 2 * WIDE]) -> u32 {
        x.iter().fold(0, |most, x| most.max(x.abs().to_bits()))
    }

    #[inline(always)]
    fn to_bytes(self, x: &[f32; 2 * WIDE], by: f32) -> ([i8; 2 * WIDE], i32) {
        let bytes = x.map(|x| (x * by).round_ties_even() as i8);
        (bytes, bytes.iter().map(|x| i32::from(*x)).sum())
    }
}

/// Adds to each lane the products of four unsigned weights with the four signed bytes of `x`.
fn dot(sums: &mut [i32; WIDE], weights: &[[u8; 4]; WIDE], x: i32) {
    let x = x.to_ne_bytes().map(|x| i32::from(x as i8));
    for (sum, weights) in sums.iter_mut().zip(weights) {
        for (weight, x) in weights.iter().zip(x) {
            *sum += i32::from(*weight) * x;
        }
    }
}
