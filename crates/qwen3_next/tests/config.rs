//! `config.json` of Qwen3-Next: which layers have experts. What all families share is tested with the dense one.

use recant_layers::{Config, FeedForward};
use recant_qwen3_next::Qwen3Next;
use serde_json::{json, Value};

fn config() -> Value {
    json!({
        "model_type": "qwen3_next",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "vocab_size": 256,
        "max_position_embeddings": 1024,
        "rope_theta": 1e7,
        "rope_scaling": null,
        "partial_rotary_factor": 0.25,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "norm_topk_prob": true,
    })
}

fn with(fields: &[(&str, Value)]) -> Value {
    let mut config = config();
    for (name, value) in fields {
        config[name] = value.clone();
    }
    config
}

#[track_caller]
fn read(config: &Value) -> Config {
    Config::from_json(&Qwen3Next, config, None).unwrap_or_else(|error| panic!("refused: {error}"))
}

#[track_caller]
fn refused_with(config: &Value, parts: &[&str]) {
    let error = Config::from_json(&Qwen3Next, config, None).expect_err("a bad configuration");
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
}

/// Layers that have experts.
fn sparse(config: &Value) -> Vec<usize> {
    let is_sparse = |feed_forward: &FeedForward| matches!(feed_forward, FeedForward::Sparse { .. });
    let read = read(config);
    assert_eq!(read.feed_forward.len(), 8);
    (0..8)
        .filter(|layer| is_sparse(&read.feed_forward[*layer]))
        .collect()
}

#[test]
fn every_layer_is_a_mixture_unless_fields_say_otherwise() {
    let all: Vec<usize> = (0..8).collect();
    assert_eq!(sparse(&config()), all);
    let published = [("decoder_sparse_step", json!(1)), ("mlp_only_layers", json!([]))];
    assert_eq!(sparse(&with(&published)), all);
    assert_eq!(sparse(&with(&[("decoder_sparse_step", json!(2))])), [1, 3, 5, 7]);
    assert_eq!(sparse(&with(&[("decoder_sparse_step", json!(3))])), [2, 5]);
    assert_eq!(
        sparse(&with(&[("mlp_only_layers", json!([0, 7]))])),
        [1, 2, 3, 4, 5, 6]
    );
    let both = [
        ("decoder_sparse_step", json!(2)),
        ("mlp_only_layers", json!([3, 4])),
    ];
    assert_eq!(sparse(&with(&both)), [1, 5, 7]);
    assert!(sparse(&with(&[("num_experts", json!(0))])).is_empty());
}

#[test]
fn layers_without_experts_are_as_wide_as_intermediate_size() {
    let read = read(&with(&[("mlp_only_layers", json!([2]))]));
    assert_eq!(read.feed_forward[2], FeedForward::Dense { width: 96 });
}

#[test]
fn sizes_that_no_layer_needs_may_be_missing() {
    let wide = with(&[("intermediate_size", json!(null))]);
    assert_eq!(read(&wide), read(&config()));
    refused_with(
        &with(&[
            ("intermediate_size", json!(null)),
            ("mlp_only_layers", json!([1])),
        ]),
        &["intermediate_size is missing"],
    );
    let dense = [
        ("num_experts", json!(0)),
        ("num_experts_per_tok", json!(null)),
        ("moe_intermediate_size", json!(null)),
        ("shared_expert_intermediate_size", json!(null)),
    ];
    assert!(sparse(&with(&dense)).is_empty());
}

#[test]
fn c060_fields_out_of_range_are_refused_by_name() {
    for (field, value, parts) in [
        ("num_experts", json!(null), ["num_experts is missing", ""]),
        (
            "num_experts_per_tok",
            json!(9),
            ["num_experts_per_tok is 9", "num_experts is 8"],
        ),
        ("decoder_sparse_step", json!(0), ["decoder_sparse_step is 0", ""]),
        (
            "mlp_only_layers",
            json!(3),
            ["mlp_only_layers is 3", "a list of layers from 0 to 7"],
        ),
        (
            "mlp_only_layers",
            json!([1, 8]),
            ["mlp_only_layers[1] is 8", "from 0 to 7"],
        ),
        ("mlp_only_layers", json!([-1]), ["mlp_only_layers[0] is -1", ""]),
        (
            "mlp_only_layers",
            json!(["1"]),
            ["mlp_only_layers[0] is \"1\"", ""],
        ),
        (
            "full_attention_interval",
            json!(0),
            ["full_attention_interval is 0", ""],
        ),
        (
            "model_type",
            json!("qwen3_5"),
            ["model_type is \"qwen3_5\"", "expected one of qwen3_next"],
        ),
    ] {
        refused_with(&with(&[(field, value)]), &parts);
    }
}

#[test]
fn the_trained_model_beside_the_repository_is_read_without_a_warning() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/models/next");
    if !path.is_dir() {
        println!(
            "SKIPPED reading of the trained model: there is no ../shared/models/next beside the repository"
        );
        return;
    }
    let text = std::fs::read(path.join("config.json")).expect("a file");
    let config = Config::from_json(&Qwen3Next, &serde_json::from_slice(&text).expect("JSON"), None);
    let config = config.expect("a configuration");
    assert!(config.warnings.is_empty(), "{:?}", config.warnings);
    assert_eq!((config.rope_theta, config.rotary_dims), (1e7, 16));
    assert_eq!(config.feed_forward.len(), 8);
}
