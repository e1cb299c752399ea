//! Eight f32 lanes, and sixteen, behind one private interface, one file per instruction set.
//!
//! `portable` is always built and is the oracle: every other set gives the same bits, since each operation here is one
//! correctly rounded IEEE operation (or exact), and a fused multiply-add is fused everywhere.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod line;
mod math;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::sync::OnceLock;

use half::{bf16, f16};

pub(crate) use line::{Line, Plain};

/// Lanes of a vector.
pub(crate) const LANES: usize = 8;

/// Lanes of a wide vector, such as a strip of a linear layer's outputs.
pub(crate) const WIDE: usize = 2 * LANES;

/// Bytes between weights in use and those asked for from memory.
const AHEAD: usize = 8 * 1024;

/// An instruction set. A value exists only where its instructions do.
pub(crate) trait Simd: Copy {
    /// Eight f32.
    type F: Copy;

    fn splat(self, x: f32) -> Self::F;
    fn load(self, from: &[f32; LANES]) -> Self::F;
    fn store(self, x: Self::F, to: &mut [f32; LANES]);
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `a` where it is greater, else `b`; so `b` where one of them is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a` where it is less, else `b`; so `b` where one of them is NaN.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// `((x0 + x4) + (x2 + x6)) + ((x1 + x5) + (x3 + x7))`
    fn sum(self, x: Self::F) -> f32;

    /// [`sum`](Self::sum) of each, in order.
    #[inline(always)]
    fn sums(self, x: [Self::F; LANES]) -> Self::F {
        self.load(&x.map(|x| self.sum(x)))
    }

    /// 2 to the power of whole numbers in -126..=127; anything for others.
    fn pow2(self, n: Self::F) -> Self::F;
    fn bf16(self, from: &[bf16; LANES]) -> Self::F;
    fn f16(self, from: &[f16; LANES]) -> Self::F;

    /// Sixteen f32.
    type W: Copy;

    /// Rows of which a linear kernel keeps one strip's sums in registers.
    const ROWS: usize;

    /// Rows of which it keeps two strips' sums there.
    const BOTH: usize;

    /// What [`dot_bytes`](Self::dot_bytes) and [`dot_codes`](Self::dot_codes) take from every weight first.
    const BYTE_OFFSET: i32;

    /// Wide vectors that there are registers for.
    const REGISTERS: usize;

    /// The same eight lanes twice.
    fn twice(self, x: Self::F) -> Self::W;
    /// Lanes 0 to 7, and 8 to 15.
    fn halves(self, x: Self::W) -> [Self::F; 2];
    fn wide_splat(self, x: f32) -> Self::W;
    fn wide_load(self, from: &[f32; WIDE]) -> Self::W;
    fn wide_store(self, x: Self::W, to: &mut [f32; WIDE]);
    fn wide_add(self, a: Self::W, b: Self::W) -> Self::W;
    fn wide_sub(self, a: Self::W, b: Self::W) -> Self::W;
    fn wide_mul(self, a: Self::W, b: Self::W) -> Self::W;
    /// `a * b + c`, rounded once.
    fn wide_fma(self, a: Self::W, b: Self::W, c: Self::W) -> Self::W;
    fn wide_f16(self, from: &[f16; WIDE]) -> Self::W;
    fn wide_bf16(self, from: &[bf16; WIDE]) -> Self::W;
    /// Of sixteen pairs of bf16 the first ones, and the second ones: cheaper than two runs of sixteen.
    fn bf16_pairs(self, line: &Line) -> [Self::W; 2];
    /// `(u32 >> shift) & 255` of sixteen little-endian u32.
    fn byte(self, line: &Line, shift: i32) -> Self::W;
    /// The lanes of `table` that `(u32 >> shift) & 15` of sixteen little-endian u32 count.
    fn pick(self, table: Self::W, line: &Line, shift: i32) -> Self::W;
    /// Of sixteen pairs of E4M3 the first ones, and the second ones, all times 2^-8. Those that are no numbers count as 480 and
    /// -480.
    fn e4m3_pairs(self, from: &[[u8; 2]; WIDE]) -> [Self::W; 2];
    /// Of two strips, whose lines alternate, for each of `R` rows `from[r]` plus a sum of products: of unsigned bytes less
    /// [`BYTE_OFFSET`](Self::BYTE_OFFSET) with the signed bytes in `x[..][r]`, none of which is -128. Lane `o` has the bytes
    /// `4 o ..` of each line, and they meet the bytes of one `x` in memory order. Exact up to 64 lines.
    ///
    /// It asks for the lines ahead ([`ask`](Self::ask)) where that helps. Lengths are left to run time on purpose, but for one row: a
    /// loop that is unrolled whole is reordered until its registers run out.
    fn dot_bytes<const R: usize>(self, lines: &[Line], x: &[[i32; R]], from: &[i32; R]) -> [[Self::W; 2]; R];
    /// As [`dot_bytes`](Self::dot_bytes), of half bytes, nothing taken from them: a line's low halves meet one `x`, its
    /// high halves the next. Exact up to 8 lines.
    fn dot_nibbles<const R: usize>(
        self,
        lines: &[Line],
        x: &[[i32; R]],
        from: &[i32; R],
    ) -> [[Self::W; 2]; R];
    /// As [`dot_bytes`](Self::dot_bytes), of the bytes that `table` has for half bytes, which lie as in
    /// [`dot_nibbles`](Self::dot_nibbles). Exact up to 64 lines.
    fn dot_codes<const R: usize>(
        self,
        lines: &[Line],
        table: &[u8; 16],
        x: &[[i32; R]],
        from: &[i32; R],
    ) -> [[Self::W; 2]; R];
    /// The largest magnitude as bits, by which NaN is above infinity and infinity above all numbers.
    fn magnitude(self, x: &[f32; 2 * WIDE]) -> u32;
    /// The nearest whole numbers to `x * by`, ties to even, as bytes, and their sum. All are in -127..=127.
    fn to_bytes(self, x: &[f32; 2 * WIDE], by: f32) -> ([i8; 2 * WIDE], i32);

    /// Asks for the cache line at an address, which need not be a valid one. Only a hint.
    #[inline(always)]
    fn prefetch<T>(self, at: *const T) {
        let _ = at;
    }

    /// As [`prefetch`](Self::prefetch), where the line is in memory and used only after some more. How that is best said is the
    /// processor's, so only kernels that say so ([`Kernel::ASKS`]) should do it.
    #[inline(always)]
    fn prefetch_early<T>(self, at: *const T) {
        let _ = at;
    }

    /// As [`prefetch_early`](Self::prefetch_early), where the line is used once and not again soon.
    #[inline(always)]
    fn prefetch_weights<T>(self, at: *const T) {
        let _ = at;
    }

    /// Bytes from the weights at an address to those to ask for when they are used. Going through memory in order asks for each line
    /// once.
    #[inline(always)]
    fn ahead(self, at: usize) -> usize {
        let _ = at;
        AHEAD
    }

    /// Asks for what follows some lines, at a distance. Between the instructions that use them: many requests at once hold up the
    /// loads behind them, and took a quarter of the speed of memory.
    #[inline(always)]
    fn ask(self, lines: &[Line]) {
        for line in lines {
            let at = std::ptr::from_ref(line);
            self.prefetch_weights(at.wrapping_byte_add(self.ahead(at.addr())));
        }
    }

    #[inline(always)]
    fn zero(self) -> Self::F {
        self.splat(0.0)
    }

    #[inline(always)]
    fn lanes(self, x: Self::F) -> [f32; LANES] {
        let mut lanes = [0.0; LANES];
        self.store(x, &mut lanes);
        lanes
    }

    /// The first eight elements, or fewer and zeros after them.
    #[inline(always)]
    fn load_part(self, from: &[f32]) -> Self::F {
        if let Some(full) = from.first_chunk() {
            return self.load(full);
        }
        let mut lanes = [0.0; LANES];
        for (lane, x) in lanes.iter_mut().zip(from) {
            *lane = *x;
        }
        self.load(&lanes)
    }

    /// As many lanes as `to` takes.
    #[inline(always)]
    fn store_part(self, x: Self::F, to: &mut [f32]) {
        if let Some(full) = to.first_chunk_mut() {
            return self.store(x, full);
        }
        for (to, lane) in to.iter_mut().zip(self.lanes(x)) {
            *to = lane;
        }
    }
}

/// Code written once for every instruction set. Mark `run` `#[inline(always)]`: it is compiled into [`run`]'s
/// per-set wrapper, whose instructions it may then use.
pub(crate) trait Kernel {
    /// Whether it asks for what is in memory, and is compiled for each way of doing so.
    const ASKS: bool = false;

