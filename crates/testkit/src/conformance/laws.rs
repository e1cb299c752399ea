//! The laws of `Cache`, which hold for every kind.

use super::lab::{Lab, Sequence, Trouble};
use super::{snapshots, Options};
use crate::rng::Rng;
use crate::Failure;

pub(super) type Checked = Result<(), Failure>;

/// Widest block that is drafted and taken back.
const BLOCK: usize = 9;

/// All laws that need nothing but a `Cache` and a way to feed it.
pub(super) fn check(lab: &Lab<'_>, options: &Options) -> Checked {
    new_is_empty(lab)?;
    grouping(lab, options)?;
    tails(lab, options)?;
    rounds(lab, options)?;
    refused_trims(lab, options)?;
    checkpoints(lab, options)?;
    snapshots::shares_nothing(lab, options)?;
    foreign_checkpoints(lab)?;
    snapshots::wrong_ones(lab, options)?;
    reset(lab, options)?;
    footprint(lab, options)?;
    admitted(lab)
}

/// `count` tokens of text number `text`. Two texts differ at every position.
pub(super) fn text(text: u32, count: usize) -> Vec<u32> {
    let ids = (0..).map(|i: u32| (7 * i + 3) % 5 + 5 * text);
    ids.take(count).collect()
}

/// Lengths at which tokens are taken back.
pub(super) fn lengths(options: &Options) -> Vec<usize> {
    let mut lengths = vec![0, 1, 4, options.tokens];
    if let Some(window) = options.window {
        let edge = window.window;
        lengths.extend([edge.saturating_sub(1), edge, edge + 1, window.sink, 2 * edge + 1]);
    }
    lengths.retain(|len| *len <= 4 * options.tokens);
    lengths.sort_unstable();
    lengths.dedup();
    lengths
}

fn new_is_empty(lab: &Lab<'_>) -> Checked {
    let law = "a new cache holds no tokens";
    let new = lab.fresh(law);
    new.check_len()?;
    let cache = new.cache();
    if !cache.is_empty() || cache.trimmable() != 0 {
        return Err(new.broken(format!(
            "its length is {}, and {} can be trimmed",
            cache.len(),
            cache.trimmable()
        )));
    }
    if cache.kind().is_empty() {
        return Err(new.broken("its kind is an empty string"));
    }
    let snapshot = new.snapshot()?;
    if snapshot.kind() != cache.kind() || !snapshot.is_empty() {
        return Err(new.broken(format!(
            "its snapshot says {} tokens of kind `{}`; its own kind is `{}`",
            snapshot.len(),
            snapshot.kind(),
            cache.kind()
        )));
    }
    Ok(())
}

fn grouping(lab: &Lab<'_>, options: &Options) -> Checked {
    let law = "how tokens were grouped into calls leaves no trace";
    let mut rng = Rng::new(options.seed);
    for run in 0..12 {
        let all = text(run % 3, options.tokens + rng.between(0, 9));
        let mut grouped = lab.fresh(law);
        let mut rest = all.as_slice();
        while !rest.is_empty() {
            let widest = if run == 0 {
                rest.len()
            } else {
                rest.len().min(BLOCK + 4)
            };
            let (block, after) = rest.split_at(rng.between(widest.min(1 + run as usize % 3), widest));
            grouped.feed(block)?;
            rest = after;
        }
        grouped.check_state()?;
    }
    Ok(())
}

/// How a block is fed and what is open meanwhile.
#[derive(Clone, Copy)]
struct Mode {
    checkpoint: bool,
    singly: bool,
}

impl Mode {
    fn all() -> impl Iterator<Item = Self> {
        [false, true].into_iter().flat_map(|checkpoint| {
            [false, true]
                .into_iter()
                .map(move |singly| Self { checkpoint, singly })
        })
    }

    fn feed(self, sequence: &mut Sequence<'_, '_>, tokens: &[u32]) -> Checked {
        if self.singly {
            sequence.feed_singly(tokens)
        } else {
            sequence.feed(tokens)
        }
    }
}

fn tails(lab: &Lab<'_>, options: &Options) -> Checked {
    let law = "tokens that were trimmed leave no trace";
    for len in lengths(options) {
        for (block, kept) in cuts(len) {
            for mode in Mode::all() {
                // Both tails end in the state of one reference, so they are equal to each other too.
                for tail in [1, 2] {
                    let sequence = lab.fed(law, &text(0, len))?;
                    trimmed_tail(sequence, mode, block, kept, tail)?;
                }
            }
        }
    }
    Ok(())
}

/// Blocks, and how many of their tokens stay: all pairs, or a few after a long text, whose checks take time.
fn cuts(len: usize) -> Vec<(usize, usize)> {
    let blocks = if len > 100 {
        vec![1, 4, BLOCK]
    } else {
        (1..=BLOCK).collect()
    };
    let pairs = blocks
        .into_iter()
        .flat_map(|block| (0..=block).map(move |kept| (block, kept)));
    pairs
        .filter(|(block, kept)| len <= 100 || kept % 4 == 0 || kept == block)
        .collect()
}

