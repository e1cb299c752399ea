use std::sync::LazyLock;

use proptest::prelude::*;

use super::*;

const TOKENIZER: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../examples/models/demo-target/tokenizer.json"
);

fn strings(stops: &[&str]) -> Vec<String> {
    stops.iter().map(|stop| (*stop).to_owned()).collect()
}

/// Where the text ends, by looking at all of it: at the match whose last character is first, the longest of those.
fn end_of(text: &str, stops: &[String]) -> Option<usize> {
    (1..=text.len()).find_map(|end| {
        let ending = stops
            .iter()
            .filter(|stop| text.as_bytes()[..end].ends_with(stop.as_bytes()));
        ending.map(String::len).max().map(|longest| end - longest)
    })
}

/// Bytes at the end of a text that a stop string begins with.
fn beginning(text: &str, stops: &[String]) -> usize {
    let begins = |held: &usize| {
        let held = &text.as_bytes()[text.len() - held..];
        stops.iter().any(|stop| stop.as_bytes().starts_with(held))
    };
    (0..=text.len()).rev().find(begins).unwrap_or(0)
}

/// Feeds pieces, and checks after each that everything was given that no stop string can begin in.
fn assert_stops(pieces: &[&str], stops: &[String]) {
    let mut matcher = StopMatcher::new(stops.to_vec()).expect("no stop string is empty");
    let (mut text, mut given) = (String::new(), String::new());
    for piece in pieces {
        text.push_str(piece);
        given.push_str(&matcher.push(piece));
        let end = end_of(&text, stops);
        assert_eq!(matcher.stopped, end.is_some(), "{text:?} {stops:?}");
        let shown = end.unwrap_or_else(|| text.len() - beginning(&text, stops));
        assert_eq!(given, text[..shown], "{text:?} {stops:?}");
    }
}

proptest! {
    /// Stop strings are taken out of the text itself, between any two characters, broken ones too.
    #[test]
    fn any_tokens_give_their_text_up_to_the_first_stop_string(
        ids in prop::collection::vec(prop_oneof![0u32..300, 0u32..8200], 1..60),
        cuts in prop::collection::vec((any::<prop::sample::Index>(), 1usize..8), 0..3),
    ) {
        static TEXT: LazyLock<Text> = LazyLock::new(|| Text::load(TOKENIZER).expect("the demo tokenizer"));
        let whole = TEXT.decode(&ids)?;
        let characters: Vec<char> = whole.chars().collect();
        let stops: Vec<String> = cuts
            .into_iter()
            .filter(|_| !characters.is_empty())
            .map(|(from, length)| characters[from.index(characters.len())..].iter().take(length).collect())
            .collect();
        let mut output = TextOutput::new(stops.clone())?;
        let mut given = String::new();
        for id in ids {
            let piece = output.push(&TEXT, id)?;
            given.push_str(&piece.text);
            if piece.stopped {
                break;
            }
        }
        given.push_str(&output.finish(&TEXT)?);
        prop_assert_eq!(&given, &whole[..end_of(&whole, &stops).unwrap_or(whole.len())]);
    }

    #[test]
    fn any_cut_gives_the_text_up_to_the_first_stop_string(
        pieces in prop::collection::vec("[abé🦀]{0,4}", 0..12),
        stops in prop::collection::vec("[abé🦀]{1,5}", 0..4),
    ) {
        assert_stops(&pieces.iter().map(String::as_str).collect::<Vec<_>>(), &stops);
    }
}

#[test]
fn c076_a_stop_string_across_tokens_is_seen_wherever_it_is_cut() {
    let stops = strings(&["beta gam"]);
    assert_stops(&["alpha be", "ta gam", "ma"], &stops);
    let text = "alpha beta gamma";
    for first in 0..=text.len() {
        for second in first..=text.len() {
            assert_stops(&[&text[..first], &text[first..second], &text[second..]], &stops);
        }
    }
    for pieces in [&["xabc"][..], &["x", "a", "b", "c"], &["xab", "c"], &["xa", "bc"]] {
        for stops in [["ab", "abc"], ["abc", "ab"], ["abc", "c"], ["bc", "abc"]] {
            assert_stops(pieces, &strings(&stops));
        }
    }
    let mut both = StopMatcher::new(strings(&["b", "ab"])).expect("no stop string is empty");
    assert_eq!((both.push("xa"), both.push("b")), ("x".to_owned(), String::new()));
}

