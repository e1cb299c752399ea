//! Rounds that end early: by an error, a panic, a dropped guard or a cache that refuses.

use std::panic::{catch_unwind, AssertUnwindSafe};

use recant_core::{
    Cache, CacheOptions, CacheStack, Error, LanguageModel, Result, Rows, Segment, Snapshot, Transaction,
};
use recant_testkit::{Fault, Harm, Place, ScriptedModel};

fn feed(model: &ScriptedModel, stack: &mut CacheStack, tokens: &[u32]) -> Result<()> {
    model
        .forward(&mut [Segment::new(tokens, stack, Rows::All)])
        .map(drop)
}

/// The state after `tokens`, fed in one call to new caches.
fn cold(model: &ScriptedModel, tokens: &[u32]) -> Result<Snapshot> {
    let mut stack = model.new_caches(&CacheOptions::default())?;
    feed(model, &mut stack, tokens)?;
    stack.snapshot()
}

fn assert_same(found: &CacheStack, expected: &Snapshot, what: &str) -> Result<()> {
    assert_eq!(found.snapshot()?.difference(expected), None, "{what}");
    Ok(())
}

#[test]
fn c001_every_number_of_accepted_tokens_leaves_exactly_those() -> Result<()> {
    let model = ScriptedModel::new(1, 32);
    let mut stack = model.new_caches(&CacheOptions::default())?;
    let mut text: Vec<u32> = (0..12).map(|i| (7 * i + 3) % 32).collect();
    feed(&model, &mut stack, &text)?;
    for accepted in [0, 1, 2, 3, 4, 0, 4, 1] {
        let mut round = Transaction::begin(&mut stack)?;
        let block: Vec<u32> = (0..5).map(|i| (text.len() as u32 * 3 + i) % 32).collect();
        feed(&model, round.cache(), &block)?;
        assert_eq!(round.fed(), 5);
        round.keep(accepted + 1)?;
        text.extend(&block[..=accepted]);
        assert_same(&stack, &cold(&model, &text)?, "after a round")?;
    }
    Ok(())
}

#[test]
fn a_dropped_round_is_as_though_it_had_not_been() -> Result<()> {
    let model = ScriptedModel::new(1, 32);
    let mut stack = model.new_caches(&CacheOptions::default())?;
    feed(&model, &mut stack, &[1, 2, 3])?;
    for tokens in [1, 2, 9] {
        let mut round = Transaction::begin(&mut stack)?;
        feed(&model, round.cache(), &vec![7; tokens])?;
        drop(round);
        assert_same(&stack, &cold(&model, &[1, 2, 3])?, "after a dropped round")?;
    }
    // No checkpoint was left open.
    let open = stack.checkpoint()?;
    stack.commit(open);
    Ok(())
}

#[test]
fn c012_errors_and_panics_anywhere_in_a_round_bring_the_checkpoint_back() -> Result<()> {
    for harm in [Harm::Error, Harm::Panic] {
        for place in [Place::Before, Place::Kernel, Place::Middle, Place::After] {
            // In the first call of a round after one that was committed, and in the second.
            for late in [0, 1] {
                let fault = Fault {
                    forward: 2 + late,
                    place,
                    harm,
                };
                let model = ScriptedModel::new(1, 32).with_fault(fault);
                let mut stack = model.new_caches(&CacheOptions::default())?;
                feed(&model, &mut stack, &[1, 2, 3])?;
                let mut round = Transaction::begin(&mut stack)?;
                feed(&model, round.cache(), &[4, 5, 6])?;
                round.keep(2)?;

                let result = catch_unwind(AssertUnwindSafe(|| -> Result<()> {
                    let mut round = Transaction::begin(&mut stack)?;
                    for _ in 0..=late {
                        feed(&model, round.cache(), &[7, 8])?;
                    }
                    round.keep(1)
                }));
                let what = format!("{harm:?}, {place:?}, call {late}");
                match (harm, &result) {
                    (Harm::Error, Ok(Err(Error::Other(_)))) | (Harm::Panic, Err(_)) => {}
                    _ => panic!("{what}: {:?}", result.map_err(|_| "a panic")),
                }
                // Cut off by a panic while committed records were folded in: the one case that cannot be undone.
                if harm == Harm::Panic && place == Place::Kernel && late == 0 {
                    let torn = stack.snapshot();
                    assert!(
                        matches!(&torn, Err(Error::Layer { layer: 0, source, .. }) if matches!(**source, Error::Torn { .. })),
                        "{torn:?}"
                    );
                    assert!(stack.checkpoint().is_err() && feed(&model, &mut stack, &[7]).is_err());
                    assert_eq!(stack.trimmable(), 0);
                    stack.load(&cold(&model, &[1, 2, 3, 4, 5])?)?;
                }
                assert_same(&stack, &cold(&model, &[1, 2, 3, 4, 5])?, &what)?;
                feed(&model, &mut stack, &[9])?;
                assert_same(&stack, &cold(&model, &[1, 2, 3, 4, 5, 9])?, &what)?;
            }
        }
    }
    Ok(())
}

