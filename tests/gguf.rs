//! GGUF files against what they were converted from: logits, tokens, texts, heads.
//!
//! Small files, and the demo target in the type that most files in use have, are in tests/golden/gguf. The demo target in other types
//! is looked for in target/reference/gguf; tests/reference/to_gguf.py writes both.

mod common;
#[path = "common/gguf.rs"]
mod file;

use std::path::{Path, PathBuf};

use common::{assert_same, bits, feed, load, relative_error, text_ids, Result, Rng};
use file::{text, File, Value};
use recant::candle::{safetensors, Device, Tensor};
use recant::core::{Cache, CacheOptions, Hidden, LanguageModel, Rows, Segment};
use recant::{
    ActivationPrecision, ChatOptions, ChatTemplate, LoadOptions, Loaded, Message, Session, Text, Threads,
};
use recant_weights::Folder;
use tempfile::TempDir;

/// As in `parity.rs`.
const TOLERANCE: f32 = 1e-5;

/// Most that the rounding of weights to a type does to the logits of the demo target on a text: the largest absolute difference
/// over the largest magnitude, half as much again as was measured (in the order below 5.9e-7, 0.0064, 0.019, 0.038, 0.038, 0.038,
/// 0.052, 0.061, 0.067, 0.069, 0.074, 0.083, 0.10, 0.22). It is a property of the type and the model; that files are read without loss
/// is tested on blocks, in crates/weights.
const TYPES: [(&str, f32); 14] = [
    ("f16", TOLERANCE),
    ("q8_0", 0.01),
    ("q6_k", 0.03),
    ("q5_k_m", 0.06),
    ("q5_1", 0.06),
    ("q5_0", 0.06),
    ("q4_k_m", 0.08),
    ("q4_k_s", 0.1),
    ("iq4_nl", 0.1),
    ("iq4_xs", 0.1),
    ("q4_1", 0.12),
    ("q4_0", 0.12),
    ("q3_k_m", 0.15),
    ("q2_k", 0.3),
];

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/golden/gguf")
        .join(name)
}

/// A larger file, or a printed line that says which test did not run and why.
fn large(test: &str, name: &str) -> Option<PathBuf> {
    let reference = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../target/reference/gguf")
        .join(name);
    for path in [golden(name), reference] {
        if path.exists() {
            return Some(path);
        }
    }
    println!("SKIPPED {test}: there is no target/reference/gguf/{name}; see tests/reference/to_gguf.py");
    None
}

/// A model whose activations are not rounded.
fn exact(path: &Path) -> Result<Loaded> {
    let options = LoadOptions {
        activations: ActivationPrecision::Full,
        ..LoadOptions::default()
    };
    Ok(recant::load_with(path, &options, &mut |_, _| {})?)
}

fn logits(model: &dyn LanguageModel, ids: &[u32]) -> Result<Tensor> {
    let mut caches = model.new_caches(&CacheOptions::default())?;
    let output = model.forward(&mut [Segment::new(ids, &mut caches, Rows::All)])?;
    Ok(output.segments[0].logits()?.clone())
}

/// Logits of a tiny model against those that transformers gives for what was converted, its weights rounded as in the file.
fn agrees(name: &str, kind: &str) -> Result<()> {
    let loaded = exact(&golden(&format!("{name}.{kind}.gguf")))?;
    let golden = safetensors::load(golden(&format!("{name}.safetensors")), &Device::Cpu)?;
    let tokens = golden["tokens"].to_vec1::<i32>()?;
    let ids: Vec<u32> = tokens.into_iter().map(i32::cast_unsigned).collect();
    let error = relative_error(&logits(&**loaded.model(), &ids)?, &golden[kind])?;
    println!("{name} {kind}: {error:.1e}");
    assert!(error < TOLERANCE, "{name} {kind}: {error}");
    Ok(())
}

/// sglang#38363, vLLM-2080Ti-Definitive#107, ik_llama.cpp#1654.
#[test]
fn two_value_heads_a_key_head_agree_with_what_was_converted() -> Result<()> {
    agrees("dense-r2", "f16")?;
    agrees("dense-r2", "q8_0")
}

/// sglang#36864: experts, and a gate of the shared one that is a vector.
#[test]
fn three_value_heads_a_key_head_and_experts_agree_with_what_was_converted() -> Result<()> {
    agrees("moe-r3", "f16")?;
    agrees("moe-r3", "q8_0")
}

#[test]
fn projections_that_the_converter_took_apart_agree_with_what_was_converted() -> Result<()> {
    agrees("next-r2", "f16")
}

