//! Checkpoints rounded to groups and saved: what is written loads as the model that rounding while loading gives.

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use common::checkpoint::{logits, prefixed, tensors, write, Tensors, HUB};
use common::{bits, seeded, Result};
use recant::candle::{DType, Tensor};
use recant::{GroupFormat, LoadOptions};
use recant_layers::HybridModel;
use recant_weights::Folder;
use serde_json::{json, Value};
use tempfile::TempDir;

fn format(bits: usize, group: usize, scales: DType) -> GroupFormat {
    GroupFormat {
        bits,
        group,
        affine: true,
        scales,
    }
}

fn loaded(dir: &Path, quantize: Option<GroupFormat>) -> Result<HybridModel> {
    let folder = Folder::open(dir)?;
    let options = LoadOptions {
        quantize,
        ..LoadOptions::default()
    };
    let family = seeded::family(folder.config());
    Ok(HybridModel::load(family, &folder, &options, &mut |_, _| {})?.0)
}

/// Tensors in bf16 but for those of the decays, as checkpoints are published.
fn published(config: &Value) -> Result<Tensors> {
    tensors(config)?
        .into_iter()
        .map(|(name, tensor)| {
            let dtype = match name.ends_with("A_log") || name.ends_with("linear_attn.norm.weight") {
                true => DType::F32,
                false => DType::BF16,
            };
            Ok((name, tensor.to_dtype(dtype)?))
        })
        .collect()
}

/// Experts each on its own.
fn apart(tensors: &Tensors) -> Result<Tensors> {
    let mut apart = Tensors::new();
    for (name, tensor) in tensors {
        let Some((prefix, which)) = name.split_once(".experts.") else {
            apart.insert(name.clone(), tensor.clone());
            continue;
        };
        for e in 0..tensor.dim(0)? {
            let expert = tensor.get(e)?;
            let names: &[&str] = match which {
                "gate_up_proj" => &["gate_proj", "up_proj"],
                _ => &["down_proj"],
            };
            for (part, rows) in names.iter().zip(expert.chunk(names.len(), 0)?) {
                apart.insert(format!("{prefix}.experts.{e}.{part}.weight"), rows.contiguous()?);
            }
        }
    }
    Ok(apart)
}

/// A checkpoint, and a place for what is made of it.
fn source(config: &Value, tensors: &Tensors) -> Result<(TempDir, PathBuf, PathBuf)> {
    let dir = TempDir::new()?;
    let from = dir.path().join("source");
    std::fs::create_dir(&from)?;
    write(&from, config, tensors)?;
    let to = dir.path().join("target");
    Ok((dir, from, to))
}

fn infos(dir: &Path) -> Result<BTreeMap<String, (String, Vec<usize>)>> {
    let folder = Folder::open(dir)?;
    let infos = folder.tensors();
    Ok(infos
        .map(|info| (info.name.clone(), (info.dtype.to_string(), info.shape.clone())))
        .collect())
}

