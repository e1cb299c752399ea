//! Releases of the Hub in FP8 and NVFP4: the numbers that the programs have which make them, models in every form against
//! models of the same numbers in f32, and the law.
//!
//! `tests/reference/fp8.py` writes what is compared with.

mod common;
#[path = "common/fp8.rs"]
mod fp8;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use common::checkpoint::{logits, prefixed, refusal, tensors, write, write_shards, Tensors, HUB};
use common::law::{self, greedy, in_full, keeps_the_law, model};
use common::{bits, feed, folder, relative_error, seeded, text_ids, Result};
use fp8::{floats, rounded, wide, Form};
use recant::candle::{safetensors, DType, Device, Tensor};
use recant::core::{CacheOptions, LanguageModel};
use recant::{GroupFormat, LoadOptions};
use recant_mtp::MtpHead;
use recant_weights::{Folder, Stored};
use serde_json::{json, Value};
use tempfile::TempDir;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/golden/fp8")
        .join(name)
}

/// compressed-tensors and ModelOpt multiply in f32 here: a scale of two parts is rounded to f32, and its product with a code is.
/// So is ours, bit for bit.
#[test]
fn c051_every_matrix_holds_the_numbers_that_its_makers_unpack() -> Result<()> {
    let all: HashMap<String, Tensor> = safetensors::load(golden("matrices.safetensors"), &Device::Cpu)?;
    let configs: Value = serde_json::from_slice(&std::fs::read(golden("matrices.json"))?)?;
    let configs = configs.as_object().ok_or("no configurations")?;
    assert_eq!(configs.len(), 14);
    for (name, config) in configs {
        let path = "model.language_model.layers.0.mlp.up_proj";
        let mut file = Tensors::new();
        for (full, tensor) in &all {
            let end = full
                .strip_prefix(name.as_str())
                .and_then(|end| end.strip_prefix('.'));
            if let Some(end) = end.filter(|end| !end.contains('.') && *end != "expected") {
                file.insert(format!("{path}.{end}"), tensor.clone());
            }
        }
        assert!(file.len() > 1, "{name}");
        let dir = TempDir::new()?;
        write(dir.path(), &json!({"quantization_config": config}), &file)?;
        let folder = Folder::open(dir.path())?;
        let expected = &all[&format!("{name}.expected")];
        let (rows, columns) = expected.dims2()?;
        let mut weights = folder.weights().map_err(|error| format!("{name}: {error}"))?;
        let stored = weights.take_matrix("layers.0.mlp.up_proj.weight", [rows, columns])?;
        let narrow = ["narrow", "odd"].iter().any(|end| name.ends_with(end));
        assert_eq!(matches!(stored, Stored::Float(_)), narrow, "{name}");
        let found = wide(&stored)?;
        let different = found
            .iter()
            .zip(&floats(expected)?)
            .filter(|(a, b)| a.to_bits() != b.to_bits() && (**a != 0.0 || **b != 0.0))
            .count();
        assert_eq!((found.len(), different), (rows * columns, 0), "{name}");
        weights.finish()?;
    }
    Ok(())
}

/// Names of the matrices that releases leave as they are.
const PLAIN: [&str; 7] = [
    "in_proj_a.",
    "in_proj_b.",
    "in_proj_ba.",
    "conv1d.",
    "mlp.gate.",
    "shared_expert_gate.",
    "mtp.fc.",
];

/// A release: its configuration's entry, and in which form a matrix is stored in it.
struct Release {
    name: &'static str,
    config: Value,
    form: fn(&str) -> Option<Form>,
}

fn compressed(groups: &[Value]) -> Value {
    let groups: serde_json::Map<String, Value> = groups
        .iter()
        .enumerate()
        .map(|(i, weights)| {
            (
                format!("group_{i}"),
                json!({"targets": ["Linear"], "weights": weights}),
            )
        })
        .collect();
    json!({
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": groups,
        "kv_cache_scheme": {"num_bits": 8, "type": "float"},
    })
}

