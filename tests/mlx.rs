//! Conversions by MLX: the numbers that mlx unpacks, the tokens that mlx-lm writes, and the layouts of all families.
//!
//! `tests/reference/from_mlx.py` writes what is compared with.

mod common;
#[path = "common/packed.rs"]
mod packed;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use common::checkpoint::{logits, prefixed, tensors, write, Tensors, HUB};
use common::law::{self, greedy, in_full, keeps_the_law, model};
use common::small_floats::e4m3;
use common::{folder, relative_error, seeded, text_ids, Result, Rng};
use packed::{floats, packed, PACKINGS};
use recant::candle::{safetensors, DType, Device, Tensor, D};
use recant::core::{CacheOptions, LanguageModel, Rows, Segment};
use recant::LoadOptions;
use recant_mtp::MtpHead;
use recant_qwen3_5::Qwen35;
use recant_weights::{Coding, Folder, Stored};
use serde_json::{json, Value};
use tempfile::TempDir;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn golden(name: &str) -> PathBuf {
    root().join("tests/golden/mlx").join(name)
}

/// What mlx makes of a stored matrix: in the type of the scales, rounded after the product and again after the sum.
fn as_mlx(stored: &Stored) -> Result<Vec<f32>> {
    let groups = match stored {
        Stored::Float(tensor) => return floats(tensor),
        Stored::Groups(groups) => groups,
        other => return Err(format!("{other:?}").into()),
    };
    let dtype = groups.scales.dtype();
    let rounded = |x: Vec<f32>| -> Result<Vec<f32>> {
        floats(&Tensor::from_vec(x.clone(), x.len(), &Device::Cpu)?.to_dtype(dtype)?)
    };
    let bytes = groups.quants.flatten_all()?.to_vec1::<u8>()?;
    let quants: Vec<u8> = match groups.coding.bits() {
        4 => bytes.iter().flat_map(|b| [b & 15, b >> 4]).collect(),
        _ => bytes,
    };
    let scales = floats(&groups.scales)?;
    let products = quants.iter().enumerate().map(|(i, q)| {
        scales[i / groups.group]
            * match groups.coding {
                Coding::Whole { zero, .. } => f32::from(*q) - f32::from(zero),
                Coding::Table(table) => f32::from(table[usize::from(*q)]),
                Coding::E4m3 => e4m3(*q),
            }
    });
    let Some(biases) = &groups.biases else {
        return Ok(products.collect());
    };
    let biases = floats(biases)?;
    let products = rounded(products.collect())?;
    let sums = products
        .iter()
        .enumerate()
        .map(|(i, p)| p + biases[i / groups.group]);
    rounded(sums.collect())
}

#[test]
fn every_packing_holds_the_numbers_that_mlx_unpacks() -> Result<()> {
    let all: HashMap<String, Tensor> = safetensors::load(golden("packings.safetensors"), &Device::Cpu)?;
    let mut seen = 0;
    for name in all.keys().filter_map(|name| name.strip_suffix(".expected")) {
        let parts: Vec<&str> = name.split('.').collect();
        let (mode, bits, group) = (parts[0], parts[1].parse::<u64>()?, parts[2].parse::<u64>()?);
        let path = "model.layers.0.mlp.up_proj";
        let mut file = Tensors::new();
        for end in ["weight", "scales", "biases", "global_scale"] {
            if let Some(tensor) = all.get(&format!("{name}.{end}")) {
                file.insert(format!("{path}.{end}"), tensor.clone());
            }
        }
        let conv = Tensor::zeros((4, 4, 1), DType::F32, &Device::Cpu)?;
        file.insert("model.layers.0.linear_attn.conv1d.weight".to_owned(), conv);
        let dir = TempDir::new()?;
        let mut quantization = json!({"group_size": 64, "bits": 4});
        quantization[path] = json!({"group_size": group, "bits": bits, "mode": mode});
        write(dir.path(), &json!({"quantization": quantization}), &file)?;
        let folder = Folder::open(dir.path())?;
        let expected = &all[&format!("{name}.expected")];
        let (rows, features) = expected.dims2()?;
        let stored = folder
            .weights()?
            .take_matrix("layers.0.mlp.up_proj.weight", [rows, features])?;
        let same = as_mlx(&stored)?
            .iter()
            .zip(&floats(expected)?)
            .all(|(a, b)| a.to_bits() == b.to_bits() || (*a == 0.0 && *b == 0.0));
        assert!(same, "{name}");
        seen += 1;
    }
    assert_eq!(seen, 34);
    Ok(())
}

