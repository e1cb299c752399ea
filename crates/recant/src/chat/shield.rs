//! What people wrote, kept apart from what a template writes.

use std::collections::{BTreeMap, HashSet};

use serde_json::{Map, Value};

use crate::text::Part;
use crate::{Error, Result, Text};

/// Characters that no standard gives a meaning.
fn private() -> impl Iterator<Item = char> {
    ('\u{f0000}'..='\u{ffffd}').chain('\u{100000}'..='\u{10fffd}')
}

/// Private characters that are used nowhere yet.
#[derive(Debug, Default)]
pub(super) struct Unused(HashSet<char>);

impl Unused {
    /// Takes note of a text's characters.
    pub(super) fn note(&mut self, text: &str) {
        self.0.extend(text.chars().filter(|&c| c >= '\u{f0000}'));
    }

    /// Takes note of all strings in a value.
    pub(super) fn note_value(&mut self, value: &Value) {
        match value {
            Value::String(text) => self.note(text),
            Value::Array(items) => items.iter().for_each(|item| self.note_value(item)),
            Value::Object(fields) => {
                for (name, field) in fields {
                    self.note(name);
                    self.note_value(field);
                }
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }

    /// One of them, which is then used.
    pub(super) fn take(&mut self) -> Result<char> {
        let free = private().find(|c| !self.0.contains(c));
        let free = free.ok_or_else(|| Error::Conversation {
            reason: "the conversation uses every private character of Unicode; leave one out".to_owned(),
        })?;
        self.0.insert(free);
        Ok(free)
    }
}

/// Which added tokens are plain text where they are written out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Guard {
    /// All.
    All,
    /// Special ones. Others, such as `<think>`, are part of the text that models and those who instruct them write.
    Special,
}

impl Guard {
    /// That of a role's messages.
    pub(super) fn of(role: &str) -> Self {
        match role {
            "system" | "developer" | "assistant" => Self::Special,
            _ => Self::All,
        }
    }
}

/// Puts one private character in the place of each added token that was written out, so that a template sees none, and
/// back.
pub(super) struct Shield<'a> {
    text: &'a Text,
    unused: Unused,
    written: BTreeMap<String, char>,
}

impl<'a> Shield<'a> {
    pub(super) fn new(text: &'a Text, unused: Unused) -> Self {
        Self {
            text,
            unused,
            written: BTreeMap::new(),
        }
    }

    /// Characters for other uses.
    pub(super) fn unused(&mut self) -> &mut Unused {
        &mut self.unused
    }

    /// Shields all strings in a value, the names of fields too.
    pub(super) fn value(&mut self, value: &mut Value, guard: Guard) -> Result<()> {
        match value {
            Value::String(text) => *text = self.string(text, guard)?,
            Value::Array(items) => {
                for item in items {
                    self.value(item, guard)?;
                }
            }
            Value::Object(fields) => {
                let mut shielded = Map::new();
                for (name, mut field) in std::mem::take(fields) {
                    self.value(&mut field, guard)?;
                    shielded.insert(self.string(&name, guard)?, field);
                }
                *fields = shielded;
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
        Ok(())
    }

    fn string(&mut self, text: &str, guard: Guard) -> Result<String> {
        let mut shielded = String::new();
        for part in self.text.parts(text) {
            match part {
                Part::Added { special, written, .. } if special || guard == Guard::All => {
                    shielded.push(self.stand_in(written)?);
                }
                Part::Added { written, .. } | Part::Plain(written) => shielded.push_str(written),
            }
        }
        Ok(shielded)
    }

    fn stand_in(&mut self, written: &str) -> Result<char> {
        if let Some(&stand_in) = self.written.get(written) {
            return Ok(stand_in);
        }
        let stand_in = self.unused.take()?;
        self.written.insert(written.to_owned(), stand_in);
        Ok(stand_in)
    }

    /// The ids of a text that a template wrote: what is shielded in it is plain text.
    pub(super) fn encode(&self, rendered: &str) -> Result<Vec<u32>> {
        if self.written.is_empty() {
            return self.text.encode(rendered);
        }
        let mut ids = Vec::new();
        for part in self.text.parts(rendered) {
            match part {
                Part::Added { id, .. } => ids.push(id),
                Part::Plain(plain) => ids.extend(self.text.encode_plain(&self.uncovered(plain))?),
            }
        }
        Ok(ids)
    }

    fn uncovered(&self, text: &str) -> String {
        let mut uncovered = text.to_owned();
        for (written, &stand_in) in &self.written {
            uncovered = uncovered.replace(stand_in, written);
        }
        uncovered
    }
}