#[test]
fn fused_projections_of_earlier_converters_are_the_same_model() -> Result<()> {
    let ids = random_ids(40, 256);
    let of = |name: &str| -> Result<_> { bits(&logits(&**exact(&golden(name))?.model(), &ids)?) };
    assert!(of("next-r2-old.f16.gguf")? == of("next-r2.f16.gguf")?);
    Ok(())
}

#[test]
fn experts_that_the_converter_fused_are_the_same_model() -> Result<()> {
    let ids = random_ids(40, 256);
    let of = |name: &str| -> Result<_> { bits(&logits(&**exact(&golden(name))?.model(), &ids)?) };
    assert!(of("moe-r3-fused.q8_0.gguf")? == of("moe-r3.q8_0.gguf")?);
    Ok(())
}

#[test]
fn the_demo_target_in_every_type_is_close_to_the_folder_it_was_made_of() -> Result<()> {
    let ids = text_ids(200)?;
    let hub = logits(&**load("demo-target")?.model(), &ids)?;
    for (kind, tolerance) in TYPES {
        let name = format!("demo-target.{kind}.gguf");
        let Some(path) = large("the demo target against its folder", &name) else {
            continue;
        };
        let found = logits(&**exact(&path)?.model(), &ids)?;
        let error = relative_error(&found, &hub)?;
        let same = best(&found)?
            .iter()
            .zip(best(&hub)?)
            .filter(|(a, b)| *a == b)
            .count();
        println!("{kind}: {error:.1e}, {same} of {} choices", ids.len());
        assert!(error < tolerance, "{kind}: {error}");
    }
    Ok(())
}

fn best(logits: &Tensor) -> Result<Vec<u32>> {
    Ok(logits.argmax(1)?.to_vec1()?)
}

/// Files, and how many tokens of what vocabulary are fed.
fn files(test: &str) -> Vec<(PathBuf, u32)> {
    let small = ["dense-r2.q8_0.gguf", "moe-r3.q8_0.gguf", "next-r2.f16.gguf"];
    let mut files: Vec<(PathBuf, u32)> = small.iter().map(|name| (golden(name), 256)).collect();
    let demo = ["q4_k_m", "q2_k", "iq4_xs", "q5_1"];
    files.extend(
        demo.iter()
            .filter_map(|kind| large(test, &format!("demo-target.{kind}.gguf")))
            .map(|path| (path, 8000)),
    );
    files
}

fn random_ids(count: usize, below: u32) -> Vec<u32> {
    let mut rng = Rng(3);
    (0..count).map(|_| rng.below(below as usize) as u32).collect()
}

#[test]
fn logits_and_caches_do_not_depend_on_grouping_or_threads() -> Result<()> {
    let mut rng = Rng(17);
    for (path, below) in files("the grouping law") {
        let model = recant::load(&path)?.model().clone();
        let ids = random_ids(120, below);
        let mut whole = model.new_caches(&CacheOptions::default())?;
        let expected = feed(&*model, &mut whole, &ids)?;
        for threads in [1, 3] {
            let threads = Threads::new(threads)?;
            let mut caches = model.new_caches(&CacheOptions::default())?;
            let (mut at, mut found) = (0, Vec::new());
            for piece in rng.partition(ids.len(), 9) {
                let rows = threads.run(|| {
                    let rows = feed(&*model, &mut caches, &ids[at..at + piece]);
                    rows.map_err(|error| error.to_string())
                })?;
                found.extend(rows);
                at += piece;
            }
            assert!(found == expected, "{}", path.display());
            assert_same(&path.display().to_string(), &whole, &caches)?;
        }
    }
    Ok(())
}

#[test]
fn tokens_that_are_taken_back_were_never_fed() -> Result<()> {
    for (path, below) in files("taking back") {
        let model = recant::load(&path)?.model().clone();
        let ids = random_ids(40, below);
        let mut plain = model.new_caches(&CacheOptions::default())?;
        feed(&*model, &mut plain, &ids)?;
        let mut caches = model.new_caches(&CacheOptions::default())?;
        let mut rng = Rng(5);
        let mut at = 0;
        while at < ids.len() {
            let take = (1 + rng.below(5)).min(ids.len() - at);
            let wrong = random_ids(rng.below(4), below);
            let checkpoint = caches.checkpoint()?;
            feed(&*model, &mut caches, &[&ids[at..at + take], &wrong].concat())?;
            caches.trim(wrong.len())?;
            caches.commit(checkpoint);
            at += take;
        }
        assert_same(&path.display().to_string(), &plain, &caches)?;
    }
    Ok(())
}

