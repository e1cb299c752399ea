//! What a machine can do at most, measured.

use std::hint::black_box;
use std::time::{Duration, Instant};

use crate::linear::Lines;
use crate::pool::{self, Shared};
use crate::simd::{self, Isa, Kernel, Line, Simd, WIDE};

/// Bytes that are read from memory: several times what the largest processors keep in caches.
const MEMORY: usize = 512 << 20;

/// Lines of a task that reads.
const READ_TASK: usize = (1 << 20) / size_of::<Line>();

/// Rounds of registers, or of cached lines, of a task that multiplies.
const ROUNDS: usize = 20_000;

/// Lines whose bytes are multiplied, as many as sum up exactly. They stay in the first-level cache.
const CACHED: usize = 64;

/// Jobs whose sharing is timed, and how long one of their tasks takes.
const JOBS: usize = 2000;
const TASK: Duration = Duration::from_micros(5);

/// Tries of each probe. The best counts: anything else that runs only takes away.
const TRIES: usize = 12;

/// The most that the current rayon pool's threads can do on this machine: what a kernel's speed is a share of.
///
/// Measured with the instructions that the kernels use and, for memory, the kind of pages that weights are packed in.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Limits {
    /// The instruction set that kernels run on: `avx512`, `avx2`, `neon` or `portable`.
    pub instructions: &'static str,
    /// Threads that were measured.
    pub threads: usize,
    /// Reading memory from end to end in the fastest of a few ways, in 10^9 bytes a second.
    pub read_gb_s: f64,
    /// Fused multiply-adds of f32 on registers, in 10^9 operations a second; each is two.
    pub f32_gflops: f64,
    /// Multiply-adds of bytes, the weights from the first-level cache, in 10^9 operations a second; each is two.
    pub int8_gops: f64,
    /// What a job takes longer than its tasks, one a thread, in microseconds: the median, when jobs follow one upon the
    /// other.
    pub share_us: f64,
}

/// Measures what the current rayon pool's threads can do at most. Takes about a second and 512 MB.
///
/// # Example
/// ```no_run
/// let limits = recant_kernels::limits();
/// println!("a step that reads 1.5 GB takes {:.0} ms at least", 1.5e3 / limits.read_gb_s);
/// ```
pub fn limits() -> Limits {
    measure(simd::isa(), MEMORY / size_of::<Line>(), ROUNDS)
}

fn measure(isa: Isa, lines: usize, rounds: usize) -> Limits {
    Limits {
        instructions: isa.name(),
        threads: rayon::current_num_threads(),
        read_gb_s: Reader::of(isa, lines).best(),
        f32_gflops: multiply_floats::<6>(isa, rounds).max(multiply_floats::<12>(isa, rounds)),
        int8_gops: multiply_bytes::<6>(isa, rounds).max(multiply_bytes::<12>(isa, rounds)),
        share_us: share(),
    }
}

/// 10^9 things a second, of `things` that `tasks` tasks do, the best of several tries.
fn best(things: usize, tasks: usize, task: &(dyn Fn(usize) + Sync)) -> f64 {
    let seconds = (0..TRIES).map(|_| {
        let start = Instant::now();
        pool::for_each(tasks, usize::MAX / 2, task);
        start.elapsed().as_secs_f64()
    });
    things as f64 / seconds.fold(f64::INFINITY, f64::min) / 1e9
}

/// Tasks that keep all threads at work to the end.
fn tasks() -> usize {
    8 * rayon::current_num_threads()
}

/// Half a gigabyte that is read from end to end, again and again: how fast memory is at this moment, read in the way that was fastest
/// when the reader was made.
///
/// On a machine with other users that changes from second to second, so what is to be a share of it is measured in turn with it.
pub struct Reader {
    isa: Isa,
    memory: Lines,
    way: Way,
}

/// A way of reading. Which one is the fastest depends on the processor, and kernels' own is not always it.
#[derive(Clone, Copy, Default)]
struct Way {
    /// Whether a task reads at four places in turn.
    apart: bool,
    /// Whether what comes is asked for, as kernels do.
    asks: bool,
}

impl Reader {
    /// Memory to read, with the instructions and the kind of pages that kernels use.
    #[expect(
        clippy::new_without_default,
        reason = "half a gigabyte is nothing that a default takes"
    )]
    pub fn new() -> Self {
        Self::of(simd::isa(), MEMORY / size_of::<Line>())
    }

    fn of(isa: Isa, count: usize) -> Self {
        let mut memory = Lines::new(count);
        let shared = Shared::new(&mut memory);
        // Memory that was never written is one page of zeros, which stays in the cache.
        pool::for_each(count.div_ceil(READ_TASK), count * WIDE, &|task| {
            // SAFETY: one task a part, and parts do not overlap.
            for line in unsafe { shared.part(task * READ_TASK..count.min((task + 1) * READ_TASK)) } {
                *line.view_mut::<f32, WIDE>() = [1.0; WIDE];
            }
        });
        let mut reader = Self {
            isa,
            memory,
            way: Way::default(),
        };
        let mut most = 0.0;
        for (apart, asks) in [(false, false), (false, true), (true, false), (true, true)] {
            let way = Way { apart, asks };
            let speed = (0..3).map(|_| reader.read(way)).fold(0.0, f64::max);
            if speed > most {
                (most, reader.way) = (speed, way);
            }
        }
        reader
    }

    /// Reads all of it once, with all threads of the current rayon pool: 10^9 bytes a second.
    pub fn gb_s(&self) -> f64 {
        self.read(self.way)
    }

    fn read(&self, way: Way) -> f64 {
        let parts: Vec<&[Line]> = self.memory.chunks(READ_TASK).collect();
        let start = Instant::now();
        pool::for_each(parts.len(), usize::MAX / 2, &|task| {
            let lines = parts[task];
            simd::run(self.isa, Read { lines, way });
        });
        size_of_val::<[Line]>(&self.memory) as f64 / start.elapsed().as_secs_f64() / 1e9
    }

    fn best(&self) -> f64 {
        (0..TRIES).map(|_| self.gb_s()).fold(0.0, f64::max)
    }
}

