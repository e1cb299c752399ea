//! x86-64 with AVX2, FMA and F16C, found at run time.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::x86::{ahead, eight_lanes, op};
use super::{Kernel, Line, Simd, LANES, WIDE};

/// Proof that the machine has the instructions. `ONCE`: weights are asked for as data that is used once
/// ([`asks_once`](super::x86::asks_once)).
#[derive(Clone, Copy)]
pub(crate) struct Avx2<const ONCE: bool = false>(());

impl<const ONCE: bool> Avx2<ONCE> {
    pub(crate) fn new() -> Option<Self> {
        let found = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        found.then_some(Self(()))
    }
}

/// Runs a kernel that was compiled for these instructions.
pub(super) fn run<const ONCE: bool, K: Kernel>(kernel: K) {
    #[target_feature(enable = "avx2,fma,f16c")]
    fn with_features<const ONCE: bool, K: Kernel>(proof: Avx2<ONCE>, kernel: K) {
        kernel.run(proof);
    }
    if let Some(proof) = Avx2::<ONCE>::new() {
        // SAFETY: `proof` says that the instructions are there.
        unsafe { with_features(proof, kernel) }
    }
}

/// Both halves of a line.
#[inline(always)]
fn halves(line: &Line) -> [__m256i; 2] {
    let at: *const __m256i = std::ptr::from_ref(line).cast();
    op!([_mm256_loadu_si256(at), _mm256_loadu_si256(at.add(1))])
}

/// Adds the products of four signed weights an output.
#[inline(always)]
fn multiply<const R: usize>(sums: &mut [__m256i; R], weights: __m256i, x: &[i32; R]) {
    op!({
        let size = _mm256_abs_epi8(weights);
        for (sum, x) in sums.iter_mut().zip(x) {
            let signed = _mm256_sign_epi8(_mm256_set1_epi32(*x), weights);
            let pairs = _mm256_maddubs_epi16(size, signed);
            let fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
            *sum = _mm256_add_epi32(*sum, fours);
        }
    });
}

/// The lanes of `table` that the lowest four bits of each lane of `at` count.
#[inline(always)]
fn look_up(table: [__m256; 2], at: __m256i) -> __m256 {
    op!({
        let low = _mm256_permutevar8x32_ps(table[0], at);
        let high = _mm256_permutevar8x32_ps(table[1], at);
        _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32::<28>(at)))
    })
}

/// The E4M3 in the high halves of sixteen words, times 2^-8: the sign stays in front, and exponent and mantissa go to where f16
/// has the lower bits of its own, whose bias is 8 more.
#[inline(always)]
fn e4m3_of_high(words: __m256i) -> [__m256; 2] {
    op!({
        let mask = _mm256_set1_epi16(0xbf80_u16.cast_signed());
        let bits = _mm256_and_si256(_mm256_srai_epi16::<1>(words), mask);
        [
            _mm256_cvtph_ps(_mm256_castsi256_si128(bits)),
            _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(bits)),
        ]
    })
}

impl<const ONCE: bool> Simd for Avx2<ONCE> {
    eight_lanes!();

    type W = [__m256; 2];

    /// Two vectors a row, two of weights and a broadcast are fifteen of sixteen registers.
    const ROWS: usize = 6;

    const BOTH: usize = 3;

    /// `maddubs` adds pairs of products in 16 bits, which 255 * 127 * 2 overflows and 128 * 127 * 2 does not.
    const BYTE_OFFSET: i32 = 128;

    const REGISTERS: usize = 8;

    #[inline(always)]
    fn twice(self, x: Self::F) -> Self::W {
        [x; 2]
    }

    #[inline(always)]
    fn halves(self, x: Self::W) -> [Self::F; 2] {
        x
    }

    #[inline(always)]
    fn wide_splat(self, x: f32) -> Self::W {
        [self.splat(x); 2]
    }

    #[inline(always)]
    fn wide_load(self, from: &[f32; WIDE]) -> Self::W {
        op!([
            _mm256_loadu_ps(from.as_ptr()),
            _mm256_loadu_ps(from.as_ptr().add(LANES))
        ])
    }

    #[inline(always)]
    fn wide_store(self, x: Self::W, to: &mut [f32; WIDE]) {
        op!({
            _mm256_storeu_ps(to.as_mut_ptr(), x[0]);
            _mm256_storeu_ps(to.as_mut_ptr().add(LANES), x[1]);
        });
    }

    #[inline(always)]
    fn wide_add(self, a: Self::W, b: Self::W) -> Self::W {
        [self.add(a[0], b[0]), self.add(a[1], b[1])]
    }