/// As published: FP8 in blocks by Qwen; FP8 by row of everything, gates, embedding and heads included; NVFP4 of ModelOpt with
/// attention in FP8 of one scale; NVFP4 of compressed-tensors with some matrices in FP8 by row.
fn releases() -> [Release; 4] {
    let rows = json!({"num_bits": 8, "type": "float", "strategy": "channel"});
    let nvfp4 = json!({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16});
    [
        Release {
            name: "blocks",
            config: json!({
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
                // It forgets mtp.fc (vLLM#38832).
                "modules_to_not_convert": ["lm_head", "model.embed_tokens"],
            }),
            form: |name| {
                let plain = PLAIN.iter().any(|part| name.contains(part));
                let outer = name.contains("embed_tokens") || name.contains("lm_head");
                (!plain && !outer).then_some(Form::Blocks([128, 128]))
            },
        },
        Release {
            name: "rows",
            config: compressed(std::slice::from_ref(&rows)),
            form: |name| (!name.contains("conv1d.")).then_some(Form::Rows),
        },
        Release {
            name: "modelopt",
            config: json!({
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {
                    "lm_head": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
                    "model.language_model.layers.3.self_attn.q_proj": {"quant_algo": "FP8"},
                },
            }),
            form: |name| match PLAIN.iter().any(|part| name.contains(part)) {
                true => None,
                false if name.contains("attn.") => Some(Form::One),
                false => Some(Form::ModelOpt),
            },
        },
        Release {
            name: "packed",
            config: compressed(&[rows, nvfp4]),
            form: |name| match PLAIN.iter().any(|part| name.contains(part)) {
                true => None,
                // Layers near the end and the head, as in Qwen3.8-27B.
                false if name.contains("layers.3.mlp.") || name.contains("embed_tokens") => Some(Form::Rows),
                false => Some(Form::Packed),
            },
        },
    ]
}

impl Release {
    /// Tensors by their names in a file as this release has them, the same numbers in f32, and how many matrices it rounds.
    fn of(&self, tensors: &Tensors) -> Result<(Tensors, Tensors, usize)> {
        let (mut file, mut wide, mut count) = (Tensors::new(), Tensors::new(), 0);
        for (name, tensor) in tensors {
            let path = name.strip_suffix(".weight").filter(|_| tensor.rank() == 2);
            let form = (self.form)(name).filter(|form| {
                // 24 numbers are no groups of 16.
                let groups = matches!(form, Form::ModelOpt | Form::Packed);
                !groups || tensor.dims().last().is_some_and(|columns| columns % 16 == 0)
            });
            let (Some(path), Some(form)) = (path, form) else {
                file.insert(name.clone(), tensor.clone());
                wide.insert(name.clone(), tensor.clone());
                continue;
            };
            let (parts, numbers) = rounded(form, tensor)?;
            for (end, part) in parts {
                file.insert(format!("{path}.{end}"), part);
            }
            if name.contains("self_attn.k_proj") {
                // Of cached keys and values in 8 bits, in the two spellings that there are (vLLM#54623).
                let attention = path.trim_end_matches(".k_proj");
                let scale = Tensor::new(&[0.75_f32], &Device::Cpu)?;
                let names = match self.name {
                    "packed" => ["k_scale", "v_scale"],
                    "modelopt" => ["k_proj.k_scale", "v_proj.v_scale"],
                    _ => ["", ""],
                };
                for name in names.into_iter().filter(|name| !name.is_empty()) {
                    file.insert(format!("{attention}.{name}"), scale.clone());
                }
            }
            wide.insert(name.clone(), numbers);
            count += 1;
        }
        Ok((file, wide, count))
    }

    fn config(&self, of: &Value) -> Value {
        let mut config = of.clone();
        config["quantization_config"] = self.config.clone();
        config
    }
}

