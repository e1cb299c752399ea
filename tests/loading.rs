//! Dense checkpoints as they are found in the wild: every spelling of one model gives the same logits, and what is not
//! that model is refused by name.

mod common;

use common::checkpoint::{
    load, logits, logits_of, prefixed, refusal_of, tensors, write, write_shards, Tensors, HUB,
};
use common::{seeded, Result};
use recant::candle::{DType, Tensor};
use recant::core::{CacheOptions, Hidden, LanguageModel, Rows, Segment};
use serde_json::{json, Value};
use tempfile::TempDir;

#[test]
fn c046_three_prefixes_load_the_same_and_a_fourth_is_refused_by_name() -> Result<()> {
    let config = seeded::dense(|_| {});
    let tensors = tensors(&config)?;
    let want = logits_of(|dir| write(dir, &config, &prefixed(&tensors, HUB, "")))?;
    for (prefix, head) in [("model.", ""), ("language_model.model.", "language_model.")] {
        let got = logits_of(|dir| write(dir, &config, &prefixed(&tensors, prefix, head)))?;
        assert!(got == want, "{prefix}");
    }
    let error = refusal_of(|dir| {
        write(
            dir,
            &config,
            &prefixed(
                &tensors,
                "language_model.language_model.language_model.model.",
                "",
            ),
        )
    })?;
    assert!(
        error.contains("language_model.language_model.language_model.model."),
        "{error}"
    );
    Ok(())
}

#[test]
fn c018_c036_vision_and_mtp_tensors_are_left_alone_and_counted() -> Result<()> {
    let config = seeded::dense(|text| text["mtp_num_hidden_layers"] = json!(1));
    let tensors = prefixed(&tensors(&config)?, HUB, "");
    let want = logits_of(|dir| write(dir, &config, &tensors))?;
    let mut more = tensors.clone();
    let extra = &tensors["model.language_model.norm.weight"];
    more.insert("model.visual.blocks.0.norm1.weight".to_owned(), extra.clone());
    more.insert("mtp.norm.weight".to_owned(), extra.clone());
    more.insert("mtp.pre_fc_norm_hidden.weight".to_owned(), extra.clone());
    let dir = TempDir::new()?;
    write(dir.path(), &config, &more)?;
    let (model, inventory) = load(dir.path())?;
    assert!(logits(&model)? == want);
    assert_eq!((inventory.vision, inventory.mtp), (1, 2));
    Ok(())
}

#[test]
fn c054_c055_shards_are_what_the_index_names_and_nothing_else() -> Result<()> {
    let config = seeded::dense(|_| {});
    let tensors = prefixed(&tensors(&config)?, HUB, "");
    let want = logits_of(|dir| write(dir, &config, &tensors))?;
    assert!(logits_of(|dir| write_shards(dir, &config, &tensors))? == want);
    let stray = logits_of(|dir| {
        write_shards(dir, &config, &tensors)?;
        let noise: Tensors = tensors
            .iter()
            .map(|(n, t)| Ok((n.clone(), (t * 2.0)?)))
            .collect::<Result<_>>()?;
        safetensors::serialize_to_file(noise.iter(), None, &dir.join("model.safetensors"))?;
        Ok(())
    })?;
    assert!(stray == want, "a stray file was read");
    let error = refusal_of(|dir| {
        write_shards(dir, &config, &tensors)?;
        std::fs::remove_file(dir.join("model-00002-of-00002.safetensors"))?;
        Ok(())
    })?;
    assert!(error.contains("model-00002-of-00002.safetensors"), "{error}");
    Ok(())
}

#[test]
fn c047_c048_the_head_is_the_one_that_configuration_and_tensors_agree_on() -> Result<()> {
    let untied = seeded::dense(|_| {});
    let tensors = prefixed(&tensors(&untied)?, HUB, "");
    let mut headless = tensors.clone();
    headless.remove("lm_head.weight");
    let config = |root: Option<bool>, text: Option<bool>| {
        let mut config = seeded::dense(|t| t["tie_word_embeddings"] = json!(text));
        config["tie_word_embeddings"] = json!(root);
        config
    };
    let with_head = logits_of(|dir| write(dir, &untied, &tensors))?;
    let with_embedding = logits_of(|dir| write(dir, &config(None, Some(true)), &headless))?;
    assert!(with_head != with_embedding);
    for (root, text, weights, want) in [
        (Some(false), None, &tensors, &with_head),
        (None, Some(false), &tensors, &with_head),
        (Some(true), Some(false), &tensors, &with_head),
        (Some(false), Some(true), &tensors, &with_head),
        (None, None, &tensors, &with_head),
        (Some(true), None, &headless, &with_embedding),
        (Some(true), None, &tensors, &with_embedding),
        (Some(false), Some(true), &headless, &with_embedding),
    ] {
        let got = logits_of(|dir| write(dir, &config(root, text), weights))?;
        assert!(
            got == *want,
            "root {root:?}, text {text:?}, head {}",
            weights.contains_key("lm_head.weight")
        );
    }
    for root in [None, Some(false)] {
        let error = refusal_of(|dir| write(dir, &config(root, None), &headless))?;
        assert!(error.contains("lm_head.weight"), "{error}");
    }
    Ok(())
}