    #[inline(always)]
    fn wide_sub(self, a: Self::W, b: Self::W) -> Self::W {
        [self.sub(a[0], b[0]), self.sub(a[1], b[1])]
    }

    #[inline(always)]
    fn wide_mul(self, a: Self::W, b: Self::W) -> Self::W {
        [self.mul(a[0], b[0]), self.mul(a[1], b[1])]
    }

    #[inline(always)]
    fn wide_fma(self, a: Self::W, b: Self::W, c: Self::W) -> Self::W {
        [self.fma(a[0], b[0], c[0]), self.fma(a[1], b[1], c[1])]
    }

    #[inline(always)]
    fn wide_f16(self, from: &[f16; WIDE]) -> Self::W {
        let (halves, _) = from.as_chunks();
        [self.f16(&halves[0]), self.f16(&halves[1])]
    }

    #[inline(always)]
    fn wide_bf16(self, from: &[bf16; WIDE]) -> Self::W {
        let (halves, _) = from.as_chunks();
        [self.bf16(&halves[0]), self.bf16(&halves[1])]
    }

    #[inline(always)]
    fn bf16_pairs(self, line: &Line) -> [Self::W; 2] {
        let [a, b] = halves(line);
        op!({
            let mask = _mm256_set1_epi32(0xffff_0000_u32 as i32);
            [
                [
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(a)),
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(b)),
                ],
                [
                    _mm256_castsi256_ps(_mm256_and_si256(a, mask)),
                    _mm256_castsi256_ps(_mm256_and_si256(b, mask)),
                ],
            ]
        })
    }

    #[inline(always)]
    fn byte(self, line: &Line, shift: i32) -> Self::W {
        let [a, b] = halves(line);
        op!({
            let (shift, mask) = (_mm256_set1_epi32(shift), _mm256_set1_epi32(255));
            [
                _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srlv_epi32(a, shift), mask)),
                _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srlv_epi32(b, shift), mask)),
            ]
        })
    }

    #[inline(always)]
    fn pick(self, table: Self::W, line: &Line, shift: i32) -> Self::W {
        let [a, b] = halves(line);
        let down = op!({
            let shift = _mm256_set1_epi32(shift);
            [_mm256_srlv_epi32(a, shift), _mm256_srlv_epi32(b, shift)]
        });
        [look_up(table, down[0]), look_up(table, down[1])]
    }

    #[inline(always)]
    fn e4m3_pairs(self, from: &[[u8; 2]; WIDE]) -> [Self::W; 2] {
        let second = op!(_mm256_loadu_si256(from.as_ptr().cast()));
        [
            e4m3_of_high(op!(_mm256_slli_epi16::<8>(second))),
            e4m3_of_high(second),
        ]
    }

    #[inline(always)]
    fn dot_bytes<const R: usize>(self, lines: &[Line], x: &[[i32; R]], from: &[i32; R]) -> [[Self::W; 2]; R] {
        let mut out = [[[self.splat(0.0); 2]; 2]; R];
        for strip in 0..2 {
            for half in 0..2 {
                let mut sums = [op!(_mm256_setzero_si256()); R];
                for (sum, from) in sums.iter_mut().zip(from) {
                    *sum = op!(_mm256_set1_epi32(*from));
                }
                for (lines, x) in lines.as_chunks::<2>().0.iter().zip(x) {
                    if half == 0 {
                        self.ask(std::slice::from_ref(&lines[strip]));
                    }
                    let weights = halves(&lines[strip])[half];
                    let signed = op!(_mm256_xor_si256(weights, _mm256_set1_epi8(-128)));
                    multiply(&mut sums, signed, x);
                }
                for (out, sum) in out.iter_mut().zip(sums) {
                    out[strip][half] = op!(_mm256_cvtepi32_ps(sum));
                }
            }
        }
        out
    }

    #[inline(always)]
    fn dot_nibbles<const R: usize>(
        self,
        lines: &[Line],
        x: &[[i32; R]],
        from: &[i32; R],
    ) -> [[Self::W; 2]; R] {
        let mut out = [[[self.splat(0.0); 2]; 2]; R];
        for strip in 0..2 {
            for half in 0..2 {
                // Eight pairs of products of at most 15 * 127 fit in 16 bits.
                let mut pairs = [op!(_mm256_setzero_si256()); R];
                for (lines, x) in lines.as_chunks::<2>().0.iter().zip(x.as_chunks::<2>().0) {
                    if half == 0 {
                        self.ask(std::slice::from_ref(&lines[strip]));
                    }
                    op!({
                        let both = halves(&lines[strip])[half];
                        let mask = _mm256_set1_epi8(15);
                        let low = _mm256_and_si256(both, mask);
                        let high = _mm256_and_si256(_mm256_srli_epi16::<4>(both), mask);
                        for (sum, (a, b)) in pairs.iter_mut().zip(x[0].iter().zip(&x[1])) {
                            let low = _mm256_maddubs_epi16(low, _mm256_set1_epi32(*a));
                            let high = _mm256_maddubs_epi16(high, _mm256_set1_epi32(*b));
                            *sum = _mm256_add_epi16(*sum, _mm256_add_epi16(low, high));
                        }
                    });
                }
                for ((out, pairs), from) in out.iter_mut().zip(pairs).zip(from) {
                    out[strip][half] = op!({
                        let fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
                        _mm256_cvtepi32_ps(_mm256_add_epi32(fours, _mm256_set1_epi32(*from)))
                    });
                }
            }
        }
        out
    }

    #[inline(always)]
    fn dot_codes<const R: usize>(
        self,
        lines: &[Line],
        table: &[u8; 16],
        x: &[[i32; R]],
        from: &[i32; R],
    ) -> [[Self::W; 2]; R] {
        let table = op!({
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            _mm256_xor_si256(table, _mm256_set1_epi8(-128))
        });
        let mut out = [[[self.splat(0.0); 2]; 2]; R];
        for strip in 0..2 {
            for half in 0..2 {
                let mut sums = [op!(_mm256_setzero_si256()); R];
                for (sum, from) in sums.iter_mut().zip(from) {
                    *sum = op!(_mm256_set1_epi32(*from));
                }
                for (lines, x) in lines.as_chunks::<2>().0.iter().zip(x.as_chunks::<2>().0) {
                    if half == 0 {
                        self.ask(std::slice::from_ref(&lines[strip]));
                    }
                    let both = halves(&lines[strip])[half];
                    let [low, high] = op!({
                        let mask = _mm256_set1_epi8(15);
                        let high = _mm256_and_si256(_mm256_srli_epi16::<4>(both), mask);
                        [
                            _mm256_shuffle_epi8(table, _mm256_and_si256(both, mask)),
                            _mm256_shuffle_epi8(table, high),
                        ]
                    });
                    multiply(&mut sums, low, &x[0]);
                    multiply(&mut sums, high, &x[1]);
                }
                for (out, sum) in out.iter_mut().zip(sums) {
                    out[strip][half] = op!(_mm256_cvtepi32_ps(sum));
                }
            }
        }
        out
    }

    #[inline(always)]
    fn magnitude(self, x: &[f32; 2 * WIDE]) -> u32 {
        op!({
            let mut most = _mm256_setzero_si256();
            for x in x.as_chunks::<LANES>().0 {
                let x = _mm256_loadu_si256(x.as_ptr().cast());
                most = _mm256_max_epu32(most, _mm256_and_si256(x, _mm256_set1_epi32(i32::MAX)));
            }
            let four = _mm_max_epu32(_mm256_castsi256_si128(most), _mm256_extracti128_si256::<1>(most));
            let two = _mm_max_epu32(four, _mm_shuffle_epi32::<0b1110>(four));
            _mm_cvtsi128_si32(_mm_max_epu32(two, _mm_shuffle_epi32::<1>(two))) as u32
        })
    }

    #[inline(always)]
    fn to_bytes(self, x: &[f32; 2 * WIDE], by: f32) -> ([i8; 2 * WIDE], i32) {
        let mut bytes = [0; 2 * WIDE];
        let sum = op!({
            let by = _mm256_set1_ps(by);
            let mut whole = [_mm256_setzero_si256(); 4];
            for (whole, x) in whole.iter_mut().zip(x.as_chunks::<LANES>().0) {
                *whole = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x.as_ptr()), by));
            }
            let [a, b, c, d] = whole;
            // Packing goes by halves of the registers: the quads come out as 0 2 4 6 1 3 5 7.
            let packed = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
            let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
            _mm256_storeu_si256(
                bytes.as_mut_ptr().cast(),
                _mm256_permutevar8x32_epi32(packed, order),
            );
            let eight = _mm256_add_epi32(_mm256_add_epi32(a, b), _mm256_add_epi32(c, d));
            let four = _mm_add_epi32(
                _mm256_castsi256_si128(eight),
                _mm256_extracti128_si256::<1>(eight),
            );
            let two = _mm_add_epi32(four, _mm_shuffle_epi32::<0b1110>(four));
            _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32::<1>(two)))
        });
        (bytes, sum)
    }
}
