//! Eight f32 lanes behind one private interface, one file per instruction set.
//!
//! `portable` is always built and is the oracle: every other set gives the same bits, since each operation here is one
//! correctly rounded IEEE operation (or exact), and a fused multiply-add is fused everywhere.

#[cfg(target_arch = "x86_64")]
mod avx2;
mod math;
mod portable;

use half::{bf16, f16};

/// Lanes of a vector.
pub(crate) const LANES: usize = 8;

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
    /// 2 to the power of whole numbers in -126..=127; anything for others.
    fn pow2(self, n: Self::F) -> Self::F;
    fn bf16(self, from: &[bf16; LANES]) -> Self::F;
    fn f16(self, from: &[f16; LANES]) -> Self::F;
    /// The elements at even places, and those at odd places: cheaper than two halves.
    fn bf16_by_parity(self, from: &[bf16; 2 * LANES]) -> [Self::F; 2];

    /// Asks for the cache line at an address, which need not be a valid one. Only a hint.
    #[inline(always)]
    fn prefetch<T>(self, at: *const T) {
        let _ = at;
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
    fn run<S: Simd>(self, s: S);
}

/// The instruction sets that this build has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Isa {
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Portable,
}

/// The best set that this machine has. Ask once an operation, on the calling thread.
pub(crate) fn isa() -> Isa {
    #[cfg(test)]
    if let Some(isa) = forced::get() {
        return isa;
    }
    #[cfg(target_arch = "x86_64")]
    if avx2::Avx2::new().is_some() {
        return Isa::Avx2;
    }
    Isa::Portable
}

/// Runs a kernel with the instructions of `isa`.
#[inline]
pub(crate) fn run<K: Kernel>(isa: Isa, kernel: K) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => avx2::run(kernel),
        Isa::Portable => kernel.run(portable::Portable),
    }
}

pub(crate) use math::{exp, sigmoid, silu, sum_of_squares};

/// Lets tests run a whole operation on the portable set.
#[cfg(test)]
pub(crate) mod forced {
    use super::Isa;
    use std::cell::Cell;

    thread_local!(static FORCED: Cell<Option<Isa>> = const { Cell::new(None) });

    pub(super) fn get() -> Option<Isa> {
        FORCED.get()
    }

    pub(crate) fn portable<T>(f: impl FnOnce() -> T) -> T {
        FORCED.set(Some(Isa::Portable));
        let out = f();
        FORCED.set(None);
        out
    }
}