fn trimmed_tail(mut sequence: Sequence<'_, '_>, mode: Mode, block: usize, kept: usize, tail: u32) -> Checked {
    let start = sequence.history().len();
    let mut tokens = text(0, start + kept).split_off(start);
    tokens.extend(text(tail, block - kept));
    let checkpoint = mode.checkpoint.then(|| sequence.checkpoint()).transpose()?;
    mode.feed(&mut sequence, &tokens)?;
    let (drop, trimmable) = (block - kept, sequence.cache().trimmable());
    if checkpoint.is_some() && trimmable != block {
        return Err(sequence.broken(format!(
            "{block} tokens were fed since the open checkpoint, and {trimmable} can be trimmed"
        )));
    }
    if drop > trimmable {
        return sequence.must_refuse("a trim of more than is trimmable", |cache| cache.trim(drop));
    }
    sequence.trim(drop)?;
    sequence.check_state()?;
    if let Some(checkpoint) = checkpoint {
        if kept.is_multiple_of(2) {
            sequence.commit(checkpoint)?;
            sequence.check_state()?;
        } else {
            sequence.feed(&text(3, 1))?;
            sequence.check_state()?;
            sequence.commit(checkpoint)?;
        }
    }
    sequence.feed(&text(4, 3))?;
    sequence.check_state()
}

fn rounds(lab: &Lab<'_>, options: &Options) -> Checked {
    let law = "rounds of checkpoint, draft, trim and commit leave what was kept and nothing else";
    let mut rng = Rng::new(options.seed ^ 0x5eed);
    for run in 0..6 {
        let mut sequence = lab.fed(law, &text(run, rng.between(0, options.tokens)))?;
        for round in 0..12 {
            let checkpoint = sequence.checkpoint()?;
            let mut block = text(round % 5, rng.between(1, BLOCK));
            let turn = rng.between(0, block.len() - 1);
            block.rotate_left(turn);
            if rng.between(0, 2) == 0 {
                sequence.feed_singly(&block)?;
            } else {
                sequence.feed(&block)?;
            }
            if rng.between(0, 4) == 0 {
                sequence.restore(&checkpoint)?;
                sequence.feed(&block)?;
            }
            // In two steps now and then, as a drafter does that finds out later that more must go.
            let drop = rng.between(0, block.len());
            let first = rng.between(0, drop);
            sequence.trim(first)?;
            sequence.trim(drop - first)?;
            sequence.commit(checkpoint)?;
            if rng.between(0, 3) == 0 {
                sequence.feed(&text(round % 5, 2))?;
            }
            if rng.between(0, 1) == 0 {
                sequence.check_state()?;
            }
        }
        sequence.check_state()?;
    }
    Ok(())
}

fn refused_trims(lab: &Lab<'_>, options: &Options) -> Checked {
    let law = "trim(n) succeeds exactly for n up to trimmable(), and a refusal changes nothing";
    for len in lengths(options) {
        for checkpoint in [false, true] {
            let mut sequence = lab.fed(law, &text(0, len))?;
            let open = checkpoint.then(|| sequence.checkpoint()).transpose()?;
            if checkpoint {
                sequence.feed(&text(1, 5))?;
            }
            let most = sequence.cache().trimmable();
            for n in [most + 1, sequence.cache().len() + 1, usize::MAX] {
                sequence.must_refuse(&format!("trim({n})"), |cache| cache.trim(n))?;
            }
            sequence.trim(0)?;
            sequence.check_state()?;
            sequence.trim(most)?;
            sequence.check_state()?;
            if let Some(open) = open {
                sequence.must_refuse("a trim below the open checkpoint", |cache| cache.trim(1))?;
                sequence.commit(open)?;
            }
            sequence.feed(&text(2, 2))?;
            sequence.check_state()?;
        }
    }
    Ok(())
}

fn checkpoints(lab: &Lab<'_>, options: &Options) -> Checked {
    let law = "checkpoint, advance, restore is as though nothing had been fed";
    for len in lengths(options) {
        for block in [1, 2, 5, BLOCK] {
            let mut sequence = lab.fed(law, &text(0, len))?;
            let open = sequence.checkpoint()?;
            sequence.check_state()?;
            for singly in [false, true, false] {
                let mode = Mode {
                    checkpoint: true,
                    singly,
                };
                mode.feed(&mut sequence, &text(1 + u32::from(singly), block))?;
                sequence.must_refuse("a second checkpoint", |cache| cache.checkpoint())?;
                sequence.restore(&open)?;
                sequence.check_state()?;
                sequence.restore(&open)?;
                sequence.check_state()?;
            }
            sequence.feed(&text(3, block))?;
            sequence.commit(open)?;
            sequence.check_state()?;
            // The way back is gone, and another checkpoint can be opened here.
            let next = sequence.checkpoint()?;
            sequence.feed(&text(1, 2))?;
            sequence.restore(&next)?;
            sequence.check_state()?;
            sequence.commit(next)?;
            sequence.feed(&text(2, 2))?;
            sequence.check_state()?;
        }
    }
    Ok(())
}