#[test]
fn the_head_of_a_file_drafts_and_changes_nothing() -> Result<()> {
    let demo = large("a head's drafts", "demo-target.q4_k_m.gguf");
    let small = ["dense-r2.q8_0.gguf", "moe-r3.f16.gguf", "next-r2.f16.gguf"];
    for path in small.iter().map(|name| golden(name)).chain(demo) {
        let loaded = recant::load(&path)?;
        assert!(loaded.has_mtp(), "{}", path.display());
        let mut plain = loaded.session().ignore_eos(true).build()?;
        let expected = continued(&mut plain, "abc abab", 40)?;
        let mut session = loaded.session().mtp().ignore_eos(true).build()?;
        assert_eq!(
            continued(&mut session, "abc abab", 40)?,
            expected,
            "{}",
            path.display()
        );
        assert!(session.stats().rounds > 0);
    }
    Ok(())
}

fn continued(session: &mut Session, prompt: &str, tokens: usize) -> Result<Vec<u32>> {
    session.start(prompt)?;
    for event in session.generate(tokens) {
        event?;
    }
    Ok(session.tokens().to_vec())
}

/// No output test can see a head that is read wrongly; how often it agrees with its target can.
#[test]
fn the_demo_targets_head_agrees_as_often_as_in_its_folder() -> Result<()> {
    let Some(path) = large("the demo target's head", "demo-target.f16.gguf") else {
        return Ok(());
    };
    let check = |loaded: &Loaded| -> Result<_> {
        let session = loaded.session().mtp().mtp_hidden(Hidden::PostNorm).build()?;
        let check = session.head_check().ok_or("no check")?.clone();
        assert_eq!(check.complaint(), None);
        Ok(check.agreement)
    };
    assert_eq!(check(&recant::load(path)?)?, check(&load("demo-target")?)?);
    Ok(())
}

#[test]
fn a_model_in_parts_is_the_model_in_one_file() -> Result<()> {
    let (Some(whole), Some(part)) = (
        large("parts", "demo-target.f16.gguf"),
        large("parts", "demo-target-split-00002-of-00004.gguf"),
    ) else {
        return Ok(());
    };
    let ids = text_ids(40)?;
    let of = |path: &Path| -> Result<_> { bits(&logits(&**recant::load(path)?.model(), &ids)?) };
    assert!(of(&whole)? == of(&part)?);
    Ok(())
}

const TEXTS: [&str; 8] = [
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
    "<|im_start|>user\nHello<|im_end|>\n<think>\n</think>\n\n",
    "e\u{301}a caf\u{e9} cafe\u{301}",
    "\u{939}\u{93f}\u{928}\u{94d}\u{926}\u{940} \u{e20}\u{e32}\u{e29}\u{e32}\u{e44}\u{e17}\u{e22}",
    "  leading,\ttabs \r\n\r\n and   trailing   ",
    "1234567 3.14 it's WE'LL",
    "\u{1f980}\u{6f22}\u{5b57}",
    "",
];

#[test]
fn the_vocabulary_of_the_demo_target_gives_the_ids_of_its_tokenizer() -> Result<()> {
    let (file, hub) = (
        recant::load(golden("demo-target.q4_k_m.gguf"))?,
        load("demo-target")?,
    );
    for text in TEXTS {
        let ids = hub.text().encode(text)?;
        assert_eq!(file.text().encode(text)?, ids, "{text:?}");
        assert_eq!(file.text().decode(&ids)?, hub.text().decode(&ids)?, "{text:?}");
    }
    assert_eq!(file.text().assigned(), hub.text().assigned());
    file.text().check_draft(hub.text())?;
    assert_eq!(file.eos(), hub.eos());
    let messages = [Message::system("Be kind."), Message::user("Hi<|im_end|>")];
    let options = ChatOptions {
        enable_thinking: Some(false),
        ..ChatOptions::default()
    };
    assert_eq!(
        file.chat()?.render(&messages, &options)?,
        hub.chat()?.render(&messages, &options)?
    );
    assert_eq!(
        file.chat()?.encode(file.text(), &messages, &options)?,
        hub.chat()?.encode(hub.text(), &messages, &options)?
    );
    Ok(())
}

/// A vocabulary of some tokens, the first of them all bytes that are written as themselves.
fn vocabulary(pre: &str, more: &[(&str, i32)], merges: &[&str]) -> Result<(TempDir, Folder)> {
    let mut tokens: Vec<String> = ('!'..='~').map(String::from).collect();
    // Of marks: the bytes of U+093F and U+0915, as vocabularies write them.
    tokens.extend(['\u{e0}', '\u{a4}', '\u{bf}', '\u{137}', '\u{120}'].map(String::from));
    let mut kinds = vec![1; tokens.len()];
    for (token, kind) in more {
        tokens.push((*token).to_owned());
        kinds.push(*kind);
    }
    let mut file = File::model();
    file.set("tokenizer.ggml.pre", text(pre));
    file.set("tokenizer.ggml.tokens", Value::Texts(tokens));
    file.set("tokenizer.ggml.token_type", Value::I32s(kinds));
    file.set(
        "tokenizer.ggml.merges",
        Value::Texts(merges.iter().map(|m| (*m).to_owned()).collect()),
    );
    let dir = TempDir::new()?;
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, file.bytes())?;
    let folder = Folder::open(path)?;
    Ok((dir, folder))
}

