//! Conversations as prompts, against what transformers makes of them (`tests/reference/chat.py`).

#[path = "common/chat.rs"]
mod fixtures;

use std::collections::BTreeMap;

use fixtures::{demo, demo_text, golden, messages, options, qwen3, root, template, Result};
use recant::{ChatOptions, ChatTemplate, Content, Message, Text};
use serde_json::{json, Value};
use tempfile::TempDir;

/// A template of one's own, in a folder.
fn template_of(source: &str) -> Result<(TempDir, ChatTemplate)> {
    let dir = TempDir::new()?;
    std::fs::write(dir.path().join("chat_template.jinja"), source)?;
    let template = template(dir.path())?;
    Ok((dir, template))
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
    assert_eq!(compare("qwen3", &template(&folder)?, &text)?, 92);
    Ok(())
}

#[test]
fn the_template_of_the_demo_models_writes_what_transformers_writes() -> Result<()> {
    let text = demo_text()?;
    assert_eq!(compare("demo", &template(&demo())?, &text)?, 92);
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
    let text = demo_text()?;
    assert_eq!(compare("pythonisms", &template(dir.path())?, &text)?, 90);
    Ok(())
}

fn refusal(template: &ChatTemplate, messages: &[Message], options: &ChatOptions) -> Result<String> {
    match template.render(messages, options) {
        Ok(prompt) => Err(format!("was taken: {prompt}").into()),
        Err(error) => Ok(error.to_string()),
    }
}

