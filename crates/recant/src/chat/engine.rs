//! The template engine, set up as transformers sets up Jinja.

use std::time::SystemTime;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{escape_formatter, AutoEscape, Environment, Error, ErrorKind, Value};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::python;

/// What one rendering may cost, in steps and in pieces of 64 bytes: thousands of turns cost a tenth, a template that never
/// ends or doubles its text without end is stopped.
const FUEL: u64 = 10_000_000;

/// A template's own words against a conversation, by `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Raised(pub(super) String);

/// An engine without templates.
pub(super) fn new() -> Result<Environment<'static>, Error> {
    let mut engine = Environment::new();
    engine.set_syntax(
        SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()?,
    );
    engine.set_auto_escape_callback(|_| AutoEscape::None);
    engine.set_unknown_method_callback(|state, value, method, arguments| {
        match (value.as_str(), arguments) {
            (Some(text), []) => strip(text, method).map(Value::from),
            _ => None,
        }
        .map_or_else(|| unknown_method_callback(state, value, method, arguments), Ok)
    });
    engine.set_fuel(Some(FUEL));
    engine.set_formatter(|out, state, value| match float(value) {
        Some(number) => out.write_str(&number).map_err(Error::from),
        None => escape_formatter(out, state, value),
    });
    engine.add_filter("string", |value: &Value| {
        float(value).unwrap_or_else(|| value.to_string())
    });
    engine.add_filter("trim", |value: &Value, characters: Option<String>| {
        let text = value.to_string();
        match characters {
            None => text.trim_matches(is_space).to_owned(),
            Some(characters) => text.trim_matches(|c| characters.contains(c)).to_owned(),
        }
    });
    engine.add_filter("tojson", |value: &Value, options: Kwargs| {
        python::tojson(value, options)
    });
    engine.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, "raised by the template").with_source(Raised(message)))
    });
    engine.add_function("strftime_now", |format: String| {
        python::strftime(SystemTime::now(), &format)
    });
    Ok(engine)
}

/// Python's `strip` and its kin without arguments.
fn strip<'a>(text: &'a str, method: &str) -> Option<&'a str> {
    match method {
        "strip" => Some(text.trim_matches(is_space)),
        "lstrip" => Some(text.trim_start_matches(is_space)),
        "rstrip" => Some(text.trim_end_matches(is_space)),
        _ => None,
    }
}

/// What Python takes for a space: four separators more than Unicode.
fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

fn float(value: &Value) -> Option<String> {
    if value.kind() != ValueKind::Number || value.is_integer() {
        return None;
    }
    f64::try_from(value.clone()).ok().map(python::float)
}
