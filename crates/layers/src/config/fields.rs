//! Reading fields of a JSON object, with their paths for messages.

use serde_json::{Map, Value};

use super::ConfigError;

/// Characters of a string shown in a message.
const SHOWN_CHARS: usize = 80;

type Result<T> = std::result::Result<T, ConfigError>;

/// Bound on a width, a number of rows or a count of either, far above any real model's. With bounds on products it keeps a
/// corrupt file from asking for absurd allocations.
const MAX_WIDTH: usize = 1 << 24;

/// An object of a configuration. A null counts as absent everywhere.
#[derive(Debug, Clone)]
pub struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// What goes before a field's name in a message.
    prefix: String,
}

impl<'a> Fields<'a> {
    /// The root object of a file.
    pub(super) fn root(file: &str, value: &'a Value, prefix: &str) -> Result<Self> {
        match value {
            Value::Object(map) => Ok(Self {
                map,
                prefix: prefix.to_owned(),
            }),
            other => Err(ConfigError::Value {
                field: file.to_owned(),
                found: shown(other),
                expected: "a JSON object".to_owned(),
            }),
        }
    }

    /// A field's path in the file.
    pub fn path(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// A field's value.
    pub(super) fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    /// An object inside this one.
    pub(super) fn object(&self, name: &str) -> Result<Option<Self>> {
        let map = self.read(name, "a JSON object", Value::as_object)?;
        Ok(map.map(|map| Self {
            map,
            prefix: format!("{}.", self.path(name)),
        }))
    }

    fn read<T>(
        &self,
        name: &str,
        expected: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        match self.get(name) {
            None => Ok(None),
            Some(value) => read(value)
                .map(Some)
                .ok_or_else(|| self.wrong(name, value, expected)),
        }
    }

    /// A value error for a field.
    pub(super) fn wrong(&self, name: &str, found: &Value, expected: &str) -> ConfigError {
        ConfigError::Value {
            field: self.path(name),
            found: shown(found),
            expected: expected.to_owned(),
        }
    }

    /// A refusal of what a field asks for.
    pub fn unsupported(&self, name: &str, expected: &str) -> ConfigError {
        ConfigError::Unsupported {
            field: self.path(name),
            found: shown(self.get(name).unwrap_or(&Value::Null)),
            expected: expected.to_owned(),
        }
    }

    /// The error of a field that has to be there.
    pub(super) fn missing(&self, name: &str, expected: impl Into<String>) -> ConfigError {
        ConfigError::Missing {
            field: self.path(name),
            expected: expected.into(),
        }
    }

    /// A whole number within bounds, both included.
    pub fn size(&self, name: &str, min: usize, max: usize) -> Result<Option<usize>> {
        self.read(name, &format!("a whole number from {min} to {max}"), |value| {
            let size = usize::try_from(value.as_u64()?).ok()?;
            (min..=max).contains(&size).then_some(size)
        })
    }

    /// A whole number within bounds that must be there.
    pub fn required_size(&self, name: &str, min: usize, max: usize) -> Result<usize> {
        self.size(name, min, max)?
            .ok_or_else(|| self.missing(name, format!("a whole number from {min} to {max}")))
    }

    /// The width of a matrix, or how many there are of a thing, from `min` up to a bound that no model reaches.
    pub fn width(&self, name: &str, min: usize) -> Result<Option<usize>> {
        self.size(name, min, MAX_WIDTH)
    }

    /// [`width`](Self::width) that must be there.
    pub fn required_width(&self, name: &str, min: usize) -> Result<usize> {
        self.required_size(name, min, MAX_WIDTH)
    }

    /// Indices of layers, all below `layers`. Empty where absent.
    pub fn layers(&self, name: &str, layers: usize) -> Result<Vec<usize>> {
        let expected = format!("a list of layers from 0 to {}", layers.saturating_sub(1));
        let index = |value: &Value| {
            let index = usize::try_from(value.as_u64()?).ok()?;
            (index < layers).then_some(index)
        };
        let list = self.read(name, &expected, Value::as_array)?;
        let found = list.into_iter().flatten().enumerate().map(|(i, value)| {
            index(value).ok_or_else(|| self.wrong(&format!("{name}[{i}]"), value, &expected))
        });
        found.collect()
    }

    /// True or false.
    pub fn flag(&self, name: &str) -> Result<Option<bool>> {
        self.read(name, "true or false", Value::as_bool)
    }

    /// A string.
    pub(super) fn text(&self, name: &str) -> Result<Option<&'a str>> {
        self.read(name, "a string", Value::as_str)
    }

    /// A finite number above 0 and at most `max`.
    pub(super) fn positive(&self, name: &str, max: f64) -> Result<Option<f64>> {
        self.read(name, &format!("a number above 0 and at most {max}"), |value| {
            value.as_f64().filter(|x| *x > 0.0 && *x <= max)
        })
    }

    /// Token ids: a number, or a list of numbers. Empty where absent.
    pub(super) fn token_ids(&self, name: &str) -> Result<Vec<u32>> {
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let ids = self.read(name, "a token id or a list of token ids", |value| match value {
            Value::Array(list) => list.iter().map(id).collect::<Option<Vec<u32>>>(),
            single => id(single).map(|id| vec![id]),
        })?;
        Ok(ids.unwrap_or_default())
    }
}

/// A value for a message: what kind it is, and the value itself where it is short.
pub(super) fn shown(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(flag) => flag.to_string(),
        Value::Number(number) => number.to_string(),
        Value::String(text) => {
            let more = if text.chars().nth(SHOWN_CHARS).is_some() {
                "..."
            } else {
                ""
            };
            format!("{:?}{more}", text.chars().take(SHOWN_CHARS).collect::<String>())
        }
        Value::Array(list) => format!("a list of {}", list.len()),
        Value::Object(_) => "an object".to_owned(),
    }
}