fn pieces(text: &Text, of: &str) -> Result<Vec<String>> {
    let ids = text.encode(of)?;
    Ok(ids
        .iter()
        .map(|id| text.tokenizer().id_to_token(*id).unwrap_or_default())
        .collect())
}

/// transformers#49008.
#[test]
fn tokens_of_control_and_of_users_are_both_single_ids() -> Result<()> {
    let (_dir, folder) = vocabulary("qwen35", &[("<|im_end|>", 3), ("<think>", 4), ("[PAD]", 5)], &[])?;
    let text = Text::of(&folder)?;
    assert_eq!(
        pieces(&text, "a<think>b<|im_end|>")?,
        ["a", "<think>", "b", "<|im_end|>"]
    );
    // A user's token is shown, one of control is not, and a row that is unused is no token.
    assert_eq!(text.decode(&text.encode("a<think>b<|im_end|>")?)?, "a<think>b");
    assert_eq!(pieces(&text, "[PAD]")?.len(), 5);
    assert_eq!(text.assigned(), 101);
    Ok(())
}

/// surogate#105, onnxruntime-extensions#1063.
#[test]
fn marks_are_letters_to_qwen3_5_and_not_to_qwen2() -> Result<()> {
    // "a", then the three bytes of a vowel sign, which only merge within one piece.
    let merges = ["\u{e0} \u{a4}", "\u{e0}\u{a4} \u{bf}", "a \u{e0}\u{a4}\u{bf}"];
    let more = [
        ("\u{e0}\u{a4}", 1),
        ("\u{e0}\u{a4}\u{bf}", 1),
        ("a\u{e0}\u{a4}\u{bf}", 1),
    ];
    for (pre, expected) in [("qwen35", 1), ("qwen2", 2)] {
        let (_dir, folder) = vocabulary(pre, &more, &merges)?;
        assert_eq!(pieces(&Text::of(&folder)?, "a\u{93f}")?.len(), expected, "{pre}");
    }
    Ok(())
}

#[test]
fn vocabularies_that_no_tokenizer_can_be_made_of_are_named() -> Result<()> {
    let reason = |folder: &Folder| Text::of(folder).err().map(|e| e.to_string()).unwrap_or_default();
    let (_dir, folder) = vocabulary("qwen35", &[("a", 1)], &[])?;
    let said = reason(&folder);
    assert!(
        said.contains("model.gguf") && said.contains("\"a\" is in the vocabulary twice"),
        "{said}"
    );
    let (_dir, folder) = vocabulary("qwen35", &[], &["a b"])?;
    let said = reason(&folder);
    assert!(said.contains("model.gguf") && said.contains("ab"), "{said}");
    Ok(())
}

#[test]
fn a_file_of_one_number_each_loads_by_its_folder_and_shows_its_template() -> Result<()> {
    let dir = TempDir::new()?;
    std::fs::write(dir.path().join("a.gguf"), File::model().bytes())?;
    let loaded = recant::load(dir.path())?;
    assert_eq!(loaded.path(), dir.path().join("a.gguf"));
    assert_eq!(loaded.eos(), [3]);
    let template: &ChatTemplate = loaded.chat()?;
    assert_eq!(
        template.render(&[Message::user("ab")], &ChatOptions::default())?,
        "ab<|im_end|>"
    );
    assert_eq!(loaded.text().encode("ab")?, [2]);
    Ok(())
}

#[test]
fn a_head_alone_is_refused_as_a_model() -> Result<()> {
    let mut file = File::model();
    file.tensors
        .retain(|tensor| !tensor.name.starts_with("blk.0.") && !tensor.name.starts_with("blk.1."));
    let dir = TempDir::new()?;
    let path = dir.path().join("mtp-a.gguf");
    std::fs::write(&path, file.bytes())?;
    let error = recant::load(&path)
        .err()
        .map(|e| e.to_string())
        .unwrap_or_default();
    assert!(error.contains("mtp_from"), "{error}");
    // It drafts for the whole model.
    std::fs::write(dir.path().join("whole.gguf"), File::model().bytes())?;
    let target = recant::load(dir.path().join("whole.gguf"))?;
    let mut session = target.session().mtp_from(&path).ignore_eos(true).build()?;
    let mut plain = target.session().ignore_eos(true).build()?;
    assert_eq!(continued(&mut session, "ab", 5)?, continued(&mut plain, "ab", 5)?);
    Ok(())
}
