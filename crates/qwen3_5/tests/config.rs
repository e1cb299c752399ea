//! `config.json` of the dense family: what is read, what is derived, and what is refused.

use proptest::prelude::*;
use recant_layers::{Config, ConfigError, FeedForward, LayerKind, Tie};
use recant_qwen3_5::Qwen35;
use serde_json::{json, Map, Value};

/// A small coherent text part. Every test starts from it and changes what it is about.
fn text() -> Value {
    json!({
        "model_type": "qwen3_5_text",
        "hidden_size": 64,
        "intermediate_size": 96,
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
    })
}

fn nested(text: Value) -> Value {
    json!({"model_type": "qwen3_5", "text_config": text})
}

/// The text part with one field set, or taken out by `None`.
fn with(name: &str, value: impl Into<Option<Value>>) -> Value {
    let mut text = text();
    set(&mut text, name, value.into());
    text
}

fn set(object: &mut Value, name: &str, value: Option<Value>) {
    let map: &mut Map<String, Value> = object.as_object_mut().unwrap();
    match value {
        Some(value) => drop(map.insert(name.to_owned(), value)),
        None => drop(map.remove(name)),
    }
}

#[track_caller]
fn read(config: &Value) -> Config {
    Config::from_json(&Qwen35, config, None).unwrap_or_else(|error| panic!("refused: {error}"))
}

/// The message that a configuration is refused with.
#[track_caller]
fn refused(config: &Value) -> String {
    match Config::from_json(&Qwen35, config, None) {
        Ok(config) => panic!("accepted: {config:?}"),
        Err(error) => error.to_string(),
    }
}

#[track_caller]
fn refused_with(text: Value, parts: &[&str]) {
    for (config, place) in [(text.clone(), ""), (nested(text), "text_config.")] {
        let message = refused(&config);
        for part in parts {
            assert!(message.contains(part), "{part:?} is not in: {message}");
        }
        assert!(
            message.contains(&format!("{place}{}", parts[0])),
            "no path in: {message}"
        );
    }
}

fn folder(name: &str) -> Option<(Value, Value)> {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
    let json = |file: &str| serde_json::from_slice(&std::fs::read(root.join(file)).ok()?).ok();
    Some((json("config.json")?, json("generation_config.json")?))
}

// What is read

#[test]
fn the_demo_model_is_read_without_a_warning() {
    let (config, generation) =
        folder("../../examples/models/demo-target").expect("the demo model is in the repository");
    let config = Config::from_json(&Qwen35, &config, Some(&generation)).unwrap();
    assert_eq!(config.hidden_size, 256);
    assert_eq!(config.feed_forward, [FeedForward::Dense { width: 320 }; 8]);
    assert_eq!(config.num_hidden_layers, 8);
    assert_eq!(
        (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim
        ),
        (4, 1, 64)
    );
    assert_eq!(
        (config.linear_num_key_heads, config.linear_num_value_heads),
        (2, 4)
    );
    assert_eq!(
        (config.linear_key_head_dim, config.linear_value_head_dim),
        (64, 64)
    );
    assert_eq!(config.linear_conv_kernel_dim, 4);
    assert_eq!(config.vocab_size, 8192);
    assert_eq!(config.rms_norm_eps, 1e-6);
    assert_eq!(config.max_position_embeddings, 32768);
    assert_eq!(config.rope_theta, 1e7);
    assert_eq!(config.rotary_dims, 16);
    assert_eq!(config.tie, Tie::Tied);
    assert_eq!(config.eos_token_ids, [8187, 8189]);
    assert!(config.attn_output_gate && !config.attention_bias);
    let full: Vec<usize> = (0..8)
        .filter(|&i| config.layer_kinds[i] == LayerKind::Full)
        .collect();
    assert_eq!(full, [3, 7]);
    assert!(config.warnings.is_empty(), "{:?}", config.warnings);
}

#[test]
fn a_larger_model_beside_the_repository_is_read_without_a_warning() {
    let Some((config, generation)) = folder("../../../shared/models/target") else {
        println!("skipped: a_larger_model_beside_the_repository_is_read_without_a_warning (no such model)");
        return;
    };
    let config = Config::from_json(&Qwen35, &config, Some(&generation)).unwrap();
    assert_eq!(config.layer_kinds.len(), 12);
    assert_eq!(config.rotary_dims, 16);
    assert!(config.warnings.is_empty(), "{:?}", config.warnings);
}