fn demo() -> Result<(Value, Tensors)> {
    let source = folder("demo-target").ok_or("no demo target")?;
    let config = serde_json::from_slice(&std::fs::read(source.join("config.json"))?)?;
    let tensors = safetensors::load(source.join("model.safetensors"), &Device::Cpu)?;
    Ok((config, tensors.into_iter().collect()))
}

/// The demo target as a release has it, and of the same numbers in f32.
fn demo_in(release: &Release) -> Result<(TempDir, TempDir)> {
    let (config, tensors) = demo()?;
    let (file, numbers, count) = release.of(&tensors)?;
    assert!(count >= 57, "{}: {count}", release.name);
    let (own, wide) = (TempDir::new()?, TempDir::new()?);
    write(own.path(), &release.config(&config), &file)?;
    write(wide.path(), &config, &numbers)?;
    Ok((own, wide))
}

#[test]
fn a_release_in_any_form_writes_the_tokens_of_its_numbers() -> Result<()> {
    let prompt = text_ids(24)?;
    for release in releases() {
        let (own, wide) = demo_in(&release)?;
        let (found, ahead) = greedy(&model(own.path(), &in_full())?, &prompt, 48)?;
        let (expected, margins) = greedy(&model(wide.path(), &in_full())?, &prompt, 48)?;
        assert_eq!(found, expected, "{}", release.name);
        let apart = ahead
            .iter()
            .zip(&margins)
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, f32::max);
        println!("{}: margins differ by at most {apart:e}", release.name);
        assert!(apart < 1e-4, "{}: {apart}", release.name);
    }
    Ok(())
}

#[test]
fn a_release_in_any_form_keeps_the_law_and_drafts_taken_back_leave_nothing_behind() -> Result<()> {
    let text = text_ids(100)?;
    for release in releases() {
        let (own, _) = demo_in(&release)?;
        // FP8 meets activations in full in any case.
        let both = [LoadOptions::default(), in_full()];
        let count = if release.name == "packed" { 2 } else { 1 };
        for options in &both[..count] {
            keeps_the_law(release.name, &model(own.path(), options)?, &text)?;
        }
    }
    Ok(())
}

/// vllm#38832: a head of which all but `fc` is quantized, whatever the configuration says of it.
#[test]
fn c041_a_head_in_the_form_of_its_release_drafts_as_its_numbers_do_and_changes_no_text() -> Result<()> {
    let hidden = Tensor::randn(0.0_f32, 1.0, (6, 256), &Device::Cpu)?;
    let tokens = text_ids(6)?;
    for release in releases() {
        let (own, wide) = demo_in(&release)?;
        let run = |dir: &TempDir| -> Result<Tensor> {
            let target = model(dir.path(), &in_full())?;
            let folder = Folder::open(dir.path())?;
            let head = MtpHead::load(seeded::family(folder.config()), &target, &folder, &in_full())?;
            Ok(head.forward(&hidden, &tokens, &mut head.new_caches()?)?)
        };
        let apart = relative_error(&run(&own)?, &run(&wide)?)?;
        println!("{}: {apart:e} apart", release.name);
        assert!(apart < 3e-5, "{}: {apart}", release.name);

        let tokenizer = folder("demo-target")
            .ok_or("no demo target")?
            .join("tokenizer.json");
        std::fs::copy(tokenizer, own.path().join("tokenizer.json"))?;
        let loaded = recant::load(own.path())?;
        let text = |drafts: bool| -> Result<(Vec<u32>, usize)> {
            let session = loaded.session();
            let mut session = if drafts {
                session.mtp().draft_tokens(3)
            } else {
                session
            }
            .build()?;
            session.start("def read_lines(path):\n    ")?;
            for event in session.generate(40) {
                event?;
            }
            Ok((session.tokens().to_vec(), session.stats().accepted))
        };
        let ((plain, _), (drafted, accepted)) = (text(false)?, text(true)?);
        assert_eq!(drafted, plain, "{}", release.name);
        assert!(accepted > 5, "{}: {accepted} drafts were right", release.name);
    }
    Ok(())
}