#[test]
fn c049_a_tied_head_is_the_embedding() -> Result<()> {
    let config = seeded::dense(|text| text["tie_word_embeddings"] = json!(true));
    let model = seeded::model(&config, 5, DType::F32)?;
    let tokens = [3, 10, 17];
    let mut caches = model.new_caches(&CacheOptions::default())?;
    let mut segment = Segment::new(&tokens, &mut caches, Rows::All);
    segment.hidden = Some(Hidden::PostNorm);
    let output = model.forward(&mut [segment])?;
    let output = &output.segments[0];
    let embedding = seeded::Seeded {
        seed: 5,
        dtype: DType::F32,
    }
    .tensor("embed_tokens.weight", &[256, 64])?;
    let hidden = output.hidden.as_ref().ok_or("no hidden rows")?;
    let want = hidden.matmul(&embedding.t()?)?.flatten_all()?.to_vec1::<f32>()?;
    let got = output.logits()?.flatten_all()?.to_vec1::<f32>()?;
    let scale = want.iter().fold(0f32, |m, x| m.max(x.abs()));
    assert!(scale > 0.1, "logits are spread");
    assert!(want.iter().zip(&got).all(|(a, b)| (a - b).abs() <= 1e-5 * scale));
    Ok(())
}

#[test]
fn c057_rotary_fields_are_read_wherever_they_are() -> Result<()> {
    let edit = |text: &mut Value| {
        text["rope_parameters"] =
            json!({"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25});
    };
    let nested = seeded::dense(edit);
    let tensors = prefixed(&tensors(&nested)?, "model.", "");
    let want = logits_of(|dir| write(dir, &nested, &tensors))?;
    let mut flat = seeded::dense(edit)["text_config"].clone();
    flat["rope_parameters"] = Value::Null;
    flat["rope_theta"] = json!(1e6);
    flat["partial_rotary_factor"] = json!(0.25);
    flat["rope_scaling"] = Value::Null;
    assert!(logits_of(|dir| write(dir, &flat, &tensors))? == want);
    let other = seeded::dense(|text| text["rope_parameters"]["rope_theta"] = json!(1e4));
    assert!(
        logits_of(|dir| write(dir, &other, &tensors))? != want,
        "theta is used"
    );
    let yarn = seeded::dense(|text| text["rope_parameters"]["rope_type"] = json!("yarn"));
    let error = refusal_of(|dir| write(dir, &yarn, &tensors))?;
    assert!(error.contains("rope_type") && error.contains("yarn"), "{error}");
    let missing = seeded::dense(|text| text["rope_parameters"] = json!({"partial_rotary_factor": 0.25}));
    let error = refusal_of(|dir| write(dir, &missing, &tensors))?;
    assert!(error.contains("rope_theta"), "{error}");
    Ok(())
}

#[test]
fn c058_only_the_rotary_part_of_a_head_turns_with_position() -> Result<()> {
    // With a factor of 1 every dimension turns: the logits of later positions must differ.
    let tensors = tensors(&seeded::dense(|_| {}))?;
    let tensors = prefixed(&tensors, HUB, "");
    let of = |factor: f64| {
        let config = seeded::dense(|text| text["rope_parameters"]["partial_rotary_factor"] = json!(factor));
        logits_of(|dir| write(dir, &config, &tensors))
    };
    assert!(of(0.25)? != of(1.0)?);
    Ok(())
}

/// Spoils a checkpoint.
type Edit = Box<dyn Fn(&mut Tensors) -> Result<()>>;

#[test]
fn a_tensor_that_is_missing_extra_or_misshaped_is_named() -> Result<()> {
    let config = seeded::dense(|_| {});
    let tensors = prefixed(&tensors(&config)?, HUB, "");
    let name = "model.language_model.layers.1.linear_attn.dt_bias";
    let cases: [(&str, Edit, &[&str]); 4] = [
        (
            "missing",
            Box::new(|t| {
                t.remove(name);
                Ok(())
            }),
            &["layers.1.linear_attn.dt_bias", "[4]"],
        ),
        (
            "extra",
            Box::new(|t| {
                let extra = t[name].clone();
                t.insert(
                    "model.language_model.layers.9.linear_attn.dt_bias".to_owned(),
                    extra,
                );
                Ok(())
            }),
            &["layers.9.linear_attn.dt_bias"],
        ),
        (
            "misshaped",
            Box::new(|t| {
                let wide = Tensor::cat(&[&t[name], &t[name]], 0)?;
                t.insert(name.to_owned(), wide);
                Ok(())
            }),
            &[name, "[4]", "[8]"],
        ),
        (
            "mistyped",
            Box::new(|t| {
                let doubles = t[name].to_dtype(DType::F64)?;
                t.insert(name.to_owned(), doubles);
                Ok(())
            }),
            &[name, "F64"],
        ),
    ];
    for (what, edit, words) in cases {
        let mut tensors = tensors.clone();
        edit(&mut tensors)?;
        let error = refusal_of(|dir| write(dir, &config, &tensors))?;
        assert!(words.iter().all(|word| error.contains(word)), "{what}: {error}");
    }
    Ok(())
}

#[test]
fn a_configuration_that_contradicts_the_tensors_is_refused_naming_both_shapes() -> Result<()> {
    let tensors = prefixed(&tensors(&seeded::dense(|_| {}))?, HUB, "");
    for (field, value, words) in [
        (
            "hidden_size",
            48,
            ["embed_tokens.weight", "[256, 48]", "[256, 64]"],
        ),
        (
            "intermediate_size",
            80,
            ["mlp.gate_proj.weight", "[80, 64]", "[96, 64]"],
        ),
        (
            "head_dim",
            16,
            ["self_attn.q_proj.weight", "[128, 64]", "[256, 64]"],
        ),
        (
            "linear_num_value_heads",
            2,
            ["linear_attn.conv1d.weight", "[96, 1, 4]", "[128, 1, 4]"],
        ),
        (
            "linear_conv_kernel_dim",
            3,
            ["linear_attn.conv1d.weight", "[128, 1, 3]", "[128, 1, 4]"],
        ),
        ("num_hidden_layers", 5, ["layers.4.", "", ""]),
        ("num_hidden_layers", 3, ["layers.3.", "", ""]),
        (
            "vocab_size",
            255,
            ["embed_tokens.weight", "[255, 64]", "[256, 64]"],
        ),
    ] {
        let config = seeded::dense(|text| text[field] = json!(value));
        let error = refusal_of(|dir| write(dir, &config, &tensors))?;
        assert!(
            words.iter().all(|word| error.contains(word)),
            "{field} {value}: {error}"
        );
    }
    Ok(())
}

#[test]
fn c029_a_model_type_that_is_not_supported_is_answered_with_those_that_are() -> Result<()> {
    let dir = TempDir::new()?;
    let tensors = prefixed(&tensors(&seeded::dense(|_| {}))?, HUB, "");
    for (model_type, shown) in [
        (json!("llama"), "\"llama\""),
        (json!(null), "absent"),
        (json!(5), "5"),
    ] {
        let mut config = seeded::dense(|_| {});
        config["model_type"] = model_type;
        write(dir.path(), &config, &tensors)?;
        let error = recant::load(dir.path()).err().ok_or("loaded")?.to_string();
        assert!(
            error.contains(shown) && error.contains("supported are qwen3_5, qwen3_5_text"),
            "{error}"
        );
    }
    Ok(())
}

#[test]
fn c102_decay_parameters_are_used_as_stored() -> Result<()> {
    // A bf16 copy of A_log differs from the f32 original, and must change the logits: nothing rounds it on the way.
    let config = seeded::dense(|_| {});
    let tensors = prefixed(&tensors(&config)?, HUB, "");
    let want = logits_of(|dir| write(dir, &config, &tensors))?;
    let mut rounded = tensors.clone();
    for (name, tensor) in &tensors {
        if name.ends_with("A_log") {
            rounded.insert(name.clone(), tensor.to_dtype(DType::BF16)?);
        }
    }
    assert!(logits_of(|dir| write(dir, &config, &rounded))? != want);
    Ok(())
}