#[test]
fn flat_and_nested_text_fields_give_the_same_configuration() {
    let flat = read(&text());
    assert_eq!(flat, read(&nested(text())));
    let mut exported = text();
    set(&mut exported, "model_type", Some(json!("qwen3_5")));
    assert_eq!(flat, read(&exported));
}

#[test]
fn absent_fields_take_their_documented_defaults() {
    let config = read(&text());
    assert_eq!(config.linear_conv_kernel_dim, 4);
    assert_eq!(config.rms_norm_eps, 1e-6);
    assert!(!config.attention_bias);
    assert!(config.attn_output_gate);
    assert_eq!(config.tie, Tie::Untied);
    assert!(config.eos_token_ids.is_empty());
    use LayerKind::{Full, Linear};
    assert_eq!(config.layer_kinds, [Linear, Linear, Linear, Full]);
    assert!(config.warnings.is_empty());
}

#[test]
fn a_null_is_an_absent_field() {
    let mut config = text();
    for name in [
        "linear_conv_kernel_dim",
        "rms_norm_eps",
        "attention_bias",
        "attn_output_gate",
        "layer_types",
        "full_attention_interval",
        "tie_word_embeddings",
        "eos_token_id",
        "rope_scaling",
        "hidden_act",
        "num_experts",
        "sliding_window",
        "attn_logit_softcapping",
        "output_gate_type",
        "mamba_ssm_dtype",
    ] {
        set(&mut config, name, Some(Value::Null));
    }
    assert_eq!(read(&config), read(&text()));
}

#[test]
fn keys_that_nobody_knows_are_ignored() {
    let config = with("router_aux_loss_coef", json!({"anything": [1, 2]}));
    assert_eq!(read(&config), read(&text()));
}

#[test]
fn every_required_field_is_missed_by_name() {
    for name in [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "vocab_size",
        "max_position_embeddings",
    ] {
        refused_with(with(name, None), &[name, "missing"]);
        refused_with(with(name, json!(null)), &[name, "missing"]);
        refused_with(with(name, json!("64")), &[name, "\"64\"", "whole number"]);
        refused_with(with(name, json!(64.5)), &[name, "64.5"]);
        refused_with(with(name, json!(-1)), &[name, "-1"]);
        refused_with(with(name, json!(0)), &[name, "is 0"]);
        refused_with(with(name, json!(u64::MAX)), &[name, "18446744073709551615"]);
    }
}

#[test]
fn fields_of_the_wrong_type_are_refused_by_name() {
    for (name, value) in [
        ("attention_bias", json!(0)),
        ("attn_output_gate", json!("true")),
        ("tie_word_embeddings", json!(1)),
        ("rms_norm_eps", json!("1e-6")),
        ("rms_norm_eps", json!(0)),
        ("rms_norm_eps", json!(-1e-6)),
        ("rope_parameters", json!([1])),
        ("rope_scaling", json!("yarn")),
        ("layer_types", json!("full_attention")),
        ("full_attention_interval", json!(0)),
        ("full_attention_interval", json!(4.0)),
        ("linear_conv_kernel_dim", json!(1)),
        ("hidden_act", json!(3)),
        ("layer_scale", json!("no")),
        ("num_experts", json!("8")),
        ("eos_token_id", json!("<|im_end|>")),
        ("eos_token_id", json!(-1)),
        ("eos_token_id", json!([1, null])),
        ("eos_token_id", json!(4_294_967_296u64)),
    ] {
        refused_with(with(name, value), &[name]);
    }
}

#[test]
fn what_is_no_object_is_refused() {
    for value in [json!(null), json!([]), json!("qwen3_5"), json!(1)] {
        assert!(refused(&value).starts_with("config.json is "));
    }
    assert!(refused(&json!({"model_type": "qwen3_5", "text_config": []})).starts_with("text_config is "));
    let error = Config::from_json(&Qwen35, &text(), Some(&json!([]))).unwrap_err();
    assert!(error.to_string().starts_with("generation_config.json is "));
}

// Model types

#[test]
fn other_model_types_are_refused_with_a_list_of_the_supported_ones() {
    for kind in [
        "qwen3_5_moe",
        "qwen3_next",
        "qwen3_5_mtp",
        "qwen4_exp",
        "llama",
        "",
    ] {
        let mut config = nested(text());
        set(&mut config, "model_type", Some(json!(kind)));
        let message = refused(&config);
        assert!(
            message.contains(&format!("{kind:?}")) && message.contains("qwen3_5, qwen3_5_text"),
            "{message}"
        );
    }
}