    fn run<S: Simd>(self, s: S);
}

/// The instruction sets that this build has, and whether weights are asked for as data that is used `once`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Isa {
    #[cfg(target_arch = "x86_64")]
    Avx512 {
        once: bool,
    },
    #[cfg(target_arch = "x86_64")]
    Avx2 {
        once: bool,
    },
    #[cfg(target_arch = "aarch64")]
    Neon,
    Portable,
}

impl Isa {
    /// The name that its users know.
    pub(crate) fn name(self) -> &'static str {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 { .. } => "avx512",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 { .. } => "avx2",
            #[cfg(target_arch = "aarch64")]
            Self::Neon => "neon",
            Self::Portable => "portable",
        }
    }

    /// [`Simd::ROWS`] of the set.
    pub(crate) fn rows(self) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 { .. } => <avx512::Avx512>::ROWS,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 { .. } => <avx2::Avx2>::ROWS,
            #[cfg(target_arch = "aarch64")]
            Self::Neon => neon::Neon::ROWS,
            Self::Portable => portable::Portable::ROWS,
        }
    }

    /// [`Simd::BYTE_OFFSET`] of the set.
    pub(crate) fn byte_offset(self) -> i32 {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 { .. } => <avx512::Avx512>::BYTE_OFFSET,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 { .. } => <avx2::Avx2>::BYTE_OFFSET,
            #[cfg(target_arch = "aarch64")]
            Self::Neon => neon::Neon::BYTE_OFFSET,
            Self::Portable => portable::Portable::BYTE_OFFSET,
        }
    }
}

