//! Messages, and what a template is given of them.

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{json, Map, Value};

use crate::{Error, Result};

/// A message of a conversation, in the chat completions format.
///
/// Reads and writes that format's JSON. Fields it does not know are left out.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// Who speaks: `system`, `user`, `assistant`, `tool`, or what else a template knows.
    pub role: String,
    /// What is said. A null is no text: a template is given an empty one.
    #[serde(default)]
    pub content: Option<Content>,
    /// What an assistant thought before it spoke. Templates drop it from turns that are over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// Functions that an assistant called.
    #[serde(
        default,
        deserialize_with = "none_is_empty",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub tool_calls: Vec<ToolCall>,
    /// The name of the one who speaks, or of the function whose result this is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The call whose result this is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
}

/// What a message says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Content {
    /// A text.
    Text(String),
    /// Parts, read one after the other with nothing between them.
    Parts(Vec<Part>),
}

/// A part of a message. Only those of the type `text` are supported; a conversation with others is refused.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Part {
    /// What it is: `text`, `image_url`, ...
    #[serde(rename = "type")]
    pub kind: String,
    /// Its text, if it is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
}

/// A call of a function.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ToolCall {
    /// By what its result names it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// What it is: `function`.
    #[serde(rename = "type", default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// What is called.
    pub function: Function,
}

/// A function's name, and what it is called with.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// Its arguments: an object, or a string that holds one as JSON, as the chat completions format has it. Templates are
    /// given the object. A null and an empty string are an object without fields.
    #[serde(default)]
    pub arguments: Value,
}

impl Message {
    /// A message of a role with a text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self {
            role: role.into(),
            content: Some(Content::Text(content.into())),
            ..Self::default()
        }
    }

    /// What the model is told of its task.
    pub fn system(content: impl Into<String>) -> Self {
        Self::new("system", content)
    }

    /// What a user says.
    pub fn user(content: impl Into<String>) -> Self {
        Self::new("user", content)
    }

    /// What the model said.
    pub fn assistant(content: impl Into<String>) -> Self {
        Self::new("assistant", content)
    }

    /// What a function gave.
    pub fn tool(content: impl Into<String>) -> Self {
        Self::new("tool", content)
    }

    /// The message as a template is given it.
    pub(super) fn prepared(&self, index: usize) -> Result<Value> {
        let mut fields = Map::new();
        fields.insert("role".into(), self.role.as_str().into());
        fields.insert("content".into(), self.text(index)?.into());
        if let Some(reasoning) = &self.reasoning_content {
            fields.insert("reasoning_content".into(), reasoning.as_str().into());
        }
        if !self.tool_calls.is_empty() {
            let calls = self.tool_calls.iter().enumerate();
            let calls: Result<Vec<Value>> = calls.map(|(at, call)| self.call(index, at, call)).collect();
            fields.insert("tool_calls".into(), calls?.into());
        }
        for (name, value) in [("name", &self.name), ("tool_call_id", &self.tool_call_id)] {
            if let Some(value) = value {
                fields.insert(name.into(), value.as_str().into());
            }
        }
        Ok(fields.into())
    }

    fn text(&self, index: usize) -> Result<String> {
        let parts = match &self.content {
            None => return Ok(String::new()),
            Some(Content::Text(text)) => return Ok(text.clone()),
            Some(Content::Parts(parts)) => parts,
        };
        let mut whole = String::new();
        for (at, part) in parts.iter().enumerate() {
            let reason = match (part.kind.as_str(), &part.text) {
                ("text", Some(text)) => {
                    whole.push_str(text);
                    continue;
                }
                ("text", None) => format!("content[{at}] is a text part without `text`"),
                (other, _) => format!(
                    "content[{at}] is of the type {other:?}; only \"text\" is supported: images, sound and video are not"
                ),
            };
            return Err(self.error(index, reason));
        }
        Ok(whole)
    }

    fn call(&self, index: usize, at: usize, call: &ToolCall) -> Result<Value> {
        let Function { name, arguments } = &call.function;
        let wrong = |found: String| {
            let what = format!("the arguments of tool_calls[{at}] ({name})");
            self.error(
                index,
                format!("{what} are {found}; give a JSON object, or a string that holds one"),
            )
        };
        let parsed = match arguments {
            Value::String(text) if text.trim().is_empty() => Value::Null,
            Value::String(text) => {
                serde_json::from_str(text).map_err(|e| wrong(format!("a string that is no JSON ({e})")))?
            }
            other => other.clone(),
        };
        let arguments = match parsed {
            Value::Object(fields) => fields,
            Value::Null => Map::new(),
            other => return Err(wrong(format!("no JSON object but {}", kind(&other)))),
        };
        let mut fields = Map::new();
        for (name, value) in [("id", &call.id), ("type", &call.kind)] {
            if let Some(value) = value {
                fields.insert(name.into(), value.as_str().into());
            }
        }
        fields.insert("function".into(), json!({ "name": name, "arguments": arguments }));
        Ok(fields.into())
    }

    fn error(&self, index: usize, reason: String) -> Error {
        Error::Message {
            index,
            role: self.role.clone(),
            reason,
        }
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

fn none_is_empty<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Vec<ToolCall>, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}