/// Published: a model in NVFP4 with a head in BF16, experts apart in one and together in the other.
#[test]
fn a_head_and_its_model_may_be_stored_in_different_forms() -> Result<()> {
    let [blocks, ..] = releases();
    let (config, plain) = demo()?;
    let (file, ..) = blocks.of(&plain)?;
    let of = |name: &str| name.starts_with("mtp.");
    let mixed = |head: &Tensors, model: &Tensors| -> Tensors {
        let head = head.iter().filter(|(name, _)| of(name));
        let model = model.iter().filter(|(name, _)| !of(name));
        head.chain(model)
            .map(|(name, tensor)| (name.clone(), tensor.clone()))
            .collect()
    };
    let hidden = Tensor::randn(0.0_f32, 1.0, (6, 256), &Device::Cpu)?;
    let tokens = text_ids(6)?;
    // Bits of a head and of a model.
    let run = |config: &Value, file: &Tensors| -> Result<[Vec<u32>; 2]> {
        let dir = TempDir::new()?;
        write(dir.path(), config, file)?;
        let target = model(dir.path(), &in_full())?;
        let folder = Folder::open(dir.path())?;
        let head = MtpHead::load(seeded::family(folder.config()), &target, &folder, &in_full())?;
        let drafted = bits(&head.forward(&hidden, &tokens, &mut head.new_caches()?)?)?;
        let fed = feed(
            &target,
            &mut target.new_caches(&CacheOptions::default())?,
            &tokens,
        )?;
        Ok([drafted, fed])
    };
    let [head, text] = run(&config, &plain)?;
    let own = blocks.config(&config);
    let [found_head, found_text] = run(&own, &mixed(&plain, &file))?;
    assert!(found_head == head && found_text != text);
    let [found_head, found_text] = run(&own, &mixed(&file, &plain))?;
    assert!(found_head != head && found_text == text);

    let config = seeded::moe(|_| {});
    let trunk = prefixed(&apart(&tensors(&config)?)?, HUB, "");
    let (file, ..) = blocks.of(&trunk)?;
    let mut together = mixture_head(&config)?;
    for (fused, parts) in [
        ("gate_up_proj", &["gate_proj", "up_proj"][..]),
        ("down_proj", &["down_proj"][..]),
    ] {
        let experts = (0..8)
            .map(|e| {
                let parts: Vec<Tensor> = parts
                    .iter()
                    .filter_map(|part| {
                        together.remove(&format!("mtp.layers.0.mlp.experts.{e}.{part}.weight"))
                    })
                    .collect();
                Ok(Tensor::cat(&parts, 0)?)
            })
            .collect::<Result<Vec<Tensor>>>()?;
        let name = format!("mtp.layers.0.mlp.experts.{fused}");
        together.insert(name, Tensor::stack(&experts, 0)?);
    }
    let dir = TempDir::new()?;
    write(
        dir.path(),
        &blocks.config(&config),
        &file.into_iter().chain(together).collect(),
    )?;
    let target = model(dir.path(), &in_full())?;
    let folder = Folder::open(dir.path())?;
    MtpHead::load(seeded::family(folder.config()), &target, &folder, &in_full())?;
    Ok(())
}

fn families() -> Vec<Value> {
    let width = |text: &mut Value| text["shared_expert_intermediate_size"] = json!(160);
    vec![
        seeded::dense(|text| text["linear_num_value_heads"] = json!(6)),
        seeded::dense(|text| text["tie_word_embeddings"] = json!(true)),
        seeded::moe(width),
        seeded::next(width),
    ]
}