/// mlx-lm computes in f32 here too, so that only the order of sums differs: 48 tokens are the same, and how far each is ahead is
/// so too. Seen: 2e-5 of logits of about 10.
fn writes_the_tokens_of_mlx_lm(dir: &Path) -> Result<()> {
    let expected: Value = serde_json::from_slice(&std::fs::read(dir.join("expected.json"))?)?;
    let list = |name: &str| -> Result<Vec<f64>> {
        let list = expected[name].as_array().ok_or("no list")?;
        Ok(list.iter().filter_map(Value::as_f64).collect())
    };
    let prompt: Vec<u32> = list("prompt")?.into_iter().map(|id| id as u32).collect();
    let tokens: Vec<u32> = list("tokens")?.into_iter().map(|id| id as u32).collect();
    let margins = list("margins")?;
    let (found, ahead) = greedy(&model(dir, &in_full())?, &prompt, tokens.len())?;
    assert_eq!(found, tokens, "{}", dir.display());
    let apart = ahead
        .iter()
        .zip(&margins)
        .map(|(a, b)| (f64::from(*a) - b).abs())
        .fold(0.0, f64::max);
    println!("{}: margins differ by at most {apart:e}", dir.display());
    assert!(apart < 1e-4, "{}: {apart}", dir.display());
    Ok(())
}

#[test]
fn a_conversion_of_mixed_bits_and_modes_writes_the_tokens_of_mlx_lm() -> Result<()> {
    writes_the_tokens_of_mlx_lm(&golden("4bit"))
}

#[test]
fn conversions_of_every_mode_write_the_tokens_of_mlx_lm() -> Result<()> {
    for name in ["mxfp4", "nvfp4", "mxfp8", "3bit", "6bit", "8bit"] {
        let dir = root().join("target/reference/mlx").join(name);
        if dir.is_dir() {
            writes_the_tokens_of_mlx_lm(&dir)?;
        } else {
            println!("SKIPPED {name}: there is no target/reference/mlx/{name}; tests/reference/from_mlx.py writes it");
        }
    }
    Ok(())
}

#[test]
fn rounded_activations_leave_most_choices_as_they_are() -> Result<()> {
    let text = text_ids(200)?;
    let choices = |options: &LoadOptions| -> Result<Vec<u32>> {
        let model = model(&golden("4bit"), options)?;
        let mut caches = model.new_caches(&CacheOptions::default())?;
        let output = model.forward(&mut [Segment::new(&text, &mut caches, Rows::All)])?;
        Ok(output.segments[0].logits()?.argmax(D::Minus1)?.to_vec1()?)
    };
    let (full, rounded) = (choices(&in_full())?, choices(&LoadOptions::default())?);
    let same = full.iter().zip(&rounded).filter(|(a, b)| a == b).count();
    println!("{same} of 200 choices are the same");
    assert!(same >= 190, "{same} of 200");
    Ok(())
}

#[test]
fn a_conversion_keeps_the_law_and_drafts_taken_back_leave_nothing_behind() -> Result<()> {
    let text = text_ids(120)?;
    for options in [LoadOptions::default(), in_full()] {
        keeps_the_law("4bit", &model(&golden("4bit"), &options)?, &text)?;
    }
    Ok(())
}

/// Renames and reshapes as mlx-lm does: taps in the middle, 1 + w in norms, experts stacked by projection.
fn converted(tensors: &Tensors) -> Result<Tensors> {
    let mut out = Tensors::new();
    for (name, tensor) in tensors {
        let norm =
            tensor.rank() == 1 && name.ends_with("norm.weight") && !name.ends_with("linear_attn.norm.weight");
        let layer_norm = name.ends_with("layernorm.weight");
        if let Some(prefix) = name.strip_suffix(".experts.gate_up_proj") {
            let half = tensor.dims()[1] / 2;
            for (i, part) in ["gate_proj", "up_proj"].into_iter().enumerate() {
                let part_name = format!("{prefix}.switch_mlp.{part}.weight");
                out.insert(part_name, tensor.narrow(1, i * half, half)?.contiguous()?);
            }
        } else if let Some(prefix) = name.strip_suffix(".experts.down_proj") {
            out.insert(format!("{prefix}.switch_mlp.down_proj.weight"), tensor.clone());
        } else if name.ends_with("conv1d.weight") {
            out.insert(name.clone(), tensor.transpose(1, 2)?.contiguous()?);
        } else if norm || layer_norm {
            out.insert(name.clone(), (tensor + 1.0)?);
        } else {
            out.insert(name.clone(), tensor.clone());
        }
    }
    Ok(out)
}