/// The best set that this machine has. Ask once an operation, on the calling thread.
pub(crate) fn isa() -> Isa {
    #[cfg(test)]
    if let Some(isa) = forced::get() {
        return isa;
    }
    available()[0]
}

/// The sets that this machine has, best first; the portable one is the last.
pub(crate) fn available() -> &'static [Isa] {
    static AVAILABLE: OnceLock<Vec<Isa>> = OnceLock::new();
    AVAILABLE.get_or_init(|| {
        let mut sets = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            let once = x86::asks_once;
            sets.extend(<avx512::Avx512>::new().map(|_| Isa::Avx512 { once: once() }));
            sets.extend(<avx2::Avx2>::new().map(|_| Isa::Avx2 { once: once() }));
            // Tests run what is compiled for other processors too.
            #[cfg(test)]
            for i in 0..sets.len() {
                sets.push(match sets[i] {
                    Isa::Avx512 { once } => Isa::Avx512 { once: !once },
                    Isa::Avx2 { once } => Isa::Avx2 { once: !once },
                    Isa::Portable => Isa::Portable,
                });
            }
        }
        #[cfg(target_arch = "aarch64")]
        sets.extend(neon::Neon::new().map(|_| Isa::Neon));
        sets.push(Isa::Portable);
        sets
    })
}

/// Runs a kernel with the instructions of `isa`.
#[inline]
pub(crate) fn run<K: Kernel>(isa: Isa, kernel: K) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 { once: true } if K::ASKS => avx512::run::<true, K>(kernel),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 { .. } => avx512::run::<false, K>(kernel),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 { once: true } if K::ASKS => avx2::run::<true, K>(kernel),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 { .. } => avx2::run::<false, K>(kernel),
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => neon::run(kernel),
        Isa::Portable => kernel.run(portable::Portable),
    }
}

pub(crate) use math::{exp, sigmoid, silu, sum_of_squares};

/// Lets tests run a whole operation on a set of their choice.
#[cfg(test)]
pub(crate) mod forced {
    use super::Isa;
    use std::cell::Cell;

    thread_local!(static FORCED: Cell<Option<Isa>> = const { Cell::new(None) });

    pub(super) fn get() -> Option<Isa> {
        FORCED.get()
    }

    pub(crate) fn with<T>(isa: Isa, f: impl FnOnce() -> T) -> T {
        FORCED.set(Some(isa));
        let out = f();
        FORCED.set(None);
        out
    }
}