fn foreign_checkpoints(lab: &Lab<'_>) -> Checked {
    let law = "a checkpoint is good for its own cache, and until it ends";
    let mut other = lab.fed(law, &text(0, 3))?;
    let foreign = other.checkpoint()?;
    let mut sequence = lab.fed(law, &text(0, 3))?;
    sequence.must_refuse(
        "restore() to another cache's checkpoint, with none open,",
        |cache| cache.restore(&foreign),
    )?;
    let own = sequence.checkpoint()?;
    sequence.feed(&text(1, 4))?;
    sequence.must_refuse("restore() to another cache's checkpoint", |cache| {
        cache.restore(&foreign)
    })?;
    sequence.note("given another cache's checkpoint to commit");
    sequence.commit(foreign)?;
    if sequence.cache().trimmable() != 4 {
        return Err(sequence.broken("its own checkpoint was closed"));
    }
    sequence.restore(&own)?;
    sequence.check_state()?;

    // A checkpoint ends by reset and by load; one of the same length that is opened later is another.
    sequence.reset()?;
    sequence.feed(&text(0, 3))?;
    sequence.must_refuse("restore() to a checkpoint from before reset()", |cache| {
        cache.restore(&own)
    })?;
    let later = sequence.checkpoint()?;
    sequence.must_refuse(
        "restore() to an older checkpoint while another is open",
        |cache| cache.restore(&own),
    )?;
    sequence.commit(own)?;
    sequence.restore(&later)?;
    let snapshot = sequence.snapshot()?;
    sequence.load(&snapshot, &text(0, 3))?;
    sequence.must_refuse("restore() to a checkpoint from before load()", |cache| {
        cache.restore(&later)
    })
}

fn reset(lab: &Lab<'_>, options: &Options) -> Checked {
    let law = "a reset cache is a new cache";
    for len in lengths(options) {
        let mut sequence = lab.fed(law, &text(0, len))?;
        let _ended = sequence.checkpoint()?;
        sequence.feed(&text(1, 3))?;
        sequence.reset()?;
        if sequence.cache().trimmable() != 0 {
            return Err(sequence.broken(format!("{} tokens can be trimmed", sequence.cache().trimmable())));
        }
        sequence.check_state()?;
        let open = sequence.checkpoint()?;
        sequence.feed(&text(2, 4))?;
        sequence.trim(2)?;
        sequence.check_state()?;
        sequence.commit(open)?;
        sequence.feed(&text(3, options.tokens))?;
        sequence.check_state()?;
    }
    Ok(())
}

fn footprint(lab: &Lab<'_>, options: &Options) -> Checked {
    let law = "footprint() tells what is held, and records go once they are committed";
    let mut sequence = lab.fresh(law);
    let mut live = sequence.cache().footprint().live;
    for token in text(0, options.tokens) {
        sequence.feed(&[token])?;
        let now = sequence.cache().footprint();
        if now.live < live || now.live == 0 || now.records != 0 {
            return Err(sequence.broken(format!(
                "{live} bytes were live, and after one more token without a checkpoint it is {now:?}"
            )));
        }
        live = now.live;
    }
    let mut most = Vec::new();
    for round in 0..24 {
        let before = sequence.cache().footprint();
        let open = sequence.checkpoint()?;
        sequence.feed(&text(1, 4))?;
        most.push(sequence.cache().footprint().records);
        sequence.restore(&open)?;
        let after = sequence.cache().footprint();
        // A restore may leave the records of committed tokens, but not those it took back.
        if after.live != before.live || after.records > before.records {
            return Err(sequence.broken(format!(
                "before the checkpoint {before:?}, after restoring {after:?}"
            )));
        }
        sequence.feed(&text(2 + round % 2, 2))?;
        sequence.commit(open)?;
    }
    let (early, late) = most.split_at(12);
    if late.iter().max() > early.iter().max() {
        return Err(sequence.broken(format!(
            "records grow from round to round, though each committed all of them: {most:?}"
        )));
    }
    sequence.feed(&text(1, 1))?;
    match sequence.cache().footprint().records {
        0 => Ok(()),
        records => Err(sequence.broken(format!(
            "{records} bytes of records are left after a call without a checkpoint"
        ))),
    }
}

fn admitted(lab: &Lab<'_>) -> Checked {
    let law = "what admit() accepts can be fed, and what it refuses changes nothing";
    for checkpoint in [false, true] {
        for tokens in [1, 2, 16, 64, 65, 300] {
            let mut sequence = lab.fed(law, &text(0, 4))?;
            let open = checkpoint.then(|| sequence.checkpoint()).transpose()?;
            let block = text(1, tokens);
            if sequence.cache().admit(tokens).is_ok() {
                sequence.feed(&block)?;
            } else {
                sequence.note(format!("offered {tokens}, which admit() refuses"));
                match sequence.try_feed(&block) {
                    Err(Trouble::Refused(_)) => {}
                    Err(Trouble::Broken(detail)) => return Err(sequence.broken(detail)),
                    Ok(()) => return Err(sequence.broken("they were fed all the same")),
                }
            }
            sequence.check_state()?;
            if let Some(open) = open {
                sequence.restore(&open)?;
                sequence.check_state()?;
            }
        }
    }
    Ok(())
}