#[test]
fn c067_arguments_of_tool_calls_may_be_strings_of_json() -> Result<()> {
    let source = "{% for message in messages %}{% for call in message.tool_calls %}{{ call.function.name }}\
                  {% for name, value in call.function.arguments | items %} {{ name }}={{ value | tojson }}{% endfor %};\
                  {% endfor %}{% endfor %}";
    let (_dir, template) = template_of(source)?;
    let conversation = |arguments: Value| {
        messages(&json!([
            { "role": "user", "content": "Weather?" },
            { "role": "assistant", "content": null, "tool_calls": [
                { "id": "1", "type": "function", "function": { "name": "clock", "arguments": {} } },
                { "id": "2", "type": "function", "function": { "name": "weather", "arguments": arguments } },
            ]},
        ]))
    };
    let options = ChatOptions::default();
    for (arguments, want) in [
        (
            json!({ "city": "Paris", "at": [1, 2.0] }),
            r#" city="Paris" at=[1, 2.0]"#,
        ),
        (
            json!(r#"{"city":"Paris","at":[1,2.0]}"#),
            r#" city="Paris" at=[1, 2.0]"#,
        ),
        (json!(null), ""),
        (json!("null"), ""),
        (json!(" "), ""),
        (json!("{}"), ""),
    ] {
        let prompt = template.render(&conversation(arguments)?, &options)?;
        assert_eq!(prompt, format!("clock;weather{want};"));
    }
    for (arguments, found) in [
        (json!("{\"city\": "), "a string that is no JSON"),
        (json!("Paris"), "a string that is no JSON"),
        (json!("[1]"), "no JSON object but an array"),
        (json!(3), "no JSON object but a number"),
    ] {
        let error = refusal(&template, &conversation(arguments)?, &options)?;
        let place = "messages[1] (assistant): the arguments of tool_calls[1] (weather) are ";
        assert!(error.starts_with(&format!("{place}{found}")), "{error}");
    }
    Ok(())
}

#[test]
fn parts_of_text_are_read_in_a_row_and_other_parts_are_refused_by_name() -> Result<()> {
    let template = template(&demo())?;
    let options = ChatOptions::default();
    let text = |text: &str| json!({ "type": "text", "text": text });
    let parts = messages(&json!([{ "role": "user", "content": [text("a "), text("b")] }]))?;
    assert_eq!(
        template.render(&parts, &options)?,
        template.render(&[Message::user("a b")], &options)?
    );
    let image = json!({ "type": "image_url", "image_url": { "url": "data:" } });
    let with_image = messages(&json!([
        { "role": "system", "content": "x" }, { "role": "user", "content": [text("a"), image] }
    ]))?;
    let error = refusal(&template, &with_image, &options)?;
    assert!(
        error.starts_with("messages[1] (user): content[1] is of the type \"image_url\""),
        "{error}"
    );
    let empty = messages(&json!([{ "role": "user", "content": [{ "type": "text" }] }]))?;
    assert!(refusal(&template, &empty, &options)?.contains("content[0] is a text part without `text`"));
    Ok(())
}

#[test]
fn messages_read_and_write_the_json_of_chat_completions() -> Result<()> {
    let written = json!([
        { "role": "system", "content": "Be kind." },
        { "role": "user", "content": [{ "type": "text", "text": "Hi" }], "name": "Ada" },
        { "role": "assistant", "content": null, "reasoning_content": "hm", "tool_calls": [
            { "id": "1", "type": "function", "function": { "name": "f", "arguments": "{}" } }
        ]},
        { "role": "tool", "content": "1", "tool_call_id": "1" },
    ]);
    let read = messages(&written)?;
    assert_eq!(serde_json::to_value(&read)?, written);
    assert_eq!(read[0], Message::system("Be kind."));
    let sparse =
        messages(&json!([{ "role": "assistant", "tool_calls": null, "refusal": null, "audio": 1 }]))?;
    assert_eq!(
        sparse,
        [Message {
            content: None,
            ..Message::assistant("")
        }]
    );
    assert!(messages(&json!([{ "content": "nobody" }])).is_err());
    Ok(())
}

#[test]
fn c092_a_conversation_without_messages_and_options_that_exclude_each_other_are_refused() -> Result<()> {
    let template = template(&demo())?;
    assert!(refusal(&template, &[], &ChatOptions::default())?.contains("no messages"));
    let both = ChatOptions {
        continue_final_message: true,
        ..ChatOptions::default()
    };
    let error = refusal(&template, &[Message::user("a")], &both)?;
    assert!(error.contains("set add_generation_prompt to false"), "{error}");
    let (_dir, hides) = template_of("{{ messages[0].role }}")?;
    let continued = ChatOptions {
        add_generation_prompt: false,
        ..both
    };
    let error = refusal(&hides, &[Message::user("a")], &continued)?;
    assert!(error.contains("does not show the last message"), "{error}");
    let empty = template.render(&[Message::user("")], &ChatOptions::default())?;
    assert_eq!(empty, "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n");
    Ok(())
}

#[test]
fn a_message_is_continued_where_it_ends_whether_the_template_trims_it_or_not() -> Result<()> {
    let options = ChatOptions {
        add_generation_prompt: false,
        continue_final_message: true,
        ..ChatOptions::default()
    };
    let messages = [Message::user("Say it."), Message::assistant(" It is ")];
    let (_dir, keeps) = template_of("{% for m in messages %}[{{ m.content }}]{% endfor %}")?;
    assert_eq!(keeps.render(&messages, &options)?, "[Say it.][ It is ");
    let (_dir, trims) = template_of("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}")?;
    assert_eq!(trims.render(&messages, &options)?, "[Say it.][It is");
    let (_dir, twice) = template_of("{{ messages[-1].content }}/{{ messages[-1].content }}.")?;
    assert_eq!(twice.render(&messages, &options)?, " It is  / It is ");
    Ok(())
}

#[test]
fn c023_with_thinking_off_a_turn_leads_to_the_next_up_to_its_header() -> Result<()> {
    let (template, text) = (template(&demo())?, demo_text()?);
    let options = ChatOptions {
        enable_thinking: Some(false),
        ..ChatOptions::default()
    };
    let question = [Message::user("1 + 1?")];
    let answered = [
        Message::user("1 + 1?"),
        Message::assistant("2"),
        Message::user("2 + 2?"),
    ];
    let first = template.render(&question, &options)?;
    let second = template.render(&answered, &options)?;
    let header = first.strip_suffix("<think>\n\n</think>\n\n").ok_or("thinks")?;
    assert!(second.starts_with(header) && !second.starts_with(&first));
    let (first, second) = (
        template.encode(&text, &question, &options)?,
        template.encode(&text, &answered, &options)?,
    );
    let shared = first.iter().zip(&second).take_while(|(a, b)| a == b).count();
    assert_eq!(shared, text.encode(header)?.len());
    Ok(())
}

#[test]
fn variables_of_ones_own_and_tokens_of_the_configuration_reach_a_template() -> Result<()> {
    let dir = TempDir::new()?;
    let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text);
    write(
        "chat_template.jinja",
        "{{ bos_token }}|{{ eos_token }}|{{ pad_token is defined }}|{{ tools is none }}|{{ documents is none }}|\
         {{ enable_thinking is defined }} {{ enable_thinking }}|{{ preserve_thinking }}|{{ messages | length }}|\
         {{ strftime_now('%Y') | length }}",
    )?;
    write(
        "tokenizer_config.json",
        r#"{"bos_token": {"content": "<s>", "lstrip": false}, "eos_token": "</s>", "pad_token": null}"#,
    )?;
    let template = template(dir.path())?;
    let render = |enable_thinking, extra: &[(&str, Value)]| -> Result<String> {
        let extra = extra
            .iter()
            .map(|(name, value)| ((*name).to_owned(), value.clone()));
        let options = ChatOptions {
            enable_thinking,
            extra: extra.collect::<BTreeMap<_, _>>(),
            ..ChatOptions::default()
        };
        Ok(template.render(&[Message::user("a")], &options)?)
    };
    assert_eq!(render(None, &[])?, "<s>|</s>|False|True|True|False ||1|4");
    let extra = [
        ("preserve_thinking", json!(true)),
        ("bos_token", json!("")),
        ("messages", json!([])),
    ];
    assert_eq!(
        render(Some(false), &extra)?,
        "|</s>|False|True|True|True False|True|1|4"
    );
    assert_eq!(
        render(None, &[("enable_thinking", json!(true))])?,
        "<s>|</s>|False|True|True|True True||1|4"
    );
    Ok(())
}