/// Fused experts each on its own, gate and up projection apart.
fn apart(tensors: &Tensors) -> Result<Tensors> {
    let mut out = Tensors::new();
    for (name, tensor) in tensors {
        let Some((prefix, which)) = name.split_once(".experts.") else {
            out.insert(name.clone(), tensor.clone());
            continue;
        };
        for e in 0..tensor.dims()[0] {
            let expert = tensor.get(e)?;
            let parts = match which {
                "gate_up_proj" => {
                    let half = expert.dims()[0] / 2;
                    vec![
                        ("gate_proj", expert.narrow(0, 0, half)?),
                        ("up_proj", expert.narrow(0, half, half)?),
                    ]
                }
                _ => vec![("down_proj", expert)],
            };
            for (part, tensor) in parts {
                let name = format!("{prefix}.experts.{e}.{part}.weight");
                out.insert(name, tensor.contiguous()?);
            }
        }
    }
    Ok(out)
}

/// mlx-lm#1224, omlx#190 (C052): experts each with its scales; vllm.cpp#164 (C053): a head that is packed, or in FP8; imp#1282
/// (C049): an embedding in FP8 or NVFP4 that is the head; the fused projections of Qwen3-Next.
#[test]
fn c049_c051_c052_c053_every_family_in_every_form_is_the_model_of_its_numbers() -> Result<()> {
    for config in families() {
        let tensors = apart(&tensors(&config)?)?;
        for release in releases() {
            let (file, numbers, count) = release.of(&prefixed(&tensors, HUB, ""))?;
            assert!(count > 20, "{count} matrices");
            let (own, wide) = (TempDir::new()?, TempDir::new()?);
            write_shards(own.path(), &release.config(&config), &file)?;
            write(wide.path(), &config, &numbers)?;
            let what = format!("{} {}", config["model_type"], release.name);
            let apart = law::apart(&what, own.path(), wide.path())?;
            println!("{what}: {count} matrices, {apart:e} apart");
            // Seen: 3e-5.
            assert!(apart < 1e-4, "{what}: {apart}");
        }
    }
    Ok(())
}

/// Where there is no own kernel, codes are widened: the same numbers, by the same sums as those of the model in f32.
#[test]
fn a_release_runs_on_ops_of_candle_too() -> Result<()> {
    let options = LoadOptions {
        backend: recant::Backend::Composed,
        ..LoadOptions::default()
    };
    let config = seeded::next(|_| {});
    let tensors = prefixed(&apart(&tensors(&config)?)?, HUB, "");
    for release in releases() {
        let (file, numbers, _) = release.of(&tensors)?;
        let run = |config: &Value, file: &Tensors| -> Result<Vec<u32>> {
            let dir = TempDir::new()?;
            write(dir.path(), config, file)?;
            logits(&model(dir.path(), &options)?)
        };
        assert!(
            run(&release.config(&config), &file)? == run(&config, &numbers)?,
            "{}",
            release.name
        );
    }
    Ok(())
}

/// Saved in another format, its numbers are rounded once: as they are where they come in f32.
#[test]
fn a_release_that_is_saved_in_groups_is_its_numbers_rounded_once() -> Result<()> {
    let format = GroupFormat {
        bits: 4,
        group: 32,
        affine: true,
        scales: DType::BF16,
    };
    for config in families() {
        let tensors = prefixed(&apart(&tensors(&config)?)?, HUB, "");
        for release in releases() {
            let (file, numbers, _) = release.of(&tensors)?;
            let run = |config: &Value, file: &Tensors| -> Result<Vec<u32>> {
                let dir = TempDir::new()?;
                let (from, to) = (dir.path().join("from"), dir.path().join("to"));
                std::fs::create_dir(&from)?;
                write(&from, config, file)?;
                recant::save(&from, &to, format, &mut |_, _| {})?;
                logits(&model(&to, &LoadOptions::default())?)
            };
            assert!(
                run(&release.config(&config), &file)? == run(&config, &numbers)?,
                "{} {}",
                config["model_type"],
                release.name
            );
        }
    }
    Ok(())
}

