//! `config.json` of the family with experts: what it adds to the dense one's. What all families share is tested with that.

use recant_layers::{Config, FeedForward, LayerKind, Tie};
use recant_qwen3_5_moe::Qwen35Moe;
use serde_json::{json, Value};

fn text() -> Value {
    json!({
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "vocab_size": 256,
        "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    })
}

/// The text part with one field set.
fn with(name: &str, value: Value) -> Value {
    let mut text = text();
    text[name] = value;
    text
}

fn nested(text: Value) -> Value {
    json!({"model_type": "qwen3_5_moe", "text_config": text})
}

#[track_caller]
fn read(config: &Value) -> Config {
    Config::from_json(&Qwen35Moe, config, None).unwrap_or_else(|error| panic!("refused: {error}"))
}

#[track_caller]
fn refused_with(text: Value, parts: &[&str]) {
    for (config, place) in [(text.clone(), ""), (nested(text), "text_config.")] {
        let message = match Config::from_json(&Qwen35Moe, &config, None) {
            Ok(config) => panic!("accepted: {config:?}"),
            Err(error) => error.to_string(),
        };
        for part in parts {
            assert!(message.contains(part), "{part:?} is not in: {message}");
        }
        assert!(
            message.contains(&format!("{place}{}", parts[0])),
            "no path in: {message}"
        );
    }
}

#[test]
fn every_layer_is_a_mixture() {
    let config = read(&text());
    assert_eq!(config, read(&nested(text())));
    assert_eq!(config.feed_forward.len(), 4);
    for feed_forward in config.feed_forward {
        let FeedForward::Sparse { shape, shared_width } = feed_forward else {
            panic!("{feed_forward:?}");
        };
        assert_eq!((shape.hidden_size, shape.width, shared_width), (64, 24, 40));
        assert_eq!((shape.experts, shape.top_k, shape.renormalize), (8, 2, true));
    }
}

#[test]
fn the_trained_model_beside_the_repository_is_read_without_a_warning() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/models/moe");
    if !path.is_dir() {
        println!(
            "SKIPPED reading of the trained mixture: there is no ../shared/models/moe beside the repository"
        );
        return;
    }
    let json = |file: &str| -> Value {
        let text = std::fs::read(path.join(file)).expect("a file");
        serde_json::from_slice(&text).expect("JSON")
    };
    let (config, generation) = (json("config.json"), json("generation_config.json"));
    let config = Config::from_json(&Qwen35Moe, &config, Some(&generation)).expect("a configuration");
    assert!(config.warnings.is_empty(), "{:?}", config.warnings);
    assert_eq!(config.layer_kinds[3], LayerKind::Full);
    assert_eq!(config.tie, Tie::Untied);
    assert_eq!(config.feed_forward.len(), 8);
}

#[test]
fn c060_more_experts_a_token_than_there_are_is_refused() {
    refused_with(
        with("num_experts_per_tok", json!(9)),
        &["num_experts_per_tok is 9", "num_experts is 8"],
    );
    let all = with("num_experts_per_tok", json!(8));
    assert!(Config::from_json(&Qwen35Moe, &all, None).is_ok());
}

#[test]
fn c060_every_size_of_a_mixture_is_missed_by_name() {
    for name in [
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
    ] {
        refused_with(with(name, json!(null)), &[name, "missing"]);
        refused_with(with(name, json!(0)), &[name, "is 0"]);
        refused_with(with(name, json!("8")), &[name, "\"8\"", "whole number"]);
        refused_with(with(name, json!(-1)), &[name, "-1"]);
        refused_with(with(name, json!(2.5)), &[name, "2.5"]);
        refused_with(with(name, json!(u64::MAX)), &[name, "18446744073709551615"]);
    }
}

#[test]
fn experts_that_no_machine_can_hold_are_refused() {
    let mut config = text();
    for name in ["num_experts", "moe_intermediate_size", "hidden_size"] {
        config[name] = json!(1 << 24);
    }
    refused_with(config, &["num_experts x 2 moe_intermediate_size", "elements"]);
    let mut config = text();
    for name in ["shared_expert_intermediate_size", "hidden_size"] {
        config[name] = json!(1 << 24);
    }
    refused_with(config, &["shared_expert_intermediate_size", "elements"]);
}

#[test]
fn norm_topk_prob_is_true_unless_it_says_false() {
    for (value, want) in [(json!(null), true), (json!(true), true), (json!(false), false)] {
        let config = read(&with("norm_topk_prob", value));
        let FeedForward::Sparse { shape, .. } = config.feed_forward[0] else {
            panic!("dense");
        };
        assert_eq!(shape.renormalize, want);
    }
    refused_with(
        with("norm_topk_prob", json!(1)),
        &["norm_topk_prob", "true or false"],
    );
}

#[test]
fn an_intermediate_size_is_not_needed_and_not_read() {
    for value in [json!(null), json!(96), json!("wide")] {
        assert_eq!(read(&with("intermediate_size", value)), read(&text()));
    }
}

#[test]
fn other_families_are_refused_with_a_list_of_what_is_taken() {
    for kind in ["qwen3_5", "qwen3_next", "qwen4_exp", ""] {
        let error = Config::from_json(&Qwen35Moe, &with("model_type", json!(kind)), None);
        let message = error.expect_err("another family").to_string();
        assert!(
            message.contains(&format!("{kind:?}")) && message.contains("qwen3_5_moe, qwen3_5_moe_text"),
            "{message}"
        );
    }
}
