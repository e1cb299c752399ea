//! A thread that has work to share, and the pool's workers that look in: README.md beside this file.

use std::any::Any;
use std::cell::{Cell, OnceCell, UnsafeCell};
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::gate::Gate;
use super::left::Left;
use super::{alone, Turn};

/// How long a worker looks out for the next job before it goes back to the pool. A token's kernels follow each other within
/// a few microseconds; to be called back costs a worker 5 to 50.
const PATIENCE: Duration = Duration::from_micros(50);

/// After so long a worker goes back between two jobs, so that others who share the pool get a turn.
const STAY: Duration = Duration::from_millis(5);

/// Looks that cost nothing but time, before each one that offers the core to other threads.
const LOOKS: u32 = 64;

thread_local!(static THREAD: ThisThread = const { ThisThread { busy: Cell::new(false), team: OnceCell::new() } });

/// Shares tasks among this thread and up to `helpers` others of the current pool. Inside another such call this thread runs them
/// alone.
pub(super) fn share(helpers: usize, tasks: usize, most: usize, turn: &Turn<'_>) {
    THREAD.with(|thread| match thread.occupy() {
        Some(_busy) => thread.team.get_or_init(Team::new).run(helpers, tasks, most, turn),
        None => alone(tasks, most, turn),
    });
}

struct ThisThread {
    /// It runs tasks now.
    busy: Cell<bool>,
    /// The team that it leads.
    team: OnceCell<Arc<Team>>,
}

impl ThisThread {
    /// Marks the thread as busy until the guard goes, unless it is already.
    fn occupy(&self) -> Option<Busy<'_>> {
        (!self.busy.replace(true)).then(|| Busy(&self.busy))
    }
}

struct Busy<'a>(&'a Cell<bool>);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.set(false);
    }
}

/// What is to be done. Lives as long as the leader is in [`Team::run`].
#[derive(Clone, Copy)]
struct Job {
    turn: *const Turn<'static>,
    /// Threads that may take part, and ranges that the tasks are cut into.
    threads: usize,
    /// Most tasks of a run.
    most: usize,
}

/// What a leader shares with workers.
struct Team {
    gate: Line<Gate>,
    /// A range of tasks for each thread of the pool. Neighbouring tasks mostly read memory one after the other, so each goes
    /// through its own from the front.
    ranges: Box<[Line<Left>]>,
    /// How many have come to this job.
    came: Line<AtomicUsize>,
    /// Written by the leader while the gate is closed, read by those inside.
    job: UnsafeCell<Option<Job>>,
    /// The first panic of a worker in this job.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    /// Workers that are here, or that the pool was asked for.
    lent: Line<AtomicUsize>,
}

/// What threads write in turn, in a cache line (or two that are fetched together) of its own.
#[derive(Default)]
#[repr(align(128))]
struct Line<T>(T);

// SAFETY: `job` is written by the leader while nobody is inside the gate and read only inside, and what it points to is
// `Sync` and outlives the job: the leader does not return before all are out. The rest is `Sync` by itself.
unsafe impl Sync for Team {}
// SAFETY: a team is led by the thread whose local it is, and the others only drop it: a job that is over is not used.
unsafe impl Send for Team {}