#[test]
fn another_model_type_in_the_text_part_is_refused() {
    let config = nested(with("model_type", json!("qwen3_5_moe_text")));
    assert!(matches!(
        Config::from_json(&Qwen35, &config, None),
        Err(ConfigError::ModelType { field, .. }) if field == "text_config.model_type"
    ));
}

#[test]
fn a_missing_model_type_is_refused() {
    assert!(refused(&with("model_type", None)).contains("model_type is missing"));
}

// Coherence: candle#3869

#[test]
fn query_heads_that_are_no_multiple_of_the_key_value_heads_are_refused() {
    refused_with(
        with("num_key_value_heads", json!(3)),
        &["num_attention_heads", "num_key_value_heads is 3", "multiple"],
    );
}

#[test]
fn linear_value_heads_that_are_no_multiple_of_the_key_heads_are_refused() {
    refused_with(
        with("linear_num_value_heads", json!(5)),
        &["linear_num_value_heads", "linear_num_key_heads is 2", "multiple"],
    );
}

#[test]
fn an_odd_number_of_rotated_dimensions_is_refused() {
    // 36 x 0.25 = 9.
    refused_with(with("head_dim", json!(36)), &["head_dim", "9 dimensions"]);
}

#[test]
fn rotating_no_dimension_or_more_than_a_head_has_is_refused() {
    for (factor, part) in [(0.01, "0 dimensions"), (1.5, "1.5"), (0.0, "0")] {
        let mut config = text();
        config["rope_parameters"]["partial_rotary_factor"] = json!(factor);
        assert!(refused(&config).contains(part));
    }
}

#[test]
fn the_whole_head_may_be_rotated_and_a_fraction_of_a_dimension_is_dropped() {
    for (factor, dims) in [(1.0, 32), (0.5, 16), (0.26, 8), (0.2, 6)] {
        let mut config = text();
        config["rope_parameters"]["partial_rotary_factor"] = json!(factor);
        assert_eq!(read(&config).rotary_dims, dims, "factor {factor}");
    }
}

#[test]
fn layer_types_win_over_the_interval() {
    use LayerKind::{Full, Linear};
    let types = json!([
        "full_attention",
        "linear_attention",
        "linear_attention",
        "full_attention"
    ]);
    assert_eq!(
        read(&with("layer_types", types)).layer_kinds,
        [Full, Linear, Linear, Full]
    );
}

#[test]
fn the_interval_places_full_attention_at_its_multiples() {
    use LayerKind::{Full, Linear};
    let config = with("full_attention_interval", json!(2));
    assert_eq!(read(&config).layer_kinds, [Linear, Full, Linear, Full]);
    let config = with("full_attention_interval", json!(1));
    assert_eq!(read(&config).layer_kinds, [Full; 4]);
    let config = with("full_attention_interval", json!(5));
    assert_eq!(read(&config).layer_kinds, [Linear; 4]);
}

#[test]
fn layer_types_of_another_length_are_refused() {
    for n in [0, 3, 5] {
        let types = vec!["linear_attention"; n];
        refused_with(
            with("layer_types", json!(types)),
            &["layer_types", &format!("{n} entries"), "num_hidden_layers is 4"],
        );
    }
}

#[test]
fn an_unknown_layer_type_is_refused_with_its_place() {
    let types = json!([
        "linear_attention",
        "linear_attention",
        "sliding_attention",
        "full_attention"
    ]);
    refused_with(
        with("layer_types", types),
        &["layer_types[2]", "sliding_attention"],
    );
}

#[test]
fn sizes_whose_product_no_machine_can_hold_are_refused() {
    let mut config = text();
    for (name, value) in [
        ("hidden_size", 1 << 24),
        ("num_attention_heads", 1 << 16),
        ("num_key_value_heads", 1),
        ("head_dim", 1 << 16),
    ] {
        set(&mut config, name, Some(json!(value)));
    }
    refused_with(
        config,
        &[
            "num_attention_heads x head_dim",
            "matrix of 72057594037927936 elements",
        ],
    );
}

// Rotary positions: vllm#29966, DeepSpeed#8341, maxtext#4616

#[test]
fn old_and_new_rope_fields_give_the_same_configuration() {
    let mut old = with("rope_parameters", None);
    set(&mut old, "rope_theta", Some(json!(1e6)));
    set(&mut old, "partial_rotary_factor", Some(json!(0.25)));
    set(&mut old, "rope_scaling", Some(Value::Null));
    assert_eq!(read(&old), read(&text()));
    assert_eq!(read(&old).rotary_dims, 8);
}

