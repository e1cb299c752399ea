use std::sync::LazyLock;

use proptest::prelude::*;
use serde_json::{json, Value};

use super::*;

const TOKENIZER: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../examples/models/demo-target/tokenizer.json"
);

/// Ids that stand for 0x80, which starts no character, and for the crab's four bytes.
fn bytes_of(text: &Text) -> (u32, Vec<u32>) {
    // The alphabet of byte-level tokenizers: bytes that show as nothing have characters from 256 up.
    let id = |token: &str| {
        text.tokenizer()
            .token_to_id(token)
            .expect("a token for each byte")
    };
    (id("Ģ"), ["ð", "Ł", "¦", "Ģ"].map(id).to_vec())
}

/// Streams ids, and checks after each that what was given and what is held are the text so far.
fn assert_streams(text: &Text, ids: &[u32]) -> Result<()> {
    let mut stream = TextStream::default();
    let mut given = String::new();
    for end in 1..=ids.len() {
        given.push_str(&stream.push(text, ids[end - 1])?);
        let rest = stream.clone().finish(text)?;
        assert_eq!(
            given.clone() + &rest,
            text.decode(&ids[..end])?,
            "the first {end} of {ids:?}"
        );
        assert!(rest.chars().all(|c| c == BROKEN) && rest.chars().count() <= MOST_HELD);
    }
    Ok(())
}

#[test]
fn c075_characters_cut_across_tokens_come_whole_and_an_incomplete_one_comes_once_at_the_end() -> Result<()> {
    let text = Text::load(TOKENIZER)?;
    let ids = text.encode("  naïve 漢字 🦀🦀! e\u{301}<|im_end|>\n\tx y")?;
    let mut incomplete = 0;
    for end in 0..=ids.len() {
        let mut stream = TextStream::default();
        let mut pieces = String::new();
        for &id in &ids[..end] {
            let piece = stream.push(&text, id)?;
            assert!(
                !piece.contains('\u{fffd}'),
                "a broken character was given: {piece:?}"
            );
            pieces.push_str(&piece);
        }
        let tail = stream.finish(&text)?;
        incomplete += usize::from(tail.contains('\u{fffd}'));
        assert_eq!(
            pieces + &tail,
            text.decode(&ids[..end])?,
            "the first {end} of {ids:?}"
        );
    }
    assert!(incomplete > 4, "no character was cut");
    assert_streams(&text, &ids)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Ids from everywhere: texts, bytes alone, special tokens, ids that stand for nothing.
    #[test]
    fn any_ids_give_what_decoding_them_at_once_gives(
        ids in prop::collection::vec(prop_oneof![0u32..300, 0u32..8300, 8180u32..8200], 0..120)
    ) {
        static TEXT: LazyLock<Text> = LazyLock::new(|| Text::load(TOKENIZER).expect("the demo tokenizer"));
        assert_streams(&TEXT, &ids)?;
    }
}

#[test]
fn broken_bytes_in_any_order_give_what_decoding_them_at_once_gives() -> Result<()> {
    let text = Text::load(TOKENIZER)?;
    let (lone, crab) = bytes_of(&text);
    assert_eq!(text.decode(&crab)?, "🦀");
    let mut state = 1u64;
    for _ in 0..60 {
        let ids: Vec<u32> = (0..90)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                match (state >> 33) % 5 {
                    4 => lone,
                    byte => crab[byte as usize],
                }
            })
            .collect();
        assert_streams(&text, &ids)?;
    }
    Ok(())
}

#[test]
fn each_of_20_000_tokens_reads_few_ids_again_whatever_they_are() -> Result<()> {
    let text = Text::load(TOKENIZER)?;
    let (lone, crab) = bytes_of(&text);
    let end = text.encode("<|endoftext|>")?;
    let prose = text.encode("The crab 🦀 reads on,\n漢字 and all. ")?;
    for (what, ids) in [
        ("prose", &prose),
        ("one special token", &end),
        ("bytes that start no character", &vec![lone]),
        ("characters that stay incomplete", &crab[..3].to_vec()),
        ("no token at all", &vec![1 << 30]),
    ] {
        let ids: Vec<u32> = ids.iter().copied().cycle().take(20_000).collect();
        let mut stream = TextStream::default();
        let (mut given, mut most) = (String::new(), 0);
        let start = std::time::Instant::now();
        for &id in &ids {
            given.push_str(&stream.push(&text, id)?);
            most = most.max(stream.ids.len());
        }
        given.push_str(&stream.finish(&text)?);
        println!("20,000 tokens, {what}: {:?}, {most} ids at most", start.elapsed());
        assert!(most <= 2 * MOST_IDS, "{what}: {most}");
        assert!(given == text.decode(&ids)?, "{what}");
    }
    Ok(())
}

/// A tokenizer whose words start with a space that decoding leaves out at the start of a text.
fn sentence_tokenizer(decoder: Value) -> Result<Text> {
    let tokens = [
        "<unk>", "<0xE6>", "<0xBC>", "<0xA2>", "<0x80>", "▁", "▁the", "▁crab", "s", "!", "▁▁", "a", "",
    ];
    let vocab: serde_json::Map<String, Value> = (0..)
        .zip(tokens)
        .map(|(id, token)| (token.to_owned(), json!(id)))
        .collect();
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": { "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true },
        "post_processor": null, "decoder": decoder,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": vocab, "merges": []
        }
    });
    let dir = tempfile::TempDir::new().expect("a folder");
    let path = dir.path().join("tokenizer.json");
    std::fs::write(&path, file.to_string()).expect("a file");
    Text::load(path)
}

fn decoders() -> [Value; 2] {
    let space = json!({ "String": "▁" });
    [
        json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true }),
        json!({ "type": "Sequence", "decoders": [
            { "type": "Replace", "pattern": space, "content": " " },
            { "type": "ByteFallback" },
            { "type": "Fuse" },
            { "type": "Strip", "content": " ", "start": 1, "stop": 0 },
        ]}),
    ]
}

#[test]
fn a_space_that_decoding_drops_at_the_start_of_a_text_stays_in_its_middle() -> Result<()> {
    for decoder in decoders() {
        let text = sentence_tokenizer(decoder)?;
        for ids in [
            vec![6, 7, 8, 9],
            vec![7, 6, 5, 7, 10, 6],
            vec![11, 6, 6],
            vec![5, 6],
            vec![5, 5, 5, 6, 6],
            vec![10, 10, 7],
            [vec![6], vec![12; 60], vec![7]].concat(),
        ] {
            assert_streams(&text, &ids)?;
        }
    }
    Ok(())
}

#[test]
fn bytes_that_fall_back_come_as_characters_and_broken_ones_stop_no_stream() -> Result<()> {
    let [_, decoder] = decoders();
    let text = sentence_tokenizer(decoder)?;
    // Decoded at once, a broken byte after a character takes the character with it; by then it was given.
    for (ids, want) in [
        (&[6, 1, 2, 3, 7, 1, 2, 3, 1, 2, 3, 11][..], "the漢 crab漢漢a"),
        (&[6, 1, 2, 3, 4, 7], "the漢\u{fffd} crab"),
        (&[6, 1, 2, 3, 1, 2], "the漢\u{fffd}\u{fffd}"),
    ] {
        let mut stream = TextStream::default();
        let mut given = String::new();
        for &id in ids {
            given.push_str(&stream.push(&text, id)?);
        }
        assert_eq!(given + &stream.finish(&text)?, want, "{ids:?}");
    }
    Ok(())
}
