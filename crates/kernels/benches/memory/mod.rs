//! How fast memory is read, and a way to have nothing of a measured operation's data in a cache.
#![allow(unreachable_pub)]

use std::hint::black_box;
use std::time::{Duration, Instant};

pub const THREADS: usize = 2;

pub fn pool() -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new()
        .num_threads(THREADS)
        .build()
        .expect("a pool")
}

/// 256 MB, more than the caches hold.
pub struct Memory(Vec<u64>);

impl Memory {
    pub fn new() -> Self {
        Self(vec![1; 32 << 20])
    }

    /// Reads all of it with the pool's threads, so that no cache holds anything else, and says how long that took.
    pub fn sweep(&self) -> Duration {
        let start = Instant::now();
        rayon::scope(|scope| {
            for part in self.0.chunks(self.0.len() / THREADS) {
                scope.spawn(move |_| {
                    black_box(part.iter().fold(0_u64, |sum, x| sum.wrapping_add(*x)));
                });
            }
        });
        start.elapsed()
    }

    /// Bytes a second, the best of several sweeps. Prints them.
    pub fn measure(&self, pool: &rayon::ThreadPool) -> f64 {
        let best = pool
            .install(|| (0..8).map(|_| self.sweep()).min())
            .unwrap_or_default();
        let speed = size_of_val(self.0.as_slice()) as f64 / best.as_secs_f64();
        println!("memory read, {THREADS} threads: {:.1} GB/s", speed / 1e9);
        speed
    }
}