impl Team {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            gate: Line(Gate::new()),
            ranges: (0..rayon::current_num_threads())
                .map(|_| Line(Left::none()))
                .collect(),
            came: Line::default(),
            job: UnsafeCell::new(None),
            panic: Mutex::new(None),
            lent: Line::default(),
        })
    }

    /// Leader: the whole job.
    fn run(self: &Arc<Self>, helpers: usize, tasks: usize, most: usize, turn: &Turn<'_>) {
        let turn: *const Turn<'_> = turn;
        // SAFETY: only the lifetime changes. Nobody uses the pointer after `close`, which comes before this returns.
        let turn: *const Turn<'static> = unsafe { std::mem::transmute(turn) };
        let threads = self.ranges.len().min(helpers + 1);
        let helpers = threads - 1;
        for (i, range) in self.ranges[..threads].iter().enumerate() {
            range.0.put(tasks * i / threads..tasks * (i + 1) / threads);
        }
        self.came.0.store(0, Ordering::Relaxed);
        let job = Job { turn, threads, most };
        // SAFETY: the gate is closed and nobody is inside.
        unsafe { *self.job.get() = Some(job) };
        self.gate.0.open(helpers);
        let own = catch_unwind(AssertUnwindSafe(|| {
            self.lend(helpers);
            // SAFETY: the gate is not closed yet.
            unsafe { self.drain(job) };
        }));
        let mut waiting = Waiting::default();
        self.gate.0.close(|| {
            waiting.look();
        });
        let others = self.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(panic) = own.err().or(others) {
            resume_unwind(panic);
        }
    }

    /// Leader: asks the pool for as many workers as `helpers` goes beyond those who are here.
    fn lend(self: &Arc<Self>, helpers: usize) {
        // After the gate was opened, so that a worker who goes is counted as gone or sees the job: README.md.
        while self.lent.0.load(Ordering::SeqCst) < helpers {
            self.lent.0.fetch_add(1, Ordering::SeqCst);
            let team = Arc::clone(self);
            rayon::spawn(move || team.serve());
        }
    }

    /// Runs tasks until there are no more.
    ///
    /// # Safety
    /// `job` is this team's and is not over: the caller is its leader before `close`, or inside the gate.
    unsafe fn drain(&self, job: Job) {
        // SAFETY: the job is not over, so what it points to lives.
        let turn = unsafe { &*job.turn };
        // The leader and those who found a seat: each has a range of its own.
        let (before, rest) = self.ranges[..job.threads].split_at(self.came.0.fetch_add(1, Ordering::Relaxed));
        let Some((Line(own), after)) = rest.split_first() else {
            return;
        };
        turn(&mut std::iter::from_fn(|| {
            own.next(job.most, after.iter().chain(before).map(|Line(range)| range))
        }));
    }

    /// Worker: what the pool is asked to run.
    fn serve(self: Arc<Self>) {
        // A thread that waits for the pool in the middle of a task may be handed this too.
        THREAD.with(|thread| match thread.occupy() {
            Some(_busy) => self.attend(),
            None => {
                self.lent.0.fetch_sub(1, Ordering::SeqCst);
            }
        });
    }

    /// Worker: takes part in one job after another, as long as they follow close upon each other.
    fn attend(&self) {
        let since = Instant::now();
        let mut seen = 0;
        loop {
            let came = self.await_job(seen);
            if let Some(number) = self.gate.0.enter(seen) {
                seen = number;
                self.take_part();
                self.gate.0.leave();
            }
            if !came || since.elapsed() > STAY {
                self.lent.0.fetch_sub(1, Ordering::SeqCst);
                if !self.gate.0.is_open(seen) {
                    return;
                }
                // A job came in between, and its leader counted on this worker.
                self.lent.0.fetch_add(1, Ordering::SeqCst);
            }
        }
    }

    /// Worker: looks out for a job after number `seen`, but not for long.
    fn await_job(&self, seen: u32) -> bool {
        let since = Instant::now();
        let mut waiting = Waiting::default();
        while !self.gate.0.is_open(seen) {
            if waiting.look() && since.elapsed() > PATIENCE {
                return false;
            }
        }
        true
    }

    /// Worker, inside: runs tasks, and keeps a panic for the leader.
    fn take_part(&self) {
        // SAFETY: the leader wrote it before it opened the gate, and writes it again after this worker has left.
        let job = unsafe { *self.job.get() };
        let Some(job) = job else { return };
        // SAFETY: this worker is inside the gate.
        let result = catch_unwind(AssertUnwindSafe(|| unsafe { self.drain(job) }));
        if let Err(panic) = result {
            let mut first = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
            first.get_or_insert(panic);
        }
    }
}

/// Waits on the spot, and lets others have the core now and then.
#[derive(Default)]
struct Waiting {
    looks: u32,
}

impl Waiting {
    /// Lets a little time pass; true if the core was offered to others.
    fn look(&mut self) -> bool {
        self.looks += 1;
        let offer = self.looks.is_multiple_of(LOOKS);
        if offer {
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
        offer
    }
}