/// What a text's ids give: the pieces, whether it stopped, and what came at the end.
fn output(stops: &[&str], ids: &[u32]) -> Result<(String, bool, String)> {
    let text = Text::load(TOKENIZER)?;
    let mut output = TextOutput::new(strings(stops))?;
    let (mut given, mut stopped) = (String::new(), false);
    for &id in ids {
        let piece = output.push(&text, id)?;
        assert!(
            !stopped
                || piece
                    == Piece {
                        text: String::new(),
                        stopped: true
                    }
        );
        given.push_str(&piece.text);
        stopped = piece.stopped;
    }
    let mut copy = output.clone();
    let last = output.finish(&text)?;
    assert_eq!(copy.finish(&text)?, last);
    Ok((given, stopped, last))
}

#[test]
fn a_stop_string_of_one_character_cut_over_its_bytes_stops_before_any_of_them() -> Result<()> {
    let text = Text::load(TOKENIZER)?;
    let ids = text.encode("On, 漢🦀 off")?;
    assert!(text.encode("🦀")?.len() > 1, "the character is one token");
    let stopped = |given: &str| (given.to_owned(), true, String::new());
    assert_eq!(output(&["🦀"], &ids)?, stopped("On, 漢"));
    assert_eq!(output(&["漢🦀 o"], &ids)?, stopped("On, "));
    assert_eq!(output(&["🦁", "🦀"], &ids)?, stopped("On, 漢"));
    // Another character that starts with the same bytes is held no longer than it is incomplete.
    assert_eq!(
        output(&["🦁"], &ids)?,
        ("On, 漢🦀 off".to_owned(), false, String::new())
    );
    Ok(())
}

#[test]
fn c077_text_that_was_held_as_a_possible_stop_string_is_given_at_the_end() -> Result<()> {
    let ids = Text::load(TOKENIZER)?.encode("once more xy")?;
    assert_eq!(
        output(&["xyz"], &ids)?,
        ("once more ".to_owned(), false, "xy".to_owned())
    );
    assert_eq!(output(&["once more xyz"], &ids)?.2, "once more xy");
    assert_eq!(
        output(&[], &ids)?,
        ("once more xy".to_owned(), false, String::new())
    );
    // A broken character at the end may complete a stop string too.
    let crab = Text::load(TOKENIZER)?.encode("🦀")?;
    assert_eq!(output(&[], &crab[..1])?.2, "\u{fffd}");
    assert_eq!(output(&["\u{fffd}"], &crab[..1])?.2, "");
    Ok(())
}

#[test]
fn a_clone_goes_on_as_the_original_would_have() -> Result<()> {
    let text = Text::load(TOKENIZER)?;
    let ids = text.encode("a 🦀 be\nta gamma 🦀🦀 beta gamma")?;
    let whole = output(&["beta gam"], &ids)?;
    for at in 0..ids.len() {
        let mut first = TextOutput::new(strings(&["beta gam"]))?;
        let mut given = String::new();
        for &id in &ids[..at] {
            given.push_str(&first.push(&text, id)?.text);
        }
        let mut copy = first.clone();
        // What the original sees meanwhile is nothing to the copy.
        first.push(&text, ids[0])?;
        for &id in &ids[at..] {
            given.push_str(&copy.push(&text, id)?.text);
        }
        assert_eq!(
            (given, copy.finish(&text)?),
            (whole.0.clone(), whole.2.clone()),
            "{at}"
        );
    }
    Ok(())
}

#[test]
fn c095_an_empty_stop_string_is_refused_by_its_place() {
    let error = TextOutput::new(strings(&["a", ""]))
        .map(drop)
        .map_err(|e| e.to_string());
    assert!(
        error
            .as_ref()
            .is_err_and(|e| e.contains("stop string 1 ") && e.contains("is empty")),
        "{error:?}"
    );
}