/// The tensors of a head of a small mixture, experts each on its own.
fn mixture_head(config: &Value) -> Result<Tensors> {
    let source = seeded::Seeded {
        seed: 6,
        dtype: DType::F32,
    };
    let text = &config["text_config"];
    let width = |name: &str| text[name].as_u64().map(|n| n as usize).ok_or("no width");
    let (hidden, inner, shared) = (
        width("hidden_size")?,
        width("moe_intermediate_size")?,
        width("shared_expert_intermediate_size")?,
    );
    let (heads, kv) = (
        width("num_attention_heads")? * width("head_dim")?,
        width("num_key_value_heads")? * width("head_dim")?,
    );
    let mut shapes = vec![
        ("fc".to_owned(), vec![hidden, 2 * hidden]),
        ("norm".to_owned(), vec![hidden]),
        ("pre_fc_norm_embedding".to_owned(), vec![hidden]),
        ("pre_fc_norm_hidden".to_owned(), vec![hidden]),
        ("layers.0.input_layernorm".to_owned(), vec![hidden]),
        ("layers.0.post_attention_layernorm".to_owned(), vec![hidden]),
        ("layers.0.self_attn.q_proj".to_owned(), vec![2 * heads, hidden]),
        ("layers.0.self_attn.k_proj".to_owned(), vec![kv, hidden]),
        ("layers.0.self_attn.v_proj".to_owned(), vec![kv, hidden]),
        ("layers.0.self_attn.o_proj".to_owned(), vec![hidden, heads]),
        ("layers.0.self_attn.q_norm".to_owned(), vec![width("head_dim")?]),
        ("layers.0.self_attn.k_norm".to_owned(), vec![width("head_dim")?]),
        (
            "layers.0.mlp.gate".to_owned(),
            vec![width("num_experts")?, hidden],
        ),
        ("layers.0.mlp.shared_expert_gate".to_owned(), vec![1, hidden]),
    ];
    let mut mlp = |prefix: String, width: usize| {
        shapes.push((format!("{prefix}.gate_proj"), vec![width, hidden]));
        shapes.push((format!("{prefix}.up_proj"), vec![width, hidden]));
        shapes.push((format!("{prefix}.down_proj"), vec![hidden, width]));
    };
    mlp("layers.0.mlp.shared_expert".to_owned(), shared);
    for e in 0..width("num_experts")? {
        mlp(format!("layers.0.mlp.experts.{e}"), inner);
    }
    shapes
        .into_iter()
        .map(|(name, shape)| {
            let name = format!("mtp.{name}.weight");
            Ok((name.clone(), source.tensor(&name, &shape)?))
        })
        .collect()
}

#[test]
fn c042_c052_a_mixture_in_fp8_has_a_head_with_experts_in_fp8() -> Result<()> {
    let config = seeded::moe(|text| text["shared_expert_intermediate_size"] = json!(160));
    let mut tensors = prefixed(&apart(&tensors(&config)?)?, HUB, "");
    tensors.extend(mixture_head(&config)?);
    let hidden = Tensor::randn(0.0_f32, 1.0, (6, 64), &Device::Cpu)?;
    for release in releases() {
        let (file, numbers, _) = release.of(&tensors)?;
        assert!(
            file.contains_key("mtp.layers.0.mlp.experts.7.up_proj.weight_scale") || release.name == "blocks"
        );
        let run = |config: &Value, file: &Tensors| -> Result<Tensor> {
            let dir = TempDir::new()?;
            write(dir.path(), config, file)?;
            let target = model(dir.path(), &in_full())?;
            let folder = Folder::open(dir.path())?;
            let head = MtpHead::load(seeded::family(folder.config()), &target, &folder, &in_full())?;
            Ok(head.forward(&hidden, &[1, 2, 3, 4, 5, 6], &mut head.new_caches()?)?)
        };
        let apart = relative_error(&run(&release.config(&config), &file)?, &run(&config, &numbers)?)?;
        println!("{}: {apart:e} apart", release.name);
        assert!(apart < 3e-5, "{}: {apart}", release.name);

        // The scales of one expert are missing.
        let path = "mtp.layers.0.mlp.experts.5.up_proj";
        let mut broken = file.clone();
        broken.retain(|name, _| !name.starts_with(&format!("{path}.weight_scale")));
        let dir = TempDir::new()?;
        write(dir.path(), &release.config(&config), &broken)?;
        let head = Folder::open(dir.path())?;
        let error = head.mtp().err().ok_or("a head without a scale")?.to_string();
        assert!(error.contains(path) && error.contains("weight_scale"), "{error}");
    }
    Ok(())
}

