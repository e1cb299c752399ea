//! The threads that kernels run on.

use std::sync::Arc;

use crate::{Error, Result};

/// A pool of threads, shared by all sessions that are given it. The number of threads never changes a result.
#[derive(Debug, Clone)]
pub struct Threads(Arc<rayon::ThreadPool>);

impl Threads {
    /// A pool of `threads` threads; 0: as many as the system says can run at once.
    ///
    /// # Errors
    /// The system refuses to start them.
    pub fn new(threads: usize) -> Result<Self> {
        rayon::ThreadPoolBuilder::new()
            .num_threads(match threads {
                0 => std::thread::available_parallelism().map_or(1, usize::from),
                n => n,
            })
            .thread_name(|index| format!("recant-{index}"))
            .build()
            .map(|pool| Self(Arc::new(pool)))
            .map_err(|e| Error::Threads {
                threads,
                reason: e.to_string(),
            })
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.current_num_threads()
    }

    /// Runs `task` with these threads at hand, on one of them.
    pub fn run<T: Send>(&self, task: impl FnOnce() -> T + Send) -> T {
        self.0.install(task)
    }
}
