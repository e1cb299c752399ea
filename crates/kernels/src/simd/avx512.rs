//! x86-64 with AVX-512 (F, BW, DQ, VL, VNNI), found at run time: twice the lanes for linear layers, twice the registers
//! for all else, and integer dot products.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::x86::{ahead, eight_lanes, op};
use super::{Kernel, Line, Simd, LANES, WIDE};

/// Proof that the machine has the instructions. `ONCE`: weights are asked for as data that is used once
/// ([`asks_once`](super::x86::asks_once)).
#[derive(Clone, Copy)]
pub(crate) struct Avx512<const ONCE: bool = false>(());

impl<const ONCE: bool> Avx512<ONCE> {
    pub(crate) fn new() -> Option<Self> {
        let found = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        found.then_some(Self(()))
    }
}

/// Runs a kernel that was compiled for these instructions.
pub(super) fn run<const ONCE: bool, K: Kernel>(kernel: K) {
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    fn with_features<const ONCE: bool, K: Kernel>(proof: Avx512<ONCE>, kernel: K) {
        kernel.run(proof);
    }
    if let Some(proof) = Avx512::<ONCE>::new() {
        // SAFETY: `proof` says that the instructions are there.
        unsafe { with_features(proof, kernel) }
    }
}

#[inline(always)]
fn whole(line: &Line) -> __m512i {
    op!(_mm512_loadu_si512(std::ptr::from_ref(line).cast()))
}

#[inline(always)]
fn absolute(x: __m512i) -> __m512i {
    op!(_mm512_and_si512(x, _mm512_set1_epi32(i32::MAX)))
}

/// The low and the high halves of the bytes of two strips.
#[inline(always)]
fn half_bytes(lines: &[Line; 2]) -> [[__m512i; 2]; 2] {
    let [a, b] = [whole(&lines[0]), whole(&lines[1])];
    op!({
        let mask = _mm512_set1_epi8(15);
        [
            [_mm512_and_si512(a, mask), _mm512_and_si512(b, mask)],
            [
                _mm512_and_si512(_mm512_srli_epi16::<4>(a), mask),
                _mm512_and_si512(_mm512_srli_epi16::<4>(b), mask),
            ],
        ]
    })
}

/// Each row's sum to begin with, for two strips.
#[inline(always)]
fn starts<const R: usize>(from: &[i32; R]) -> [[__m512i; 2]; R] {
    let mut sums = [[op!(_mm512_setzero_si512()); 2]; R];
    for (sums, from) in sums.iter_mut().zip(from) {
        *sums = [op!(_mm512_set1_epi32(*from)); 2];
    }
    sums
}

/// Adds the products of four weights an output.
#[inline(always)]
fn multiply<const R: usize>(sums: &mut [[__m512i; 2]; R], weights: [__m512i; 2], x: &[i32; R]) {
    for (sums, x) in sums.iter_mut().zip(x) {
        let x = op!(_mm512_set1_epi32(*x));
        sums[0] = op!(_mm512_dpbusd_epi32(sums[0], weights[0], x));
        sums[1] = op!(_mm512_dpbusd_epi32(sums[1], weights[1], x));
    }
}

#[inline(always)]
fn floats<const R: usize>(sums: [[__m512i; 2]; R]) -> [[__m512; 2]; R] {
    let mut floats = [[op!(_mm512_setzero_ps()); 2]; R];
    for (floats, sums) in floats.iter_mut().zip(sums) {
        *floats = op!([_mm512_cvtepi32_ps(sums[0]), _mm512_cvtepi32_ps(sums[1])]);
    }
    floats
}

impl<const ONCE: bool> Avx512<ONCE> {
    /// Adds the products of two strips' bytes, unrolled where the number of lines is known.
    #[inline(always)]
    fn add_bytes<const R: usize>(self, sums: &mut [[__m512i; 2]; R], lines: &[Line], x: &[[i32; R]]) {
        for (lines, x) in lines.as_chunks::<2>().0.iter().zip(x) {
            multiply(sums, [whole(&lines[0]), whole(&lines[1])], x);
            self.ask(lines);
        }
    }
}

impl<const ONCE: bool> Simd for Avx512<ONCE> {
    eight_lanes!();

    type W = __m512;

    /// Two vectors a row, four of weights and a broadcast are 29 of 32 registers.
    const ROWS: usize = 12;

    const BOTH: usize = 12;

    const BYTE_OFFSET: i32 = 0;

    const REGISTERS: usize = 32;

    #[inline(always)]
    fn twice(self, x: __m256) -> __m512 {
        op!(_mm512_broadcast_f32x8(x))
    }