#[test]
fn a_release_is_told_about_form_by_form_and_not_refused() -> Result<()> {
    let config = seeded::dense(|_| {});
    let tensors = prefixed(&tensors(&config)?, HUB, "");
    for release in releases() {
        let (file, ..) = release.of(&tensors)?;
        let dir = TempDir::new()?;
        write(dir.path(), &release.config(&config), &file)?;
        let report = recant::inspect(dir.path());
        let expected: u64 = tensors.values().map(|tensor| tensor.elem_count() as u64).sum();
        assert_eq!(report.parameters, expected, "{}", release.name);
        let formats: Vec<&str> = report.formats.keys().map(String::as_str).collect();
        let wanted: &[&str] = match release.name {
            "blocks" => &["F32", "FP8 in blocks of 128 x 128"],
            "rows" => &["F32", "FP8 by row"],
            "modelopt" => &["F32", "FP8 of one scale", "NVFP4"],
            _ => &["F32", "FP8 by row", "NVFP4"],
        };
        assert_eq!(formats, wanted, "{}", release.name);
        // There is no tokenizer in the folder.
        assert!(
            report.refusals.iter().all(|reason| reason.contains("tokenizer")),
            "{:?}",
            report.refusals
        );
        let (own, _) = demo_in(&release)?;
        assert_eq!(
            recant::inspect(own.path()).mtp,
            recant::Mtp::Complete,
            "{}",
            release.name
        );
    }
    Ok(())
}

/// unsloth#6978 (C051): scales that nothing uses, and numbers without scales.
#[test]
fn c051_a_model_with_a_scale_too_few_or_too_many_is_refused_by_its_name() -> Result<()> {
    let config = seeded::dense(|_| {});
    let tensors = prefixed(&tensors(&config)?, HUB, "");
    let path = format!("{HUB}layers.2.mlp.up_proj");
    for release in releases() {
        let (file, ..) = release.of(&tensors)?;
        let scale = file
            .keys()
            .find(|name| name.starts_with(&format!("{path}.weight_scale")))
            .ok_or("no scale")?
            .clone();
        let refused = |edit: &dyn Fn(&mut Tensors) -> Result<()>| -> Result<String> {
            let mut file = file.clone();
            edit(&mut file)?;
            let dir = TempDir::new()?;
            write(dir.path(), &release.config(&config), &file)?;
            Ok(refusal(dir.path()))
        };
        let error = refused(&|file| {
            file.remove(&scale);
            Ok(())
        })?;
        assert!(
            error.contains(&path) && error.contains("weight_scale"),
            "{}: {error}",
            release.name
        );
        let error = refused(&|file| {
            let plain = tensors[&format!("{path}.weight")].clone();
            file.remove(&format!("{path}.weight_packed"));
            file.insert(format!("{path}.weight"), plain);
            Ok(())
        })?;
        assert!(
            error.contains(&path) && error.contains("nothing uses it"),
            "{}: {error}",
            release.name
        );
    }
    Ok(())
}