#[test]
fn a_missing_theta_is_an_error_and_not_ten_thousand() {
    refused_with(
        with("rope_parameters", None),
        &["rope_parameters.rope_theta", "missing"],
    );
    refused_with(
        with("rope_parameters", json!({"rope_type": "default"})),
        &["rope_parameters.rope_theta", "missing"],
    );
}

#[test]
fn a_missing_factor_is_a_quarter() {
    let config = read(&with("rope_parameters", json!({"rope_theta": 1e6})));
    assert_eq!(config.rotary_dims, 8);
}

#[test]
fn the_rope_object_wins_over_flat_keys_with_a_warning() {
    let mut config = with("rope_theta", json!(10_000.0));
    set(&mut config, "partial_rotary_factor", Some(json!(0.5)));
    let config = read(&nested(config));
    assert_eq!((config.rope_theta, config.rotary_dims), (1e6, 8));
    assert_eq!(config.warnings.len(), 2, "{:?}", config.warnings);
    assert!(config.warnings[0].contains("text_config.rope_parameters.rope_theta is 1000000"));
    assert!(config.warnings[0].contains("text_config.rope_theta is 10000"));
}

#[test]
fn equal_flat_keys_give_no_warning() {
    assert!(read(&with("partial_rotary_factor", json!(0.25)))
        .warnings
        .is_empty());
}

#[test]
fn rope_scaling_stands_in_for_rope_parameters() {
    let scaling = json!({"type": "mrope", "rope_theta": 5e5, "partial_rotary_factor": 0.5});
    let config = read(&with("rope_scaling", scaling));
    assert_eq!((config.rope_theta, config.rotary_dims), (5e5, 16));
    assert_eq!(config.warnings.len(), 1);
    // Its theta is not taken from the object that it replaces.
    refused_with(
        with("rope_scaling", json!({"type": "default"})),
        &["rope_parameters.rope_theta", "missing"],
    );
}

#[test]
fn rope_types_that_change_the_angles_are_refused() {
    for kind in ["yarn", "linear", "dynamic", "longrope", "llama3", "proportional"] {
        for key in ["rope_type", "type"] {
            for dict in ["rope_parameters", "rope_scaling"] {
                let config = with(dict, json!({key: kind, "rope_theta": 1e6}));
                refused_with(config, &[&format!("{dict}.{key}"), kind, "not supported"]);
            }
        }
    }
}

// Arithmetic that is not implemented

#[test]
fn fields_that_change_the_arithmetic_are_refused_and_never_ignored() {
    for (name, value) in [
        ("layer_scale", json!(true)),
        ("is_causal", json!(false)),
        ("mtp_use_dedicated_embeddings", json!(true)),
        ("attn_logit_softcapping", json!(30.0)),
        ("sliding_window", json!(4096)),
        ("output_gate_type", json!("sigmoid")),
        ("hidden_act", json!("gelu")),
        ("num_experts", json!(8)),
    ] {
        refused_with(with(name, value), &[name, "not supported"]);
    }
}

#[test]
fn the_same_fields_with_the_values_of_published_models_change_nothing() {
    for (name, value) in [
        ("layer_scale", json!(false)),
        ("is_causal", json!(true)),
        ("mtp_use_dedicated_embeddings", json!(false)),
        ("output_gate_type", json!("swish")),
        ("output_gate_type", json!("silu")),
        ("hidden_act", json!("silu")),
        ("num_experts", json!(0)),
        ("mamba_ssm_dtype", json!("float32")),
        ("mtp_num_hidden_layers", json!(1)),
    ] {
        assert_eq!(read(&with(name, value)), read(&text()), "{name}");
    }
}

#[test]
fn a_16_bit_recurrent_state_is_warned_of() {
    let config = read(&with("mamba_ssm_dtype", json!("bfloat16")));
    assert!(config.warnings[0].contains("bfloat16"), "{:?}", config.warnings);
}

#[test]
fn a_size_that_root_and_text_part_give_differently_is_warned_of() {
    let mut config = nested(text());
    set(&mut config, "hidden_size", Some(json!(128)));
    let config = read(&config);
    assert_eq!(config.hidden_size, 64);
    assert!(
        config.warnings[0].contains("hidden_size"),
        "{:?}",
        config.warnings
    );
}

// Tied embeddings: pegainfer#544, Automodel#2268, mistral.rs#1680