fn families() -> Vec<Value> {
    let width = |text: &mut Value| {
        // A multiple of 32, so that all can be quantized.
        text["moe_intermediate_size"] = json!(32);
        text["shared_expert_intermediate_size"] = json!(64);
    };
    vec![
        seeded::dense(|text| text["linear_num_value_heads"] = json!(6)),
        seeded::dense(|text| text["tie_word_embeddings"] = json!(true)),
        seeded::moe(width),
        seeded::next(width),
    ]
}

#[test]
fn every_family_has_the_same_bits_in_the_layout_of_mlx() -> Result<()> {
    for config in families() {
        let tensors = tensors(&config)?;
        let own = TempDir::new()?;
        write(own.path(), &config, &prefixed(&tensors, HUB, ""))?;
        let want = logits(&model(own.path(), &LoadOptions::default())?)?;
        for (prefix, head) in [("language_model.model.", "language_model."), ("model.", "")] {
            for with_head in [false, true] {
                let mut file = prefixed(&converted(&tensors)?, prefix, head);
                if with_head {
                    // mlx-swift-lm#598: a head that was kept says nothing of the norms.
                    let norm = Tensor::zeros(64, DType::F32, &Device::Cpu)?;
                    file.insert("language_model.mtp.norm.weight".to_owned(), norm);
                }
                let dir = TempDir::new()?;
                write(dir.path(), &config, &file)?;
                let found = logits(&model(dir.path(), &LoadOptions::default())?)?;
                assert!(found == want, "{} {prefix} {with_head}", config["model_type"]);
            }
        }
    }
    Ok(())
}

/// A model as MLX converts it, the matrices that are `wanted` packed in turn in every way and two of three of them named in the
/// configuration; one of the same numbers in f32; and how many are packed.
fn conversions(config: &Value, wanted: impl Fn(&str) -> bool) -> Result<(TempDir, TempDir, usize)> {
    let mut rng = Rng(11);
    let (mut file, mut wide) = (Tensors::new(), Tensors::new());
    let mut quantization = json!({"group_size": 16, "bits": 4, "mode": "nvfp4"});
    // Not the same packing for the same matrix of another family.
    let first = config["model_type"].as_str().map_or(0, str::len);
    let mut used = 0;
    for (name, tensor) in converted(&tensors(config)?)? {
        let shape = tensor.dims().to_vec();
        let packing = PACKINGS[(used + first) % PACKINGS.len()];
        let matrix = shape.len() > 1 && !name.contains("conv1d") && shape[shape.len() - 1] % packing.2 == 0;
        let name = match name.starts_with("lm_head") {
            true => format!("language_model.{name}"),
            false => format!("language_model.model.{name}"),
        };
        let path = name.strip_suffix(".weight").filter(|_| matrix && wanted(&name));
        let Some(path) = path else {
            file.insert(name.clone(), tensor.clone());
            wide.insert(name, tensor);
            continue;
        };
        let (parts, numbers) = packed(&shape, packing, &mut rng)?;
        file.extend(
            parts
                .into_iter()
                .map(|(end, part)| (format!("{path}.{end}"), part)),
        );
        let (mode, bits, group) = packing;
        if used % 3 != 0 {
            quantization[path] = match mode {
                // Without a mode it is affine, whatever the others are.
                "affine" => json!({"group_size": group, "bits": bits}),
                "global" => json!({"group_size": group, "bits": bits, "mode": "nvfp4", "global_scale": true}),
                mode => json!({"group_size": group, "bits": bits, "mode": mode}),
            };
        }
        used += 1;
        wide.insert(name, numbers);
    }
    let mut own = config.clone();
    own["quantization"] = quantization.clone();
    own["quantization_config"] = quantization;
    let (packed, floats) = (TempDir::new()?, TempDir::new()?);
    write(packed.path(), &own, &file)?;
    write(floats.path(), config, &wide)?;
    Ok((packed, floats, used))
}

