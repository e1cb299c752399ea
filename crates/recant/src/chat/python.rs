//! How Python writes what templates show.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};

/// A float as `repr` writes it: the shortest digits that read as the same number, with an exponent from 1e16 up and
/// below 1e-4.
pub(super) fn float(value: f64) -> String {
    if !value.is_finite() {
        return if value.is_nan() {
            "nan"
        } else if value > 0.0 {
            "inf"
        } else {
            "-inf"
        }
        .to_owned();
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if value == 0.0 || (-4..16).contains(&exponent) {
        return format!("{value:?}");
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

/// The `tojson` filter of chat templates, which is `json.dumps` that leaves other alphabets as they are.
pub(super) fn tojson(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent = match options.get::<Option<Value>>("indent")? {
        Some(indent) if !indent.is_none() => Some(match indent.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(usize::try_from(indent)?.min(64)),
        }),
        _ => None,
    };
    let (item, key) = match options.get::<Option<Vec<String>>>("separators")?.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(invalid("separators are two strings")),
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
    };
    let mut json = Json {
        out: String::new(),
        depth: 0,
        indent,
        item,
        key,
        sort: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    json.value(value)?;
    Ok(json.out)
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

struct Json {
    out: String,
    depth: usize,
    indent: Option<String>,
    item: String,
    key: String,
    sort: bool,
    ascii: bool,
}

impl Json {
    fn value(&mut self, value: &Value) -> Result<(), Error> {
        match value.kind() {
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.container('[', ']', &items, |json, item| json.value(item))?;
            }
            ValueKind::Map => {
                let mut fields = Vec::new();
                for key in value.try_iter()? {
                    let field = value.get_item(&key)?;
                    fields.push((name(&key)?, field));
                }
                if self.sort {
                    fields.sort_by(|a, b| a.0.cmp(&b.0));
                }
                self.container('{', '}', &fields, |json, (name, field)| {
                    json.string(name);
                    let separator = json.key.clone();
                    json.out.push_str(&separator);
                    json.value(field)
                })?;
            }
            _ => {
                let scalar = scalar(value)?;
                self.out.push_str(&scalar);
            }
        }
        Ok(())
    }

    fn container<T>(
        &mut self,
        open: char,
        close: char,
        items: &[T],
        mut write: impl FnMut(&mut Self, &T) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push(open);
        self.depth += 1;
        for (at, item) in items.iter().enumerate() {
            if at > 0 {
                let separator = self.item.clone();
                self.out.push_str(&separator);
            }
            self.line();
            write(self, item)?;
        }
        self.depth -= 1;
        if !items.is_empty() {
            self.line();
        }
        self.out.push(close);
        Ok(())
    }

    fn line(&mut self) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            self.out.push_str(&indent.repeat(self.depth));
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' || (self.ascii && c > '~') => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        self.out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

fn scalar(value: &Value) -> Result<String, Error> {
    match value.kind() {
        ValueKind::None => Ok("null".to_owned()),
        ValueKind::Bool => Ok(if value.is_true() { "true" } else { "false" }.to_owned()),
        ValueKind::Number if value.is_integer() => Ok(value.to_string()),
        ValueKind::Number => {
            let number = f64::try_from(value.clone())?;
            Ok(match float(number).as_str() {
                "inf" => "Infinity".to_owned(),
                "-inf" => "-Infinity".to_owned(),
                "nan" => "NaN".to_owned(),
                number => number.to_owned(),
            })
        }
        other => Err(invalid(format!("a value of the kind {other} is no JSON"))),
    }
}

fn name(key: &Value) -> Result<String, Error> {
    match key.as_str() {
        Some(name) => Ok(name.to_owned()),
        None => scalar(key),
    }
}

const DAYS: [&str; 7] = [
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
];

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// The time in UTC as `strftime` writes it. Of its directives, those are known whose text does not depend on a language
/// other than English; `-` after the `%` leaves out leading zeros.
pub(super) fn strftime(now: SystemTime, format: &str) -> Result<String, Error> {
    let since = now.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs();
    let (days, second) = (since / 86_400, since % 86_400);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let (year, month, day) = civil(days);
    let weekday = DAYS[((days + 4) % 7) as usize];
    let month_name = MONTHS[month as usize - 1];
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = chars.next();
        let bare = directive == Some('-');
        if bare {
            directive = chars.next();
        }
        let number = |value: u64, width: usize| {
            let width = if bare { 0 } else { width };
            format!("{value:0width$}")
        };
        out.push_str(&match directive {
            Some('Y') => year.to_string(),
            Some('y') => number(year % 100, 2),
            Some('m') => number(month, 2),
            Some('d') => number(day, 2),
            Some('j') => number(days - days_before(year) + 1, 3),
            Some('H') => number(hour, 2),
            Some('I') => number((hour + 11) % 12 + 1, 2),
            Some('M') => number(minute, 2),
            Some('S') => number(second, 2),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('A') => weekday.to_owned(),
            Some('a') => weekday[..3].to_owned(),
            Some('B') => month_name.to_owned(),
            Some('b') => month_name[..3].to_owned(),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('Z') => "UTC".to_owned(),
            Some('z') => "+0000".to_owned(),
            Some('%') => "%".to_owned(),
            other => {
                let other = other.map_or("nothing".to_owned(), |c| format!("{c:?}"));
                return Err(invalid(format!(
                    "strftime_now does not know the directive {other} after %"
                )));
            }
        });
    }
    Ok(out)
}

/// Days from 1970 to the start of a year from then on.
fn days_before(year: u64) -> u64 {
    let years = year - 1;
    365 * (year - 1970) + (years / 4 - years / 100 + years / 400) - 477
}

/// Year, month and day of a number of days since 1970.
fn civil(days: u64) -> (u64, u64, u64) {
    let mut year = 1970 + days / 366;
    while days_before(year + 1) <= days {
        year += 1;
    }
    let leap = days_before(year + 1) - days_before(year) == 366;
    let mut left = days - days_before(year);
    let lengths = [
        31,
        if leap { 29 } else { 28 },
        31,
        30,
        31,
        30,
        31,
        31,
        30,
        31,
        30,
        31,
    ];
    let mut month = 0;
    while left >= lengths[month] {
        left -= lengths[month];
        month += 1;
    }
    (year, month as u64 + 1, left + 1)
}

#[cfg(test)]
mod tests;