    #[inline(always)]
    fn halves(self, x: __m512) -> [__m256; 2] {
        op!([_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x)])
    }

    #[inline(always)]
    fn wide_splat(self, x: f32) -> __m512 {
        op!(_mm512_set1_ps(x))
    }

    #[inline(always)]
    fn wide_load(self, from: &[f32; WIDE]) -> __m512 {
        op!(_mm512_loadu_ps(from.as_ptr()))
    }

    #[inline(always)]
    fn wide_store(self, x: __m512, to: &mut [f32; WIDE]) {
        op!(_mm512_storeu_ps(to.as_mut_ptr(), x))
    }

    #[inline(always)]
    fn wide_add(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_add_ps(a, b))
    }

    #[inline(always)]
    fn wide_sub(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_sub_ps(a, b))
    }

    #[inline(always)]
    fn wide_mul(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_mul_ps(a, b))
    }

    #[inline(always)]
    fn wide_fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        op!(_mm512_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn wide_f16(self, from: &[f16; WIDE]) -> __m512 {
        op!(_mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())))
    }

    #[inline(always)]
    fn wide_bf16(self, from: &[bf16; WIDE]) -> __m512 {
        op!({
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.as_ptr().cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        })
    }

    #[inline(always)]
    fn bf16_pairs(self, line: &Line) -> [__m512; 2] {
        let both = whole(line);
        op!([
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(both)),
            _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(0xffff_0000_u32 as i32))),
        ])
    }

    #[inline(always)]
    fn byte(self, line: &Line, shift: i32) -> __m512 {
        op!(_mm512_cvtepi32_ps(_mm512_and_si512(
            _mm512_srlv_epi32(whole(line), _mm512_set1_epi32(shift)),
            _mm512_set1_epi32(255)
        )))
    }

    #[inline(always)]
    fn pick(self, table: __m512, line: &Line, shift: i32) -> __m512 {
        // Only the lowest four bits of a lane count.
        op!(_mm512_permutexvar_ps(
            _mm512_srlv_epi32(whole(line), _mm512_set1_epi32(shift)),
            table
        ))
    }

    #[inline(always)]
    fn e4m3_pairs(self, from: &[[u8; 2]; WIDE]) -> [__m512; 2] {
        op!({
            // The sign to the front, exponent and mantissa to where f16 has the lower bits of its own, whose bias is 8 more.
            let second = _mm256_loadu_si256(from.as_ptr().cast());
            let first = _mm256_slli_epi16::<8>(second);
            let mask = _mm256_set1_epi16(0xbf80_u16.cast_signed());
            [
                _mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16::<1>(first), mask)),
                _mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16::<1>(second), mask)),
            ]
        })
    }

    #[inline(always)]
    fn dot_bytes<const R: usize>(self, lines: &[Line], x: &[[i32; R]], from: &[i32; R]) -> [[__m512; 2]; R] {
        let mut sums = starts(from);
        match (R, <&[Line; 16]>::try_from(lines), x.first_chunk::<8>()) {
            // One row leaves registers for a whole step, and then 2 to 5 % more is read in the same time.
            (1, Ok(lines), Some(x)) => self.add_bytes(&mut sums, lines, x),
            _ => self.add_bytes(&mut sums, lines, x),
        }
        floats(sums)
    }

    #[inline(always)]
    fn dot_nibbles<const R: usize>(
        self,
        lines: &[Line],
        x: &[[i32; R]],
        from: &[i32; R],
    ) -> [[__m512; 2]; R] {
        let mut sums = starts(from);
        for (lines, x) in lines.as_chunks::<2>().0.iter().zip(x.as_chunks::<2>().0) {
            let [low, high] = half_bytes(lines);
            multiply(&mut sums, low, &x[0]);
            multiply(&mut sums, high, &x[1]);
            self.ask(lines);
        }
        floats(sums)
    }

    #[inline(always)]
    fn dot_codes<const R: usize>(
        self,
        lines: &[Line],
        table: &[u8; 16],
        x: &[[i32; R]],
        from: &[i32; R],
    ) -> [[__m512; 2]; R] {
        let table = op!(_mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())));
        let mut sums = starts(from);
        for (lines, x) in lines.as_chunks::<2>().0.iter().zip(x.as_chunks::<2>().0) {
            let [mut low, mut high] = half_bytes(lines);
            for weights in low.iter_mut().chain(&mut high) {
                *weights = op!(_mm512_shuffle_epi8(table, *weights));
            }
            multiply(&mut sums, low, &x[0]);
            multiply(&mut sums, high, &x[1]);
            self.ask(lines);
        }
        floats(sums)
    }

    #[inline(always)]
    fn magnitude(self, x: &[f32; 2 * WIDE]) -> u32 {
        op!({
            let at: *const __m512i = x.as_ptr().cast();
            let most = _mm512_max_epu32(
                absolute(_mm512_loadu_si512(at)),
                absolute(_mm512_loadu_si512(at.add(1))),
            );
            _mm512_reduce_max_epu32(most)
        })
    }

    #[inline(always)]
    fn to_bytes(self, x: &[f32; 2 * WIDE], by: f32) -> ([i8; 2 * WIDE], i32) {
        let mut bytes = [0; 2 * WIDE];
        let sum = op!({
            let by = _mm512_set1_ps(by);
            let to: *mut __m128i = bytes.as_mut_ptr().cast();
            let a = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x.as_ptr()), by));
            let b = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x.as_ptr().add(WIDE)), by));
            _mm_storeu_si128(to, _mm512_cvtepi32_epi8(a));
            _mm_storeu_si128(to.add(1), _mm512_cvtepi32_epi8(b));
            _mm512_reduce_add_epi32(_mm512_add_epi32(a, b))
        });
        (bytes, sum)
    }
}