fn entries(dir: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

/// The reason of a refusal, which leaves nothing behind.
fn refusal(from: &Path, to: &Path, format: GroupFormat) -> Result<String> {
    let around = to.parent().ok_or("no folder around")?;
    let before = entries(around)?;
    let error = recant::save(from, to, format, &mut |_, _| {})
        .err()
        .ok_or("quantized")?;
    assert_eq!(entries(around)?, before);
    Ok(error.to_string())
}

#[test]
fn every_family_in_every_format_loads_bit_for_bit_as_it_is_rounded_while_loading() -> Result<()> {
    let wide = |text: &mut Value| {
        text["moe_intermediate_size"] = json!(64);
        text["shared_expert_intermediate_size"] = json!(96);
    };
    let dense = seeded::dense(|text| text["intermediate_size"] = json!(128));
    let (moe, next, narrow) = (seeded::moe(wide), seeded::next(wide), seeded::moe(|_| {}));
    let cases = [
        ("dense", &dense, prefixed(&published(&dense)?, HUB, "")),
        ("moe", &moe, prefixed(&published(&moe)?, HUB, "")),
        (
            "moe, experts apart",
            &moe,
            prefixed(&apart(&published(&moe)?)?, HUB, ""),
        ),
        (
            "moe, experts of 24 features",
            &narrow,
            prefixed(&published(&narrow)?, HUB, ""),
        ),
        ("next", &next, prefixed(&apart(&published(&next)?)?, "model.", "")),
    ];
    for (what, config, tensors) in cases {
        let (dir, from, _) = source(config, &tensors)?;
        let plain = logits(&loaded(&from, None)?)?;
        for format in [
            format(8, 64, DType::BF16),
            format(8, 32, DType::F32),
            format(4, 32, DType::F16),
            format(4, 64, DType::BF16),
        ] {
            let to = dir.path().join(format!("{}-{}", format.bits, format.group));
            let mut told = Vec::new();
            recant::save(&from, &to, format, &mut |done, total| told.push((done, total)))?;
            let want = logits(&loaded(&from, Some(format))?)?;
            let got = logits(&loaded(&to, None)?)?;
            assert!(got == want, "{what}: {format:?}");
            assert!(got != plain, "{what}: {format:?} rounds nothing");
            let total = told.last().ok_or("nothing told")?.1;
            assert_eq!(told.last(), Some(&(total, total)));
        }
    }
    Ok(())
}

#[test]
fn matrices_are_packed_as_mlx_has_them_and_all_else_is_left() -> Result<()> {
    let config = seeded::moe(|text| text["moe_intermediate_size"] = json!(64));
    let tensors = prefixed(&published(&config)?, HUB, "");
    let (_dir, from, to) = source(&config, &tensors)?;
    recant::save(&from, &to, format(4, 32, DType::BF16), &mut |_, _| {})?;
    let infos = infos(&to)?;
    let layer = format!("{HUB}layers.0");
    for (name, dtype, shape) in [
        ("embed_tokens.weight", "U32", vec![256, 8]),
        ("embed_tokens.scales", "BF16", vec![256, 2]),
        ("embed_tokens.biases", "BF16", vec![256, 2]),
        ("layers.0.linear_attn.in_proj_qkv.weight", "U32", vec![128, 8]),
        ("layers.0.linear_attn.in_proj_a.weight", "BF16", vec![4, 64]),
        ("layers.0.linear_attn.conv1d.weight", "BF16", vec![128, 1, 4]),
        ("layers.0.linear_attn.A_log", "F32", vec![4]),
        ("layers.0.input_layernorm.weight", "BF16", vec![64]),
        ("layers.0.mlp.gate.weight", "BF16", vec![8, 64]),
        ("layers.0.mlp.shared_expert_gate.weight", "BF16", vec![1, 64]),
        ("layers.0.mlp.switch_mlp.gate_proj.weight", "U32", vec![8, 64, 8]),
        ("layers.0.mlp.switch_mlp.up_proj.scales", "BF16", vec![8, 64, 2]),
        ("layers.0.mlp.switch_mlp.down_proj.weight", "U32", vec![8, 64, 8]),
    ] {
        let found = infos.get(&format!("{HUB}{name}")).ok_or(name)?;
        assert_eq!(*found, (dtype.to_owned(), shape), "{name}");
    }
    assert_eq!(infos["lm_head.weight"].0, "U32");
    assert!(!infos.keys().any(|name| name.contains(".experts.")));
    assert!(!infos.contains_key(&format!("{layer}.mlp.gate.scales")));
    let written: Value = serde_json::from_slice(&std::fs::read(to.join("config.json"))?)?;
    let want = json!({"group_size": 32, "bits": 4, "mode": "affine"});
    assert_eq!(
        (&written["quantization"], &written["quantization_config"]),
        (&want, &want)
    );
    assert_eq!(written["text_config"], config["text_config"]);
    let index: Value = serde_json::from_slice(&std::fs::read(to.join("model.safetensors.index.json"))?)?;
    assert_eq!(index["weight_map"]["lm_head.scales"], "model.safetensors");
    Ok(())
}

#[test]
fn c031_qwen3_next_is_converted_with_norms_that_are_not_rounded() -> Result<()> {
    let config = seeded::next(|_| {});
    let tensors = prefixed(&apart(&published(&config)?)?, "model.", "");
    let (_dir, from, to) = source(&config, &tensors)?;
    recant::save(&from, &to, format(8, 32, DType::BF16), &mut |_, _| {})?;
    let written =
        recant::candle::safetensors::load(to.join("model.safetensors"), &recant::candle::Device::Cpu)?;
    let wide = |tensor: &Tensor| tensor.to_dtype(DType::F32);
    for name in [
        "model.norm.weight",
        "model.layers.3.self_attn.q_norm.weight",
        "model.layers.1.input_layernorm.weight",
    ] {
        assert_eq!(written[name].dtype(), DType::F32);
        assert_eq!(
            bits(&written[name])?,
            bits(&(wide(&tensors[name])? + 1.0)?)?,
            "{name}"
        );
    }
    let name = "model.layers.0.linear_attn.norm.weight";
    assert_eq!(bits(&written[name])?, bits(&tensors[name])?);
    let name = "model.layers.0.linear_attn.conv1d.weight";
    assert_eq!(written[name].dims(), [128, 4, 1]);
    assert_eq!(bits(&wide(&written[name])?)?, bits(&wide(&tensors[name])?)?);
    Ok(())
}

#[test]
fn a_head_of_a_tied_model_is_not_written() -> Result<()> {
    let config = seeded::dense(|text| text["tie_word_embeddings"] = json!(true));
    let mut tensors = prefixed(&published(&config)?, HUB, "");
    let copy = tensors[&format!("{HUB}embed_tokens.weight")].clone();
    tensors.insert("lm_head.weight".to_owned(), copy.clone());
    tensors.insert("model.visual.blocks.0.norm1.weight".to_owned(), copy);
    let (_dir, from, to) = source(&config, &tensors)?;
    recant::save(&from, &to, format(8, 32, DType::F16), &mut |_, _| {})?;
    assert!(infos(&to)?.keys().all(|name| name.starts_with(HUB)));
    let want = logits(&loaded(&from, Some(format(8, 32, DType::F16)))?)?;
    assert!(logits(&loaded(&to, None)?)? == want);
    Ok(())
}

#[test]
fn the_demo_target_keeps_its_head_tokenizer_and_template() -> Result<()> {
    let from = common::folder("demo-target").ok_or("no demo target")?;
    let dir = TempDir::new()?;
    let to = dir.path().join("quantized");
    let format = format(8, 64, DType::BF16);
    recant::save(&from, &to, format, &mut |_, _| {})?;
    let names = [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "mtp.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ];
    assert_eq!(entries(&to)?, names);
    assert_eq!(entries(dir.path())?, ["quantized"]);
    assert_eq!(infos(&to)?["mtp.fc.weight"].0, "U32");

    let options = LoadOptions {
        quantize: Some(format),
        ..LoadOptions::default()
    };
    let run = |model: recant::Loaded| -> Result<_> {
        let mut session = model.session().mtp().draft_tokens(3).build()?;
        session.start("def read_lines(path):\n    ")?;
        let mut text = String::new();
        for event in session.generate(60) {
            text.push_str(event?.text());
        }
        let stats = session.stats();
        Ok((text, stats.drafted, stats.accepted))
    };
    let want = run(recant::load_with(&from, &options, &mut |_, _| {})?)?;
    let got = run(recant::load(&to)?)?;
    assert_eq!(got, want);
    assert!(got.2 > 0, "the head drafts");
    Ok(())
}

#[test]
fn c044_a_head_alone_is_refused_as_what_it_is() -> Result<()> {
    let mut config = seeded::dense(|_| {});
    config["model_type"] = json!("qwen3_5_mtp");
    let norm = Tensor::zeros(64, DType::BF16, &recant::candle::Device::Cpu)?;
    let tensors = Tensors::from([("norm.weight".to_owned(), norm)]);
    let (_dir, from, to) = source(&config, &tensors)?;
    let error = refusal(&from, &to, format(8, 32, DType::BF16))?;
    assert!(error.contains("head alone"), "{error}");
    Ok(())
}

#[test]
fn what_cannot_be_saved_is_refused_and_leaves_nothing_behind() -> Result<()> {
    let config = seeded::moe(|_| {});
    let tensors = prefixed(&apart(&published(&config)?)?, HUB, "");
    let good = format(8, 32, DType::BF16);
    let (_dir, from, to) = source(&config, &tensors)?;
    for (format, words) in [
        (
            GroupFormat {
                affine: false,
                ..good
            },
            "symmetric",
        ),
        (GroupFormat { group: 16, ..good }, "groups of 16"),
        (GroupFormat { bits: 6, ..good }, "6 bits"),
        (
            GroupFormat {
                scales: DType::F64,
                ..good
            },
            "f64",
        ),
    ] {
        let error = refusal(&from, &to, format)?;
        assert!(
            error.contains(words) && error.contains("expected 4 or 8 bits"),
            "{error}"
        );
    }
    let error = refusal(&from, &from, good)?;
    assert!(error.contains("exists already"), "{error}");
    let gap = format!("{HUB}layers.1.mlp.experts.5.down_proj.weight");
    let mut fewer = tensors.clone();
    fewer.remove(&gap);
    let (_dir, from, to) = source(&config, &fewer)?;
    let error = refusal(&from, &to, good)?;
    assert!(
        error.contains("layers.1.mlp.experts.5.down_proj.weight is missing"),
        "{error}"
    );

    let name = format!("{HUB}layers.2.linear_attn.out_proj.weight");
    let mut damaged = tensors;
    let infinite = (&damaged[&name] * f64::INFINITY)?;
    damaged.insert(name.clone(), infinite);
    let (_dir, from, to) = source(&config, &damaged)?;
    let error = refusal(&from, &to, good)?;
    assert!(error.contains(&name) && error.contains("damaged"), "{error}");
    Ok(())
}