/// Sums up numbers.
struct Read<'a> {
    lines: &'a [Line],
    way: Way,
}

impl Kernel for Read<'_> {
    const ASKS: bool = true;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match (self.way.apart, self.way.asks) {
            (false, false) => self.read::<S, 1, false>(s),
            (false, true) => self.read::<S, 1, true>(s),
            (true, false) => self.read::<S, 4, false>(s),
            (true, true) => self.read::<S, 4, true>(s),
        }
    }
}

impl Read<'_> {
    #[inline(always)]
    fn read<S: Simd, const PLACES: usize, const ASKS: bool>(self, s: S) {
        let quads = self.lines.as_chunks::<4>().0;
        let place = quads.len() / PLACES;
        let places: [&[[Line; 4]]; PLACES] = std::array::from_fn(|i| &quads[i * place..][..place]);
        let mut sums = [s.wide_splat(0.0); 4];
        for at in 0..place {
            for place in &places {
                for (sum, line) in sums.iter_mut().zip(&place[at]) {
                    if ASKS {
                        s.ask(std::slice::from_ref(line));
                    }
                    *sum = s.wide_add(*sum, s.wide_load(line.view()));
                }
            }
        }
        keep(s, &sums);
    }
}

fn multiply_floats<const N: usize>(isa: Isa, rounds: usize) -> f64 {
    let tasks = tasks();
    best(2 * N * WIDE * rounds * tasks, tasks, &|_| {
        simd::run(isa, Floats::<N> { rounds });
    })
}

/// `N` chains of multiply-adds on sixteen f32, each waiting for its own last result only.
struct Floats<const N: usize> {
    rounds: usize,
}

impl<const N: usize> Kernel for Floats<N> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let half = s.wide_splat(black_box(0.5));
        // All different, or the compiler sees that some are the same.
        let start: [[f32; WIDE]; N] =
            std::array::from_fn(|i| std::array::from_fn(|lane| (i * WIDE + lane) as f32));
        let mut sums = black_box(start).map(|start| s.wide_load(&start));
        for _ in 0..self.rounds {
            for sum in &mut sums {
                *sum = s.wide_fma(*sum, half, half);
            }
        }
        keep(s, &sums);
    }
}

fn multiply_bytes<const R: usize>(isa: Isa, rounds: usize) -> f64 {
    let (tasks, rounds) = (tasks(), rounds / CACHED);
    best(
        2 * R * CACHED * size_of::<Line>() * rounds * tasks,
        tasks,
        &|_| {
            simd::run(isa, Bytes::<R> { rounds });
        },
    )
}

/// Products of the same cached bytes with those of `R` rows.
struct Bytes<const R: usize> {
    rounds: usize,
}

impl<const R: usize> Kernel for Bytes<R> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let lines = [Line([1; size_of::<Line>()]); CACHED];
        let x = [[0x0101_0101; R]; CACHED / 2];
        for _ in 0..self.rounds {
            let sums = s.dot_bytes(black_box(&lines), black_box(&x), black_box(&[0; R]));
            keep(s, sums.as_flattened());
        }
    }
}

/// Keeps the compiler from leaving out what came before.
#[inline(always)]
fn keep<S: Simd>(s: S, sums: &[S::W]) {
    for sum in sums {
        let mut lanes = [0.0; WIDE];
        s.wide_store(*sum, &mut lanes);
        black_box(&lanes);
    }
}

fn share() -> f64 {
    let threads = rayon::current_num_threads();
    let mut times: Vec<f64> = (0..JOBS)
        .map(|_| {
            let start = Instant::now();
            pool::for_each(threads, usize::MAX / 2, &|_| {
                let start = Instant::now();
                while start.elapsed() < TASK {
                    std::hint::spin_loop();
                }
            });
            start.elapsed().saturating_sub(TASK).as_secs_f64() * 1e6
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[JOBS / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_instruction_set_has_limits_for_any_number_of_threads() {
        for threads in [1, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
            pool.expect("a pool").install(|| {
                for isa in simd::available() {
                    let limits = measure(*isa, 10_000, CACHED);
                    assert_eq!(limits.threads, threads);
                    for figure in [limits.read_gb_s, limits.f32_gflops, limits.int8_gops] {
                        assert!(figure > 0.0 && figure.is_finite(), "{limits:?}");
                    }
                    assert!(limits.share_us >= 0.0, "{limits:?}");
                }
            });
        }
    }
}