#[test]
fn keeping_more_than_was_fed_is_refused_and_takes_all_back() -> Result<()> {
    let model = ScriptedModel::new(1, 32);
    let mut stack = model.new_caches(&CacheOptions::default())?;
    feed(&model, &mut stack, &[1, 2, 3])?;
    let mut round = Transaction::begin(&mut stack)?;
    feed(&model, round.cache(), &[4, 5])?;
    assert!(matches!(round.keep(3), Err(Error::Checkpoint(_))));
    assert_same(&stack, &cold(&model, &[1, 2, 3])?, "after a refused keep")
}

#[test]
fn c009_a_round_that_feeds_nothing_is_nothing() -> Result<()> {
    let model = ScriptedModel::new(1, 32);
    let mut stack = model.new_caches(&CacheOptions::default())?;
    feed(&model, &mut stack, &[1, 2, 3])?;
    for block in [&[] as &[u32], &[], &[4], &[], &[5, 6, 7]] {
        let mut round = Transaction::begin(&mut stack)?;
        if !block.is_empty() {
            feed(&model, round.cache(), block)?;
        }
        round.keep(block.len())?;
    }
    assert_same(
        &stack,
        &cold(&model, &[1, 2, 3, 4, 5, 6, 7])?,
        "after five rounds",
    )
}

#[test]
fn a_round_inside_a_round_is_refused_and_leaves_the_outer_one_open() -> Result<()> {
    let model = ScriptedModel::new(1, 32);
    let mut stack = model.new_caches(&CacheOptions::default())?;
    let mut round = Transaction::begin(&mut stack)?;
    feed(&model, round.cache(), &[1, 2])?;
    let nested = Transaction::begin(round.cache()).map(drop);
    assert!(matches!(nested, Err(Error::Checkpoint(_))), "{nested:?}");
    round.keep(1)?;
    assert_same(&stack, &cold(&model, &[1])?, "after the outer round")
}

#[test]
fn a_round_wider_than_the_records_is_refused_before_any_layer_changes() -> Result<()> {
    let model = ScriptedModel::new(1, 32);
    let options = CacheOptions {
        record_limit: 4,
        ..CacheOptions::default()
    };
    let mut stack = model.new_caches(&options)?;
    feed(&model, &mut stack, &[1, 2, 3])?;
    let mut round = Transaction::begin(&mut stack)?;
    feed(&model, round.cache(), &[4, 5, 6])?;
    let refusal = feed(&model, round.cache(), &[7, 8]);
    let Err(Error::Layer { layer: 0, source, .. }) = &refusal else {
        panic!("{refusal:?}");
    };
    assert!(matches!(
        **source,
        Error::RecordLimit {
            asked: 2,
            held: 3,
            limit: 4
        }
    ));
    assert_eq!(round.fed(), 3);
    round.keep(3)?;
    assert_same(&stack, &cold(&model, &[1, 2, 3, 4, 5, 6])?, "after the refusal")
}
