//! AArch64 with NEON and its integer dot products (ARMv8.4, or ARMv8.2 with `dotprod`), found at run time.
//!
//! Two instructions are written as assembly: their intrinsics came with later compilers than the oldest one that builds
//! this crate, or are not stable yet.

use std::arch::aarch64::*;
use std::arch::{asm, is_aarch64_feature_detected};

use half::{bf16, f16};

use super::{Kernel, Line, Simd, LANES, WIDE};

/// f32 of a register.
const QUAD: usize = 4;

/// Proof that the machine has the instructions.
#[derive(Clone, Copy)]
pub(crate) struct Neon(());

impl Neon {
    pub(crate) fn new() -> Option<Self> {
        // A big-endian machine has the lanes of reinterpreted registers in another order.
        let found = cfg!(target_endian = "little")
            && is_aarch64_feature_detected!("neon")
            && is_aarch64_feature_detected!("dotprod");
        found.then_some(Self(()))
    }
}

/// Runs a kernel that was compiled for these instructions.
pub(super) fn run<K: Kernel>(kernel: K) {
    #[target_feature(enable = "neon,dotprod")]
    fn with_features<K: Kernel>(proof: Neon, kernel: K) {
        kernel.run(proof);
    }
    if let Some(proof) = Neon::new() {
        // SAFETY: `proof` says that the instructions are there.
        unsafe { with_features(proof, kernel) }
    }
}

/// A call of intrinsics on the strength of a value of the set.
macro_rules! op {
    ($e:expr) => {
        // SAFETY: a value of the set exists only where its instructions do, and a pointer comes from a reference to an
        // array of the size that is read or written; no form asks for more than the alignment of an element.
        unsafe { $e }
    };
}

