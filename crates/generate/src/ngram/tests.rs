//! Look-up against a search that does it the long way.

use proptest::prelude::*;

use super::*;

/// The longest end of `text` that ended earlier as well, and where it did so last.
fn search(text: &[u32]) -> Option<Found> {
    let now = text.len();
    (1..now)
        .map(|end| {
            let agree = |len: &usize| text[end - 1 - len] == text[now - 1 - len];
            let len = (0..end.min(NgramDrafter::LONGEST)).take_while(agree).count();
            Found { len, end }
        })
        .filter(|found| found.len > 0)
        .max_by_key(|found| (found.len, found.end))
}

/// What followed, token by token, each guess taken for text.
fn continuation(text: &[u32], least: usize, k: usize) -> Vec<u32> {
    let mut longer = text.to_vec();
    if let Some(found) = search(text).filter(|found| found.len >= least) {
        (0..k).for_each(|i| longer.push(longer[found.end + i]));
    }
    longer.split_off(text.len())
}

fn drafter(text: &[u32]) -> NgramDrafter {
    let mut drafter = NgramDrafter::new();
    drafter.push(text);
    drafter
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn every_look_up_finds_what_a_search_finds(
        ids in 1u32..6,
        text in prop::collection::vec(0u32..1000, 1..160),
        least in 1usize..5,
        k in 0usize..9,
    ) {
        let text: Vec<u32> = text.into_iter().map(|x| x % ids).collect();
        let mut drafter = NgramDrafter::new().with_least(least);
        for (i, token) in text.iter().enumerate() {
            drafter.observe(&[*token], None);
            prop_assert_eq!(drafter.found, search(&text[..=i]));
        }
        prop_assert_eq!(drafter.propose(k).unwrap_or_default(), continuation(&text, least, k));
    }

    /// Repetitions longer than what is looked up, with slips between.
    #[test]
    fn long_repetitions_are_found_as_a_search_finds_them(
        period in prop::collection::vec(0u32..3, 1..90),
        slips in prop::collection::vec(0usize..400, 0..4),
    ) {
        let mut text: Vec<u32> = period.iter().copied().cycle().take(400).collect();
        slips.iter().for_each(|&at| text[at] = 7);
        let mut drafter = NgramDrafter::new();
        for (i, token) in text.iter().enumerate() {
            drafter.observe(&[*token], None);
            prop_assert_eq!(drafter.found, search(&text[..=i]));
        }
    }
}

#[test]
fn what_followed_the_most_recent_occurrence_is_proposed() -> Result<()> {
    let mut drafter = drafter(&[1, 2, 3, 4, 9, 1, 2, 3, 5, 8, 1, 2, 3]);
    assert_eq!(drafter.propose(4)?, [5, 8, 1, 2]);
    assert_eq!(drafter.propose(4)?, [5, 8, 1, 2], "asking changes nothing");
    drafter.observe(&[4], None);
    assert_eq!(
        drafter.propose(2)?,
        [9, 1],
        "a longer occurrence goes before a recent one"
    );
    Ok(())
}

#[test]
fn a_text_that_repeats_itself_is_expected_to_go_on() -> Result<()> {
    assert_eq!(drafter(&[5, 6, 5, 6, 5]).propose(5)?, [6, 5, 6, 5, 6]);
    assert_eq!(drafter(&[8; 300]).propose(3)?, [8, 8, 8]);
    Ok(())
}

#[test]
fn short_repetitions_do_not_count() -> Result<()> {
    for (least, proposals) in [(1, 2), (2, 2), (3, 0), (4, 0)] {
        let mut drafter = NgramDrafter::new().with_least(least);
        drafter.prefill(&[1, 2, 3, 4, 1, 2], None)?;
        assert_eq!(drafter.propose(2)?.len(), proposals, "least {least}");
    }
    assert_eq!(NgramDrafter::new().with_least(0).least, 1);
    assert_eq!(NgramDrafter::new().with_least(1000).least, NgramDrafter::LONGEST);
    Ok(())
}

#[test]
fn a_proposal_ends_before_an_id_that_may_not_be_proposed() -> Result<()> {
    let mut drafter = drafter(&[1, 2, 3, 4, 9, 5, 1, 2, 3]);
    drafter.vocab = 9;
    assert_eq!(drafter.propose(5)?, [4]);
    Ok(())
}

#[test]
fn a_reset_forgets_everything() -> Result<()> {
    let mut used = drafter(&[1, 2, 3, 1, 2, 3]);
    used.reset();
    assert_eq!(used.propose(3)?, [0u32; 0]);
    used.push(&[1, 2, 3, 7, 1, 2, 3]);
    assert_eq!(used.propose(2)?, [7, 1]);
    assert_eq!(
        used.ends.nodes.len(),
        drafter(&[1, 2, 3, 7, 1, 2, 3]).ends.nodes.len()
    );
    Ok(())
}

#[test]
fn memory_is_linear_in_texts_of_a_hundred_thousand_tokens() {
    let mut state = 1u64;
    let mut random = move |below: u64| {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        ((state >> 33) % below) as u32
    };
    let texts: [Box<dyn FnMut(usize) -> u32>; 5] = [
        Box::new(|_| 3),
        Box::new(|i| (i % 1000) as u32),
        Box::new(|i| i as u32),
        Box::new(|i| (i.trailing_zeros() % 2) + u32::from(i % 7 == 0)),
        Box::new(move |_| random(50)),
    ];
    for (which, mut token) in texts.into_iter().enumerate() {
        let mut drafter = NgramDrafter::new();
        for i in 0..100_000 {
            drafter.push(&[token(i)]);
        }
        let tokens = drafter.text.len();
        assert!(drafter.ends.nodes.len() <= 2 * tokens + 1, "text {which}");
        assert!(drafter.ends.children.len() <= 2 * tokens, "text {which}");
        // A table entry is twelve bytes and one of bookkeeping, in a table that is at least 7/16 full.
        let bytes = drafter.ends.children.capacity() * 8 / 7 * 13
            + drafter.ends.nodes.capacity() * size_of::<Node>()
            + drafter.text.capacity() * size_of::<u32>();
        assert!(bytes < 150 * tokens, "text {which}: {bytes} bytes");
    }
}