#[test]
fn the_template_of_a_folder_is_looked_for_in_three_files() -> Result<()> {
    let dir = TempDir::new()?;
    let write = |name: &str, text: String| std::fs::write(dir.path().join(name), text);
    let written = |options: &ChatOptions| -> Result<Option<String>> {
        let template = ChatTemplate::load(dir.path())?;
        let render = |template: ChatTemplate| template.render(&[Message::user("a")], options);
        Ok(template.map(render).transpose()?)
    };
    let (plain, tool) = (
        ChatOptions::default(),
        ChatOptions {
            tools: vec![json!({})],
            ..ChatOptions::default()
        },
    );
    assert_eq!(written(&plain)?, None);
    write(
        "tokenizer_config.json",
        json!({ "chat_template": null }).to_string(),
    )?;
    assert_eq!(written(&plain)?, None);
    write(
        "chat_template.json",
        json!({ "chat_template": "legacy" }).to_string(),
    )?;
    assert_eq!(written(&plain)?.as_deref(), Some("legacy"));
    let named = json!({ "chat_template": [
        { "name": "default", "template": "named" }, { "name": "tool_use", "template": "{{ tools | length }} tool" }
    ]});
    write("tokenizer_config.json", named.to_string())?;
    assert_eq!(written(&plain)?.as_deref(), Some("named"));
    assert_eq!(written(&tool)?.as_deref(), Some("1 tool"));
    write(
        "tokenizer_config.json",
        json!({ "chat_template": "one" }).to_string(),
    )?;
    assert_eq!(written(&tool)?.as_deref(), Some("one"));
    write("chat_template.jinja", "a file\n".to_owned())?;
    assert_eq!(written(&plain)?.as_deref(), Some("a file"));
    Ok(())
}