/// Adds to each lane of `sums` the products of its four signed bytes of `a` and of `b`.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn dot(sums: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    let mut sums = sums;
    // SAFETY: the function has the instruction, which uses no memory and no flags.
    unsafe {
        asm!(
            "sdot {sums:v}.4s, {a:v}.16b, {b:v}.16b",
            sums = inout(vreg) sums,
            a = in(vreg) a,
            b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sums
}

/// Eight f16, given by their bits.
#[inline]
#[target_feature(enable = "neon")]
fn widen(bits: uint16x8_t) -> [float32x4_t; 2] {
    let (low, high): (float32x4_t, float32x4_t);
    // SAFETY: every AArch64 machine has the instructions, which use no memory. They may note an invalid operation among
    // the floating-point flags, so those are not promised.
    unsafe {
        asm!(
            "fcvtl {low:v}.4s, {bits:v}.4h",
            "fcvtl2 {high:v}.4s, {bits:v}.8h",
            low = out(vreg) low,
            high = lateout(vreg) high,
            bits = in(vreg) bits,
            options(pure, nomem, nostack),
        );
    }
    [low, high]
}

/// The quarters of a line.
#[inline(always)]
fn quarters(line: &Line) -> [uint8x16_t; 4] {
    let at: *const u8 = line.0.as_ptr();
    op!([
        vld1q_u8(at),
        vld1q_u8(at.add(16)),
        vld1q_u8(at.add(32)),
        vld1q_u8(at.add(48))
    ])
}

/// Sixteen u32, shifted to the right.
#[inline(always)]
fn shifted(line: &Line, shift: i32) -> [uint32x4_t; 4] {
    let mut down = [op!(vdupq_n_u32(0)); 4];
    for (down, quarter) in down.iter_mut().zip(quarters(line)) {
        // A shift to the left by less than nothing is one to the right.
        *down = op!(vshlq_u32(vreinterpretq_u32_u8(quarter), vdupq_n_s32(-shift)));
    }
    down
}

/// The low and the high halves of a line's bytes.
#[inline(always)]
fn half_bytes(line: &Line) -> [[uint8x16_t; 4]; 2] {
    let mut low = quarters(line);
    let mut high = low;
    for (low, high) in low.iter_mut().zip(&mut high) {
        *low = op!(vandq_u8(*low, vdupq_n_u8(15)));
        *high = op!(vshrq_n_u8::<4>(*high));
    }
    [low, high]
}

/// Each row's sum to begin with, for one strip.
#[inline(always)]
fn starts<const R: usize>(from: &[i32; R]) -> [[int32x4_t; 4]; R] {
    let mut sums = [[op!(vdupq_n_s32(0)); 4]; R];
    for (sums, from) in sums.iter_mut().zip(from) {
        *sums = [op!(vdupq_n_s32(*from)); 4];
    }
    sums
}

/// Adds the products of four signed weights an output.
#[inline(always)]
fn multiply<const R: usize>(sums: &mut [[int32x4_t; 4]; R], weights: [uint8x16_t; 4], x: &[i32; R]) {
    for (sums, x) in sums.iter_mut().zip(x) {
        let x = op!(vreinterpretq_s8_s32(vdupq_n_s32(*x)));
        for (sum, weights) in sums.iter_mut().zip(weights) {
            *sum = op!(dot(*sum, vreinterpretq_s8_u8(weights), x));
        }
    }
}

#[inline(always)]
fn floats(sums: [int32x4_t; 4]) -> [[float32x4_t; 2]; 2] {
    op!([
        [vcvtq_f32_s32(sums[0]), vcvtq_f32_s32(sums[1])],
        [vcvtq_f32_s32(sums[2]), vcvtq_f32_s32(sums[3])],
    ])
}

impl Simd for Neon {
    type F = [float32x4_t; 2];

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        [op!(vdupq_n_f32(x)); 2]
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::F {
        op!([vld1q_f32(from.as_ptr()), vld1q_f32(from.as_ptr().add(QUAD))])
    }

    #[inline(always)]
    fn store(self, x: Self::F, to: &mut [f32; LANES]) {
        op!({
            vst1q_f32(to.as_mut_ptr(), x[0]);
            vst1q_f32(to.as_mut_ptr().add(QUAD), x[1]);
        });
    }

    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        op!([vaddq_f32(a[0], b[0]), vaddq_f32(a[1], b[1])])
    }

    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        op!([vsubq_f32(a[0], b[0]), vsubq_f32(a[1], b[1])])
    }

    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        op!([vmulq_f32(a[0], b[0]), vmulq_f32(a[1], b[1])])
    }

    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        op!([vdivq_f32(a[0], b[0]), vdivq_f32(a[1], b[1])])
    }

    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        op!([vfmaq_f32(c[0], a[0], b[0]), vfmaq_f32(c[1], a[1], b[1])])
    }

    /// Not by the instruction of that name, which hands on NaN from either side.
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        op!([
            vbslq_f32(vcgtq_f32(a[0], b[0]), a[0], b[0]),
            vbslq_f32(vcgtq_f32(a[1], b[1]), a[1], b[1]),
        ])
    }

    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        op!([
            vbslq_f32(vcltq_f32(a[0], b[0]), a[0], b[0]),
            vbslq_f32(vcltq_f32(a[1], b[1]), a[1], b[1]),
        ])
    }

    #[inline(always)]
    fn sum(self, x: Self::F) -> f32 {
        op!({
            let four = vaddq_f32(x[0], x[1]);
            vpadds_f32(vadd_f32(vget_low_f32(four), vget_high_f32(four)))
        })
    }

    #[inline(always)]
    fn sums(self, x: [Self::F; LANES]) -> Self::F {
        op!({
            // Upper halves onto lower ones, of two vectors at a time. No closures: they would not be compiled for the
            // instruction set.
            let mut twos = [vdupq_n_f32(0.0); 4];
            for (two, x) in twos.iter_mut().zip(x.as_chunks::<2>().0) {
                let a = vreinterpretq_f64_f32(vaddq_f32(x[0][0], x[0][1]));
                let b = vreinterpretq_f64_f32(vaddq_f32(x[1][0], x[1][1]));
                *two = vaddq_f32(
                    vreinterpretq_f32_f64(vzip1q_f64(a, b)),
                    vreinterpretq_f32_f64(vzip2q_f64(a, b)),
                );
            }
            [vpaddq_f32(twos[0], twos[1]), vpaddq_f32(twos[2], twos[3])]
        })
    }

    #[inline(always)]
    fn pow2(self, n: Self::F) -> Self::F {
        let mut powers = n;
        for power in &mut powers {
            *power = op!({
                let biased = vaddq_s32(vcvtnq_s32_f32(*power), vdupq_n_s32(127));
                vreinterpretq_f32_s32(vshlq_n_s32::<23>(biased))
            });
        }
        powers
    }

    #[inline(always)]
    fn bf16(self, from: &[bf16; LANES]) -> Self::F {
        op!({
            let eight = vld1q_u16(from.as_ptr().cast());
            [
                vreinterpretq_f32_u32(vshlq_n_u32::<16>(vmovl_u16(vget_low_u16(eight)))),
                vreinterpretq_f32_u32(vshlq_n_u32::<16>(vmovl_high_u16(eight))),
            ]
        })
    }

    #[inline(always)]
    fn f16(self, from: &[f16; LANES]) -> Self::F {
        op!(widen(vld1q_u16(from.as_ptr().cast())))
    }

    type W = [Self::F; 2];

    /// Four vectors a row, four of weights and a broadcast are 29 of 32 registers.
    const ROWS: usize = 6;

    /// Eight vectors a row, eight of weights and a broadcast are 25.
    const BOTH: usize = 2;

    /// The products are of signed bytes only.
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
        let (halves, _) = from.as_chunks();
        [self.load(&halves[0]), self.load(&halves[1])]
    }

    #[inline(always)]
    fn wide_store(self, x: Self::W, to: &mut [f32; WIDE]) {
        let (halves, _) = to.as_chunks_mut();
        self.store(x[0], &mut halves[0]);
        self.store(x[1], &mut halves[1]);
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
        let mut pairs = [self.wide_splat(0.0); 2];
        for (i, quarter) in quarters(line).into_iter().enumerate() {
            op!({
                let both = vreinterpretq_u32_u8(quarter);
                pairs[0][i / 2][i % 2] = vreinterpretq_f32_u32(vshlq_n_u32::<16>(both));
                pairs[1][i / 2][i % 2] = vreinterpretq_f32_u32(vandq_u32(both, vdupq_n_u32(0xffff_0000)));
            });
        }
        pairs
    }

    #[inline(always)]
    fn byte(self, line: &Line, shift: i32) -> Self::W {
        let mut bytes = self.wide_splat(0.0);
        for (i, down) in shifted(line, shift).into_iter().enumerate() {
            bytes[i / 2][i % 2] = op!(vcvtq_f32_u32(vandq_u32(down, vdupq_n_u32(255))));
        }
        bytes
    }

    #[inline(always)]
    fn pick(self, table: Self::W, line: &Line, shift: i32) -> Self::W {
        let [[a, b], [c, d]] = table;
        let mut picked = table;
        for (i, down) in shifted(line, shift).into_iter().enumerate() {
            picked[i / 2][i % 2] = op!({
                let code = vandq_u32(down, vdupq_n_u32(15));
                // The places of the four bytes of a lane.
                let places = vmlaq_u32(vdupq_n_u32(0x0302_0100), code, vdupq_n_u32(0x0404_0404));
                let bytes = uint8x16x4_t(
                    vreinterpretq_u8_f32(a),
                    vreinterpretq_u8_f32(b),
                    vreinterpretq_u8_f32(c),
                    vreinterpretq_u8_f32(d),
                );
                vreinterpretq_f32_u8(vqtbl4q_u8(bytes, vreinterpretq_u8_u32(places)))
            });
        }
        picked
    }

    #[inline(always)]
    fn e4m3_pairs(self, from: &[[u8; 2]; WIDE]) -> [Self::W; 2] {
        let mut pairs = [self.wide_splat(0.0); 2];
        for (i, from) in from.as_chunks::<LANES>().0.iter().enumerate() {
            op!({
                // The sign to the front, exponent and mantissa to where f16 has the lower bits of its own, whose bias is 8 more.
                let second = vld1q_s16(from.as_ptr().cast());
                let first = vshlq_n_s16::<8>(second);
                let mask = vdupq_n_u16(0xbf80);
                pairs[0][i] = widen(vandq_u16(vreinterpretq_u16_s16(vshrq_n_s16::<1>(first)), mask));
                pairs[1][i] = widen(vandq_u16(vreinterpretq_u16_s16(vshrq_n_s16::<1>(second)), mask));
            });
        }
        pairs
    }

    #[inline(always)]
    fn dot_bytes<const R: usize>(self, lines: &[Line], x: &[[i32; R]], from: &[i32; R]) -> [[Self::W; 2]; R] {
        let mut out = [[self.wide_splat(0.0); 2]; R];
        for strip in 0..2 {
            let mut sums = starts(from);
            for (lines, x) in lines.as_chunks::<2>().0.iter().zip(x) {
                let mut weights = quarters(&lines[strip]);
                for weights in &mut weights {
                    *weights = op!(veorq_u8(*weights, vdupq_n_u8(0x80)));
                }
                multiply(&mut sums, weights, x);
            }
            for (out, sums) in out.iter_mut().zip(sums) {
                out[strip] = floats(sums);
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
        let mut out = [[self.wide_splat(0.0); 2]; R];
        for strip in 0..2 {
            let mut sums = starts(from);
            for (lines, x) in lines.as_chunks::<2>().0.iter().zip(x.as_chunks::<2>().0) {
                let [low, high] = half_bytes(&lines[strip]);
                multiply(&mut sums, low, &x[0]);
                multiply(&mut sums, high, &x[1]);
            }
            for (out, sums) in out.iter_mut().zip(sums) {
                out[strip] = floats(sums);
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
        let table = op!(veorq_u8(vld1q_u8(table.as_ptr()), vdupq_n_u8(0x80)));
        let mut out = [[self.wide_splat(0.0); 2]; R];
        for strip in 0..2 {
            let mut sums = starts(from);
            for (lines, x) in lines.as_chunks::<2>().0.iter().zip(x.as_chunks::<2>().0) {
                let [mut low, mut high] = half_bytes(&lines[strip]);
                for weights in low.iter_mut().chain(&mut high) {
                    *weights = op!(vqtbl1q_u8(table, *weights));
                }
                multiply(&mut sums, low, &x[0]);
                multiply(&mut sums, high, &x[1]);
            }
            for (out, sums) in out.iter_mut().zip(sums) {
                out[strip] = floats(sums);
            }
        }
        out
    }

    #[inline(always)]
    fn magnitude(self, x: &[f32; 2 * WIDE]) -> u32 {
        op!({
            let mut most = vdupq_n_u32(0);
            for x in x.as_chunks::<QUAD>().0 {
                let bits = vreinterpretq_u32_f32(vld1q_f32(x.as_ptr()));
                most = vmaxq_u32(most, vandq_u32(bits, vdupq_n_u32(u32::MAX >> 1)));
            }
            vmaxvq_u32(most)
        })
    }

    #[inline(always)]
    fn to_bytes(self, x: &[f32; 2 * WIDE], by: f32) -> ([i8; 2 * WIDE], i32) {
        let mut bytes = [0; 2 * WIDE];
        let sum = op!({
            let by = vdupq_n_f32(by);
            let mut sums = vdupq_n_s32(0);
            for (to, x) in bytes
                .as_chunks_mut::<LANES>()
                .0
                .iter_mut()
                .zip(x.as_chunks::<LANES>().0)
            {
                let a = vcvtnq_s32_f32(vmulq_f32(vld1q_f32(x.as_ptr()), by));
                let b = vcvtnq_s32_f32(vmulq_f32(vld1q_f32(x.as_ptr().add(QUAD)), by));
                sums = vaddq_s32(sums, vaddq_s32(a, b));
                vst1_s8(to.as_mut_ptr(), vqmovn_s16(vqmovn_high_s32(vqmovn_s32(a), b)));
            }
            vaddvq_s32(sums)
        });
        (bytes, sum)
    }
}