#[test]
fn the_text_part_says_whether_embeddings_are_tied_else_the_root() {
    for (outer, inner, tie) in [
        (None, None, Tie::Untied),
        (Some(true), None, Tie::Tied),
        (Some(false), None, Tie::Untied),
        (None, Some(true), Tie::Tied),
        (None, Some(false), Tie::Untied),
        (Some(true), Some(true), Tie::Tied),
        (Some(false), Some(false), Tie::Untied),
        (Some(true), Some(false), Tie::Conflict),
        (Some(false), Some(true), Tie::Conflict),
    ] {
        let mut config = nested(with("tie_word_embeddings", inner.map(Value::from)));
        set(&mut config, "tie_word_embeddings", outer.map(Value::from));
        let config = read(&config);
        assert_eq!(config.tie, tie, "root {outer:?}, text {inner:?}");
        assert_eq!(config.warnings.len(), usize::from(tie == Tie::Conflict));
    }
}

#[test]
fn a_contradiction_about_ties_is_settled_by_the_checkpoint() {
    assert!(!Tie::Conflict.is_tied(true));
    assert!(Tie::Conflict.is_tied(false));
    for has_head in [false, true] {
        assert!(Tie::Tied.is_tied(has_head));
        assert!(!Tie::Untied.is_tied(has_head));
    }
}

// End of text: mlx-vlm#2112, vllm#4589

#[test]
fn end_ids_are_the_union_of_all_that_say_any() {
    let mut config = nested(with("eos_token_id", json!(10)));
    set(&mut config, "eos_token_id", Some(json!([13, 10])));
    let generation = json!({"eos_token_id": [12, 10, 11]});
    let config = Config::from_json(&Qwen35, &config, Some(&generation)).unwrap();
    assert_eq!(config.eos_token_ids, [10, 11, 12, 13]);
}

#[test]
fn end_ids_may_be_a_number_a_list_or_null_in_either_file() {
    for (eos, generation, ids) in [
        (json!(10), json!({"eos_token_id": 11}), &[10, 11][..]),
        (json!([10]), json!({"eos_token_id": null}), &[10]),
        (json!(null), json!({"eos_token_id": [11]}), &[11]),
        (json!(null), json!({}), &[]),
        (json!(10), json!(null), &[10]),
    ] {
        let config = Config::from_json(&Qwen35, &with("eos_token_id", eos), Some(&generation)).unwrap();
        assert_eq!(config.eos_token_ids, ids);
    }
}

#[test]
fn a_malformed_end_id_in_the_generation_config_is_refused_by_file_and_field() {
    let error = Config::from_json(&Qwen35, &text(), Some(&json!({"eos_token_id": {}}))).unwrap_err();
    assert!(error
        .to_string()
        .starts_with("generation_config.json: eos_token_id is an object"));
}

#[test]
fn an_end_id_outside_the_vocabulary_is_warned_of() {
    let config = read(&with("eos_token_id", json!([5, 256])));
    assert_eq!(config.warnings.len(), 1);
    assert!(config.warnings[0].contains("256"));
}

// Anything else

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        (0u64..70_000).prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        prop_oneof![
            Just("default"),
            Just("full_attention"),
            Just("qwen3_5"),
            Just("silu"),
            Just("\u{0}")
        ]
        .prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 16, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            prop::collection::btree_map("[a-z_]{1,12}", inner, 0..4)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

/// Names of all fields that are read, and some that are not.
const NAMES: [&str; 34] = [
    "model_type",
    "text_config",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
    "layer_types",
    "full_attention_interval",
    "attention_bias",
    "attn_output_gate",
    "hidden_act",
    "tie_word_embeddings",
    "num_experts",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "partial_rotary_factor",
    "output_gate_type",
    "mamba_ssm_dtype",
    "sliding_window",
    "is_causal",
    "layer_scale",
    "eos_token_id",
    "unknown",
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn no_change_to_a_configuration_makes_reading_it_panic(
        changes in prop::collection::vec((0..NAMES.len(), any_json(), any::<bool>()), 1..4),
        generation in prop::option::of(any_json()),
    ) {
        let mut config = nested(text());
        for (name, value, inner) in changes {
            let object = if inner && config["text_config"].is_object() { &mut config["text_config"] } else { &mut config };
            object[NAMES[name]] = value;
        }
        if let Ok(config) = Config::from_json(&Qwen35, &config, generation.as_ref()) {
            prop_assert_eq!(config.layer_kinds.len(), config.num_hidden_layers);
            prop_assert_eq!(config.feed_forward.len(), config.num_hidden_layers);
            prop_assert_eq!(config.num_attention_heads % config.num_key_value_heads, 0);
            prop_assert_eq!(config.linear_num_value_heads % config.linear_num_key_heads, 0);
            prop_assert!(config.rotary_dims % 2 == 0 && (2..=config.head_dim).contains(&config.rotary_dims));
        }
    }
}
