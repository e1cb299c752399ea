//! What the x86-64 sets share: eight lanes of 256 bits, and the hint by which weights are asked for.

use std::arch::x86_64::__cpuid;

use super::AHEAD;

/// A call of intrinsics on the strength of `self`.
macro_rules! op {
    ($e:expr) => {
        // SAFETY: a value of the set exists only where its instructions do, and a pointer comes from a reference to an
        // array of the size that is read or written; unaligned forms are used.
        unsafe { $e }
    };
}

/// The eight-lane part of [`Simd`](super::Simd).
macro_rules! eight_lanes {
    () => {
        type F = __m256;

        #[inline(always)]
        fn splat(self, x: f32) -> __m256 {
            op!(_mm256_set1_ps(x))
        }

        #[inline(always)]
        fn load(self, from: &[f32; LANES]) -> __m256 {
            op!(_mm256_loadu_ps(from.as_ptr()))
        }

        #[inline(always)]
        fn store(self, x: __m256, to: &mut [f32; LANES]) {
            op!(_mm256_storeu_ps(to.as_mut_ptr(), x))
        }

        #[inline(always)]
        fn add(self, a: __m256, b: __m256) -> __m256 {
            op!(_mm256_add_ps(a, b))
        }

        #[inline(always)]
        fn sub(self, a: __m256, b: __m256) -> __m256 {
            op!(_mm256_sub_ps(a, b))
        }

        #[inline(always)]
        fn mul(self, a: __m256, b: __m256) -> __m256 {
            op!(_mm256_mul_ps(a, b))
        }

        #[inline(always)]
        fn div(self, a: __m256, b: __m256) -> __m256 {
            op!(_mm256_div_ps(a, b))
        }

        #[inline(always)]
        fn fma(self, a: __m256, b: __m256, c: __m256) -> __m256 {
            op!(_mm256_fmadd_ps(a, b, c))
        }

        #[inline(always)]
        fn max(self, a: __m256, b: __m256) -> __m256 {
            op!(_mm256_max_ps(a, b))
        }

        #[inline(always)]
        fn min(self, a: __m256, b: __m256) -> __m256 {
            op!(_mm256_min_ps(a, b))
        }

        #[inline(always)]
        fn sum(self, x: __m256) -> f32 {
            op!({
                let four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
                let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
                _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
            })
        }

        #[inline(always)]
        fn sums(self, x: [__m256; LANES]) -> __m256 {
            op!({
                // Upper halves onto lower ones, of two vectors at a time. No closures: they would not be compiled for
                // the instruction set.
                let mut fours = [_mm256_setzero_ps(); 4];
                for (i, four) in fours.iter_mut().enumerate() {
                    *four = _mm256_add_ps(
                        _mm256_blend_ps::<0xf0>(x[i], x[i + 4]),
                        _mm256_permute2f128_ps::<0x21>(x[i], x[i + 4]),
                    );
                }
                let mut twos = [_mm256_setzero_ps(); 2];
                for (two, fours) in twos.iter_mut().zip(fours.as_chunks::<2>().0) {
                    let (a, b) = (_mm256_castps_pd(fours[0]), _mm256_castps_pd(fours[1]));
                    *two = _mm256_add_ps(
                        _mm256_castpd_ps(_mm256_unpacklo_pd(a, b)),
                        _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)),
                    );
                }
                _mm256_add_ps(
                    _mm256_shuffle_ps::<0x88>(twos[0], twos[1]),
                    _mm256_shuffle_ps::<0xdd>(twos[0], twos[1]),
                )
            })
        }

        #[inline(always)]
        fn pow2(self, n: __m256) -> __m256 {
            op!({
                let biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
            })
        }

        #[inline(always)]
        fn bf16(self, from: &[bf16; LANES]) -> __m256 {
            op!({
                let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.as_ptr().cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
            })
        }

        #[inline(always)]
        fn f16(self, from: &[f16; LANES]) -> __m256 {
            op!(_mm256_cvtph_ps(_mm_loadu_si128(from.as_ptr().cast())))
        }

        #[inline(always)]
        fn prefetch<T>(self, at: *const T) {
            op!(_mm_prefetch::<_MM_HINT_T0>(at.cast()))
        }

        #[inline(always)]
        fn prefetch_early<T>(self, at: *const T) {
            if ONCE {
                self.prefetch(at);
            } else {
                op!(_mm_prefetch::<_MM_HINT_T1>(at.cast()));
            }
        }

        #[inline(always)]
        fn prefetch_weights<T>(self, at: *const T) {
            if ONCE {
                op!(_mm_prefetch::<_MM_HINT_NTA>(at.cast()));
            } else {
                op!(_mm_prefetch::<_MM_HINT_T1>(at.cast()));
            }
        }

        #[inline(always)]
        fn ahead(self, at: usize) -> usize {
            ahead::<ONCE>(at)
        }
    };
}

/// [`Simd::ahead`](super::Simd::ahead). What is not used once is asked for so that sixteen pages are read side by side: sixteenth `i` of a
/// page asks for its like `i` pages further on. One page after the other gave a tenth less of memory's speed.
#[inline(always)]
pub(super) fn ahead<const ONCE: bool>(at: usize) -> usize {
    const PAGE: usize = 4096;
    let pages = if ONCE { 0 } else { at % PAGE / (PAGE / 16) };
    AHEAD + pages * PAGE
}

/// Whether weights are best asked for as data that is used once, page after page, and keys and values for the first-level cache.
///
/// AMD's processors then leave the larger caches alone, and read up to 4 % faster. Intel's keep data that is used once in a small part of
/// the first-level cache only, and give it up before it is used: memory was read at a third of its speed. There all is asked for into
/// the second-level cache, which waits for more lines at once than the first.
pub(super) fn asks_once() -> bool {
    #[allow(unused_unsafe, reason = "older compilers have it as unsafe")]
    // SAFETY: every x86-64 processor has the instruction.
    let maker = unsafe { __cpuid(0) };
    let name = [maker.ebx, maker.edx, maker.ecx].map(u32::to_le_bytes);
    matches!(name.as_flattened(), b"AuthenticAMD" | b"HygonGenuine")
}

pub(super) use {eight_lanes, op};
