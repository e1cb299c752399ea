//! The system's allocator, with a count.

use std::alloc::{GlobalAlloc, Layout, System};

/// Tells of every request how many bytes it asks for and how many it gives back.
pub struct Counting(pub fn(asked: usize, freed: usize));

// SAFETY: every call goes to the system's allocator as it came; who counts asks for no memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        (self.0)(layout.size(), 0);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        (self.0)(layout.size(), 0);
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, old: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        (self.0)(size, layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.realloc(old, layout, size) }
    }

    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        (self.0)(0, layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(old, layout) }
    }
}
