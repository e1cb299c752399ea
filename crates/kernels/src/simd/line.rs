//! Sixty-four aligned bytes.

use half::{bf16, f16};

/// A cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Line(pub(crate) [u8; 64]);

/// Types that any bytes are a value of, without padding, of an alignment that divides 64.
///
/// # Safety
/// The above holds.
pub(crate) unsafe trait Plain: Copy {}

// SAFETY: a number of bytes without padding, of which any are valid.
unsafe impl Plain for u8 {}
// SAFETY: as above.
unsafe impl Plain for u16 {}
// SAFETY: as above.
unsafe impl Plain for f32 {}
// SAFETY: a transparent u16.
unsafe impl Plain for f16 {}
// SAFETY: a transparent u16.
unsafe impl Plain for bf16 {}
// SAFETY: an array has the properties of its elements.
unsafe impl<T: Plain, const N: usize> Plain for [T; N] {}

impl Line {
    pub(crate) const ZERO: Self = Self([0; 64]);

    /// The bytes as numbers.
    #[inline(always)]
    pub(crate) fn view<T: Plain, const N: usize>(&self) -> &[T; N] {
        const { assert!(size_of::<[T; N]>() == 64) };
        // SAFETY: `T` takes any bytes, and size and alignment fit.
        unsafe { &*std::ptr::from_ref(self).cast() }
    }

    /// The bytes as numbers to write.
    #[inline(always)]
    pub(crate) fn view_mut<T: Plain, const N: usize>(&mut self) -> &mut [T; N] {
        const { assert!(size_of::<[T; N]>() == 64) };
        // SAFETY: as above; and any `T` is valid bytes.
        unsafe { &mut *std::ptr::from_mut(self).cast() }
    }
}