#[test]
fn templates_that_cannot_be_used_are_refused_with_file_and_place() -> Result<()> {
    let refused = |name: &str, text: &str| -> Result<String> {
        let dir = TempDir::new()?;
        std::fs::write(dir.path().join(name), text)?;
        let error = ChatTemplate::load(dir.path())
            .err()
            .ok_or("was taken")?
            .to_string();
        assert!(error.contains(name), "{error}");
        Ok(error)
    };
    let error = refused("chat_template.jinja", "a\n{% if %}\n")?;
    assert!(error.contains("(in default:2)"), "{error}");
    assert!(refused("tokenizer_config.json", "{")?.contains("is no JSON"));
    let number = r#"{"chat_template": 3}"#;
    assert!(refused("tokenizer_config.json", number)?.contains("neither a string nor a list"));
    let nameless = r#"{"chat_template": [{"template": "a"}]}"#;
    assert!(refused("tokenizer_config.json", nameless)?.contains("lacks `name`"));
    let no_default = r#"{"chat_template": [{"name": "rag", "template": "a"}]}"#;
    assert!(refused("tokenizer_config.json", no_default)?.contains("there are: rag"));
    let dir = TempDir::new()?;
    std::fs::write(dir.path().join("chat_template.jinja"), [0xff, 0xfe])?;
    let error = ChatTemplate::load(dir.path())
        .err()
        .ok_or("was taken")?
        .to_string();
    assert!(error.contains("cannot be read"), "{error}");
    // A file of any length, of which no more is read than any template has.
    std::fs::File::create(dir.path().join("chat_template.jinja"))?.set_len(1 << 40)?;
    let error = ChatTemplate::load(dir.path())
        .err()
        .ok_or("was taken")?
        .to_string();
    assert!(error.contains("longer than 16777216 bytes"), "{error}");
    Ok(())
}

#[test]
fn what_a_template_refuses_is_said_in_its_words_and_what_fails_in_it_with_its_line() -> Result<()> {
    let options = ChatOptions::default();
    let source = "{%- macro check(m) %}{% if m.role == 'ghost' %}{{ raise_exception('No ghosts, ' ~ m.content) }}\
                  {% endif %}{% endmacro %}\n{% for m in messages %}{{ check(m) }}{{ m.content }}{% endfor %}\n{{ 1 + none }}";
    let (_dir, template) = template_of(source)?;
    let error = template.render(&[Message::new("ghost", "boo")], &options);
    assert!(matches!(&error, Err(recant::Error::ChatRefused { message }) if message == "No ghosts, boo"));
    assert_eq!(
        error.err().map(|e| e.to_string()).as_deref(),
        Some("No ghosts, boo")
    );
    let error = refusal(&template, &[Message::user("a")], &options)?;
    assert!(
        error.contains("chat_template.jinja") && error.contains("default:3"),
        "{error}"
    );
    Ok(())
}

#[test]
fn a_template_that_never_ends_or_grows_without_end_is_stopped() -> Result<()> {
    for source in [
        "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(x='crab') %}{% for a in range(9999) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% macro again(n) %}{{ again(n + 1) }}{% endmacro %}{{ again(0) }}",
    ] {
        let (_dir, template) = template_of(source)?;
        let error = refusal(&template, &[Message::user("a")], &ChatOptions::default())?;
        assert!(error.contains("fuel") || error.contains("recursion"), "{error}");
    }
    // A long conversation is far from the limit.
    let turns: Vec<Message> = (0..4000).map(|_| Message::user("word ".repeat(200))).collect();
    assert!(template(&demo())?.render(&turns, &ChatOptions::default())?.len() > 4_000_000);
    Ok(())
}