/// ollama#15744 (C050) and imp#1282 (C049): routers, shared gates, stacked experts, fused projections and embeddings that are
/// heads, each in every packing, named in the configuration or not.
#[test]
fn c049_c050_every_matrix_of_every_family_may_be_packed_in_every_way() -> Result<()> {
    for config in families() {
        let (packed, wide, used) = conversions(&config, |_| true)?;
        assert!(used > 20, "{used} matrices");
        let what = config["model_type"].to_string();
        let apart = law::apart(&what, packed.path(), wide.path())?;
        println!("{}: {used} matrices, {apart:e} apart", config["model_type"]);
        // Seen: 4e-5. Both are the same numbers, but sums of affine cancel what its biases are for.
        assert!(apart < 2e-4, "{}: {apart}", config["model_type"]);
    }
    Ok(())
}

#[test]
fn what_meets_packed_gates_and_routers_is_not_rounded() -> Result<()> {
    let gates = [
        "mlp.gate.",
        "shared_expert_gate.",
        "in_proj_a.",
        "in_proj_b.",
        "in_proj_ba.",
    ];
    for config in families() {
        let (packed, ..) = conversions(&config, |name| gates.iter().any(|gate| name.contains(gate)))?;
        let rounded = logits(&model(packed.path(), &LoadOptions::default())?)?;
        let full = logits(&model(packed.path(), &in_full())?)?;
        assert!(rounded == full, "{}", config["model_type"]);
    }
    Ok(())
}

#[test]
fn a_conversion_is_loaded_with_its_tokenizer_and_writes_a_text() -> Result<()> {
    let dir = TempDir::new()?;
    for file in ["config.json", "model.safetensors", "generation_config.json"] {
        std::fs::copy(golden("4bit").join(file), dir.path().join(file))?;
    }
    let tokenizer = root().join("examples/models/demo-target/tokenizer.json");
    std::fs::copy(tokenizer, dir.path().join("tokenizer.json"))?;
    let loaded = recant::load(dir.path())?;
    let text = |drafts: usize| -> Result<Vec<u32>> {
        let mut session = match drafts {
            0 => loaded.session().build()?,
            n => loaded.session().ngram().draft_tokens(n).build()?,
        };
        session.start("def read_lines(path):\n    ")?;
        for event in session.generate(32) {
            event?;
        }
        Ok(session.tokens().to_vec())
    };
    assert_eq!(text(4)?, text(0)?);
    Ok(())
}

/// A head alone, as mlx-vlm stores it: no prefix, 1 + w, its own packing of each matrix.
#[test]
fn a_head_of_packed_matrices_is_the_head_of_their_numbers() -> Result<()> {
    let source = folder("demo-target").ok_or("no demo target")?;
    let target = model(&source, &in_full())?;
    let own = safetensors::load(source.join("model.safetensors"), &Device::Cpu)?;
    let mut config: Value = serde_json::from_slice(&std::fs::read(source.join("config.json"))?)?;
    config["model_type"] = json!("qwen3_5_mtp");
    let (mut file, mut wide, mut rng) = (Tensors::new(), Tensors::new(), Rng(12));
    let mut names: Vec<&String> = own.keys().filter(|name| name.starts_with("mtp.")).collect();
    names.sort();
    for (i, full) in names.into_iter().enumerate() {
        let name = &full["mtp.".len()..];
        if own[full].rank() == 1 {
            let norm = (own[full].to_dtype(DType::F32)? + 1.0)?;
            file.insert(name.to_owned(), norm.clone());
            wide.insert(name.to_owned(), norm);
            continue;
        }
        let (parts, numbers) = packed(own[full].dims(), PACKINGS[i % PACKINGS.len()], &mut rng)?;
        let path = name.strip_suffix(".weight").ok_or("no weight")?;
        file.extend(
            parts
                .into_iter()
                .map(|(end, part)| (format!("{path}.{end}"), part)),
        );
        wide.insert(name.to_owned(), numbers);
    }
    let hidden = Tensor::randn(0.0_f32, 1.0, (6, 256), &Device::Cpu)?;
    let run = |tensors: &Tensors| -> Result<Tensor> {
        let dir = TempDir::new()?;
        write(dir.path(), &config, tensors)?;
        let head = MtpHead::load(&Qwen35, &target, &Folder::open(dir.path())?, &in_full())?;
        Ok(head.forward(&hidden, &text_ids(6)?, &mut head.new_caches()?)?)
    };
    let apart = relative_error(&run(&file)?, &run(&wide)?)?;
    println!("{apart:e} apart");
    assert!(apart < 3e-5, "{apart}");
    Ok(())
}
