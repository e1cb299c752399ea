//! Memory is flat: what many short sessions leave behind is what the prompt store holds, and that stays within its budget.

mod common;

use std::sync::atomic::{AtomicIsize, Ordering};

use common::counting::Counting;
use common::{load, Result, Rng};
use recant::{Batcher, BatcherOptions, PromptStore, StoreOptions, Threads};

static LIVE: AtomicIsize = AtomicIsize::new(0);

fn count(more: usize, less: usize) {
    LIVE.fetch_add(more as isize - less as isize, Ordering::Relaxed);
}

#[global_allocator]
static ALLOCATOR: Counting = Counting(count);

#[test]
fn c116_five_hundred_short_sessions_leave_no_more_than_fifty() -> Result<()> {
    const BUDGET: usize = 4 << 20;
    let (target, draft) = (load("demo-target")?, load("demo-draft")?);
    let threads = Threads::new(2)?;
    let store = PromptStore::new(StoreOptions {
        budget: BUDGET,
        every: 32,
    });
    let mut rng = Rng(5);
    let mut batcher = Batcher::new(&threads, BatcherOptions::default());
    let mut left = Vec::new();
    for number in 1..=500 {
        let prompt: Vec<u32> = (0..40 + rng.below(40))
            .map(|_| 3 + rng.below(4000) as u32)
            .collect();
        let builder = target.session().threads(&threads).prompt_store(&store);
        let session = match number % 3 {
            0 => builder.draft(&draft).build()?,
            1 => builder.mtp().build()?,
            _ => builder.build()?,
        };
        let ticket = batcher
            .submit(session, &prompt, 6)
            .map_err(|refused| refused.error)?;
        while !batcher.is_idle() {
            for (_, event) in batcher.step() {
                event?;
            }
        }
        drop(batcher.leave(ticket));
        let stats = store.stats();
        assert!(stats.bytes <= BUDGET, "{stats:?}");
        if number == 50 || number == 500 {
            // The store is full by now, so what changes is what it holds, to be told apart from what is lost.
            assert!(stats.evictions > 0, "{stats:?}");
            left.push(LIVE.load(Ordering::Relaxed) - stats.bytes as isize);
        }
    }
    let grown = left[1] - left[0];
    assert!(
        grown < 200_000,
        "{grown} bytes more after 500 sessions than after 50"
    );
    Ok(())
}
