use minijinja::{context, Environment};

use super::*;

#[test]
fn floats_are_written_as_repr_writes_them() {
    for (value, want) in [
        (0.0, "0.0"),
        (-0.0, "-0.0"),
        (1.0, "1.0"),
        (-2.5, "-2.5"),
        (0.1, "0.1"),
        (1e-4, "0.0001"),
        (1.5e-5, "1.5e-05"),
        (1e15, "1000000000000000.0"),
        (123_456_789_012_345_680.0, "1.2345678901234568e+17"),
        (1e16, "1e+16"),
        (-1e100, "-1e+100"),
        (5e-324, "5e-324"),
        (f64::MAX, "1.7976931348623157e+308"),
        (f64::INFINITY, "inf"),
        (f64::NEG_INFINITY, "-inf"),
        (f64::NAN, "nan"),
    ] {
        assert_eq!(float(value), want);
    }
}

fn rendered(template: &str) -> String {
    let mut engine = Environment::new();
    engine.add_filter("tojson", |value: &Value, options: Kwargs| tojson(value, options));
    let rendered = engine.render_str(template, context! {});
    rendered.unwrap_or_else(|error| error.to_string())
}

#[test]
fn json_is_written_as_dumps_writes_it() {
    for (template, want) in [
        (
            "{{ {'b': [1, 2.0, none, true], 'a': {}} | tojson }}",
            r#"{"b": [1, 2.0, null, true], "a": {}}"#,
        ),
        ("{{ [] | tojson(indent=2) }}", "[]"),
        (
            "{{ [1, {'a': []}] | tojson(indent=1) }}",
            "[\n 1,\n {\n  \"a\": []\n }\n]",
        ),
        ("{{ [1, 2] | tojson(indent='--') }}", "[\n--1,\n--2\n]"),
        (
            "{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}",
            r#"{"a": 2, "b": 1}"#,
        ),
        (
            "{{ [1, {'a': 2}] | tojson(separators=[',', ':']) }}",
            r#"[1,{"a":2}]"#,
        ),
        (
            "{{ {1: 2, none: 3, false: 4} | tojson }}",
            r#"{"1": 2, "null": 3, "false": 4}"#,
        ),
        ("{{ 'é<&\\'>🦀\\n' | tojson }}", "\"é<&'>🦀\\n\""),
        (
            "{{ 'é🦀' | tojson(ensure_ascii=true) }}",
            "\"\\u00e9\\ud83e\\udd80\"",
        ),
    ] {
        assert_eq!(rendered(template), want, "{template}");
    }
    let mut control = Json {
        out: String::new(),
        depth: 0,
        indent: None,
        item: String::new(),
        key: String::new(),
        sort: false,
        ascii: false,
    };
    control.string("\u{0}\u{8}\t\n\u{b}\u{c}\r\u{1f}\u{7f}\"\\/");
    assert_eq!(
        control.out,
        "\"\\u0000\\b\\t\\n\\u000b\\f\\r\\u001f\u{7f}\\\"\\\\/\""
    );
    assert!(rendered("{{ nothing | tojson }}").contains("undefined is no JSON"));
    assert!(rendered("{{ 1 | tojson(width=3) }}").contains("width"));
}

#[test]
fn times_are_written_as_strftime_writes_them() {
    let at = |seconds: u64, format: &str| {
        let written = strftime(UNIX_EPOCH + Duration::from_secs(seconds), format);
        written.unwrap_or_else(|error| error.to_string())
    };
    // A leap day, and the last second of a year.
    assert_eq!(
        at(
            1_709_210_096,
            "%Y-%m-%d %H:%M:%S %A %a %B %b %j %y %p %I %Z %z %%"
        ),
        "2024-02-29 12:34:56 Thursday Thu February Feb 060 24 PM 12 UTC +0000 %"
    );
    assert_eq!(
        at(1_798_761_599, "%F %T, %-d %b, day %-j"),
        "2026-12-31 23:59:59, 31 Dec, day 365"
    );
    assert_eq!(at(0, "%d %-d %I %p %A"), "01 1 12 AM Thursday");
    assert_eq!(at(951_782_400, "%F"), "2000-02-29");
    assert_eq!(at(4_107_542_400, "%F %j"), "2100-03-01 060");
    assert!(at(0, "%Q").contains("directive 'Q'"));
    assert!(at(0, "100%").contains("directive nothing"));
}
