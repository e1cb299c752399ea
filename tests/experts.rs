//! Checkpoints with mixtures of experts: every spelling of one model gives the same logits, fields do what they say, and a
//! set that is not whole is refused by name.

mod common;

use common::checkpoint::{logits_of, prefixed, refusal_of, tensors, write, Tensors, HUB};
use common::{bits, folder, folder_or_skip, seeded, Result};
use recant::candle::{DType, Tensor};
use recant::core::{CacheOptions, LanguageModel, Rows, Segment};
use serde_json::{json, Value};
use tempfile::TempDir;

const EXPERTS: usize = 8;

/// A checkpoint of every family that has experts, with its prefix.
fn families() -> Result<Vec<(Value, Tensors)>> {
    let (moe, next) = (seeded::moe(|_| {}), seeded::next(|_| {}));
    let (in_moe, in_next) = (tensors(&moe)?, tensors(&next)?);
    Ok(vec![
        (moe, prefixed(&in_moe, HUB, "")),
        (next, prefixed(&in_next, "model.", "")),
    ])
}

/// Replaces each layer's experts by what `spell` makes of their prefix, gate and up, and down.
fn respelled(
    tensors: &Tensors,
    spell: impl Fn(&mut Tensors, &str, &Tensor, &Tensor) -> Result<()>,
) -> Result<Tensors> {
    let mut out = tensors.clone();
    let fused: Vec<&String> = tensors
        .keys()
        .filter(|name| name.ends_with(".experts.gate_up_proj"))
        .collect();
    assert!(!fused.is_empty(), "no experts");
    for name in fused {
        let prefix = name.trim_end_matches(".experts.gate_up_proj");
        let down = format!("{prefix}.experts.down_proj");
        out.remove(name);
        out.remove(&down);
        spell(&mut out, prefix, &tensors[name], &tensors[&down])?;
    }
    Ok(out)
}

/// One tensor for each projection of each expert.
fn apart(names: [&'static str; 3]) -> impl Fn(&mut Tensors, &str, &Tensor, &Tensor) -> Result<()> {
    move |out, prefix, gate_up, down| {
        let width = gate_up.dims()[1] / 2;
        for e in 0..EXPERTS {
            let (gate_up, down) = (gate_up.get(e)?, down.get(e)?);
            let parts = [
                gate_up.narrow(0, 0, width)?,
                gate_up.narrow(0, width, width)?,
                down,
            ];
            for (name, part) in names.iter().zip(parts) {
                out.insert(format!("{prefix}.experts.{e}.{name}.weight"), part);
            }
        }
        Ok(())
    }
}

const USUAL: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

fn stacked(out: &mut Tensors, prefix: &str, gate_up: &Tensor, down: &Tensor) -> Result<()> {
    let width = gate_up.dims()[1] / 2;
    let halves = [0, width].map(|start| gate_up.narrow(1, start, width));
    let [gate, up] = halves;
    for (name, part) in USUAL
        .iter()
        .zip([gate?.contiguous()?, up?.contiguous()?, down.clone()])
    {
        out.insert(format!("{prefix}.switch_mlp.{name}.weight"), part);
    }
    Ok(())
}

#[test]
fn c042_c064_experts_load_the_same_together_apart_and_stacked() -> Result<()> {
    for (config, fused) in families()? {
        let want = logits_of(|dir| write(dir, &config, &fused))?;
        for (what, tensors) in [
            ("apart", respelled(&fused, apart(USUAL))?),
            ("apart, w1 w3 w2", respelled(&fused, apart(["w1", "w3", "w2"]))?),
            ("stacked", respelled(&fused, stacked)?),
        ] {
            let got = logits_of(|dir| write(dir, &config, &tensors))?;
            assert!(got == want, "{what} in {}", config["model_type"]);
        }
    }
    Ok(())
}

#[test]
fn c042_c064_a_set_with_an_expert_missing_or_too_many_is_refused_by_its_name() -> Result<()> {
    for (config, fused) in families()? {
        let whole = respelled(&fused, apart(USUAL))?;
        let name = |e: usize, part: &str| {
            let end = format!("layers.1.mlp.experts.{e}.{part}.weight");
            let found = whole.keys().find(|name| name.ends_with(&end));
            found.cloned().unwrap_or(format!("model.{end}"))
        };
        for (e, part) in [(0, "gate_proj"), (5, "up_proj"), (7, "down_proj")] {
            let mut tensors = whole.clone();
            tensors.remove(&name(e, part)).ok_or("no such tensor")?;
            let error = refusal_of(|dir| write(dir, &config, &tensors))?;
            assert!(
                error.contains(&format!("layers.1.mlp.experts.{e}.{part}.weight")),
                "{error}"
            );
        }
        // A whole expert, the first.
        let mut tensors = whole.clone();
        for part in USUAL {
            tensors.remove(&name(0, part)).ok_or("no such tensor")?;
        }
        let error = refusal_of(|dir| write(dir, &config, &tensors))?;
        assert!(
            error.contains("layers.1.mlp.experts.0.gate_proj.weight"),
            "{error}"
        );
        // More than the configuration has.
        let mut tensors = whole.clone();
        let extra = name(0, "gate_proj").replace("experts.0.", "experts.8.");
        tensors.insert(extra.clone(), whole[&name(0, "gate_proj")].clone());
        let error = refusal_of(|dir| write(dir, &config, &tensors))?;
        assert!(error.contains(&extra), "{error}");
        // None at all.
        let none: Tensors = fused
            .iter()
            .filter(|(n, _)| !n.contains(".experts."))
            .map(|(n, t)| (n.clone(), t.clone()))
            .collect();
        let error = refusal_of(|dir| write(dir, &config, &none))?;
        assert!(error.contains("layers.0.mlp.experts.gate_up_proj"), "{error}");
        // Twice.
        let mut tensors = whole.clone();
        tensors.extend(fused.iter().map(|(n, t)| (n.clone(), t.clone())));
        let error = refusal_of(|dir| write(dir, &config, &tensors))?;
        assert!(error.contains(".experts.gate_up_proj"), "{error}");
    }
    Ok(())
}

#[test]
fn tensors_of_another_shape_than_the_configuration_says_are_named_with_both_shapes() -> Result<()> {
    for (config, tensors) in families()? {
        for (field, value, words) in [
            ("num_experts", 9, ["mlp.gate.weight", "[9, 64]", "[8, 64]"]),
            (
                "moe_intermediate_size",
                25,
                ["mlp.experts.gate_up_proj", "[8, 50, 64]", "[8, 48, 64]"],
            ),
            (
                "shared_expert_intermediate_size",
                41,
                ["mlp.shared_expert.gate_proj.weight", "[41, 64]", "[40, 64]"],
            ),
        ] {
            let mut config = config.clone();
            match config.get_mut("text_config") {
                Some(text) => text[field] = json!(value),
                None => config[field] = json!(value),
            }
            let error = refusal_of(|dir| write(dir, &config, &tensors))?;
            assert!(
                words.iter().all(|word| error.contains(word)),
                "{field} {value}: {error}"
            );
        }
        for (end, words) in [
            ("layers.2.mlp.gate.weight", ["[8, 64]", "[8, 63]"]),
            ("layers.2.mlp.shared_expert_gate.weight", ["[1, 64]", "[1, 63]"]),
        ] {
            let mut tensors = tensors.clone();
            let name = tensors
                .keys()
                .find(|name| name.ends_with(end))
                .ok_or("no such tensor")?
                .clone();
            let narrow = tensors[&name].narrow(1, 0, 63)?.contiguous()?;
            tensors.insert(name, narrow);
            let error = refusal_of(|dir| write(dir, &config, &tensors))?;
            assert!(
                error.contains(end) && words.iter().all(|word| error.contains(word)),
                "{error}"
            );
        }
    }
    Ok(())
}

#[test]
fn flat_and_nested_configurations_load_the_same() -> Result<()> {
    let nested = seeded::moe(|_| {});
    let tensors = tensors(&nested)?;
    let want = logits_of(|dir| write(dir, &nested, &prefixed(&tensors, HUB, "")))?;
    let mut flat = nested["text_config"].clone();
    flat["model_type"] = json!("qwen3_5_moe");
    let got = logits_of(|dir| write(dir, &flat, &prefixed(&tensors, "model.", "")))?;
    assert!(got == want);
    Ok(())
}

#[test]
fn norm_topk_prob_false_leaves_weights_as_shares_of_all_experts() -> Result<()> {
    for with in [seeded::moe, seeded::next] as [fn(fn(&mut Value)) -> Value; 2] {
        let renormalized = with(|_| {});
        let tensors = prefixed(&tensors(&renormalized)?, "model.", "");
        let of = |config: Value| logits_of(|dir| write(dir, &config, &tensors));
        let want = of(renormalized)?;
        assert!(of(with(|text| text["norm_topk_prob"] = json!(true)))? == want);
        assert!(
            of(with(|text| text["norm_topk_prob"] = json!(null)))? == want,
            "absent is true"
        );
        assert!(
            of(with(|text| text["norm_topk_prob"] = json!(false)))? != want,
            "false is not ignored"
        );
        // With all experts chosen the shares sum to one either way.
        let all = |flag: bool| -> Result<Vec<f32>> {
            let mut config = with(|text| text["num_experts_per_tok"] = json!(8));
            let flat = config.get("text_config").is_none();
            let text = if flat {
                &mut config
            } else {
                &mut config["text_config"]
            };
            text["norm_topk_prob"] = json!(flag);
            Ok(of(config)?.into_iter().map(f32::from_bits).collect())
        };
        let near = all(true)?
            .iter()
            .zip(all(false)?)
            .fold(0f32, |most, (a, b)| most.max((a - b).abs()));
        assert!(near < 1e-4, "{near}");
    }
    Ok(())
}

#[test]
fn layers_without_experts_are_dense() -> Result<()> {
    for (field, value, dense) in [
        ("mlp_only_layers", json!([0, 2]), vec![0, 2]),
        ("decoder_sparse_step", json!(2), vec![0, 2]),
        ("decoder_sparse_step", json!(5), vec![0, 1, 2, 3]),
        ("num_experts", json!(0), vec![0, 1, 2, 3]),
    ] {
        let config = seeded::next(|text| text[field] = value.clone());
        let tensors = tensors(&config)?;
        for layer in 0..4 {
            let has = |name: &str| tensors.contains_key(&format!("layers.{layer}.mlp.{name}"));
            assert_eq!(
                has("gate_proj.weight"),
                dense.contains(&layer),
                "{field} {value}, layer {layer}"
            );
            assert_eq!(
                has("experts.down_proj"),
                !dense.contains(&layer),
                "{field} {value}, layer {layer}"
            );
        }
        let logits = logits_of(|dir| write(dir, &config, &prefixed(&tensors, "model.", "")))?;
        assert!(logits.iter().all(|bits| f32::from_bits(*bits).is_finite()));
    }
    Ok(())
}

/// Fused projections made of the four tensors of another model, head by head, give that model's logits.
#[test]
fn next_with_dense_layers_is_the_dense_family_with_fused_projections() -> Result<()> {
    for value_heads in [2, 4, 6] {
        let dense = seeded::dense(|text| text["linear_num_value_heads"] = json!(value_heads));
        let next = seeded::next(|text| {
            text["num_experts"] = json!(0);
            text["linear_num_value_heads"] = json!(value_heads);
        });
        let four = tensors(&dense)?;
        let mut fused = four.clone();
        let group = value_heads / 2;
        for layer in 0..3 {
            let name = |part: &str| format!("layers.{layer}.linear_attn.in_proj_{part}.weight");
            for part in ["qkv", "z", "b", "a"] {
                fused.remove(&name(part));
            }
            let (qkv, z) = (&four[&name("qkv")], &four[&name("z")]);
            let (mut qkvz, mut ba) = (Vec::new(), Vec::new());
            for head in 0..2 {
                qkvz.push(qkv.narrow(0, 16 * head, 16)?);
                qkvz.push(qkv.narrow(0, 32 + 16 * head, 16)?);
                qkvz.push(qkv.narrow(0, 64 + 16 * group * head, 16 * group)?);
                qkvz.push(z.narrow(0, 16 * group * head, 16 * group)?);
                ba.push(four[&name("b")].narrow(0, group * head, group)?);
                ba.push(four[&name("a")].narrow(0, group * head, group)?);
            }
            fused.insert(name("qkvz"), Tensor::cat(&qkvz, 0)?);
            fused.insert(name("ba"), Tensor::cat(&ba, 0)?);
        }
        let want = logits_of(|dir| write(dir, &dense, &prefixed(&four, "model.", "")))?;
        let got = logits_of(|dir| write(dir, &next, &prefixed(&fused, "model.", "")))?;
        assert!(got == want, "{value_heads} value heads of 2 key heads");
    }
    Ok(())
}

#[test]
fn scales_beside_a_router_of_floats_are_refused() -> Result<()> {
    for (config, tensors) in families()? {
        let mut scaled = tensors.clone();
        let name = tensors
            .keys()
            .find(|n| n.ends_with("mlp.gate.weight"))
            .ok_or("no router")?;
        scaled.insert(
            name.replace(".weight", ".scales"),
            tensors[name].to_dtype(DType::BF16)?,
        );
        let error = refusal_of(|dir| write(dir, &config, &scaled))?;
        assert!(error.contains("mlp.gate.weight"), "{error}");
        assert!(error.contains("expected dtype U32, found F32"), "{error}");
    }
    Ok(())
}

#[test]
fn the_facade_finds_the_family_by_the_model_type() -> Result<()> {
    let tokenizer = folder("demo-target")
        .ok_or("no demo model")?
        .join("tokenizer.json");
    for (config, tensors) in families()? {
        let dir = TempDir::new()?;
        write(dir.path(), &config, &tensors)?;
        std::fs::copy(&tokenizer, dir.path().join("tokenizer.json"))?;
        let loaded = recant::load(dir.path())?;
        assert_eq!(json!(loaded.model().spec().family), config["model_type"]);
        assert!(loaded.notes().is_empty(), "{:?}", loaded.notes());
    }
    Ok(())
}

#[test]
fn trained_mixtures_load_whole_and_say_what_they_left_alone() -> Result<()> {
    for (name, family) in [("moe", "qwen3_5_moe"), ("next", "qwen3_next")] {
        let Some(path) = folder_or_skip("loading of a trained mixture", name) else {
            continue;
        };
        let loaded = recant::load(path)?;
        assert_eq!(loaded.model().spec().family, family);
        let [note] = loaded.notes() else {
            return Err(format!("{:?}", loaded.notes()).into());
        };
        assert!(note.contains("multi-token-prediction"), "{note}");
    }
    Ok(())
}

#[test]
fn the_head_and_the_embedding_can_be_asked_on_their_own() -> Result<()> {
    use recant::core::Hidden;
    let tied = seeded::dense(|text| text["tie_word_embeddings"] = json!(true));
    for config in [
        tied,
        seeded::dense(|_| {}),
        seeded::moe(|_| {}),
        seeded::next(|_| {}),
    ] {
        for dtype in [DType::F32, DType::BF16] {
            let model = seeded::model(&config, 5, dtype)?;
            let tokens = [3, 250, 17, 3];
            let seeds = seeded::Seeded { seed: 5, dtype };
            let table = seeds
                .tensor("embed_tokens.weight", &[256, 64])?
                .to_dtype(DType::F32)?;
            let ids = Tensor::new(&tokens, table.device())?;
            assert_eq!(
                bits(&model.embed(&tokens)?)?,
                bits(&table.index_select(&ids, 0)?)?
            );

            let call = |model: &dyn LanguageModel| -> Result<[Vec<u32>; 2]> {
                let mut caches = model.new_caches(&CacheOptions::default())?;
                let mut segment = Segment::new(&tokens, &mut caches, Rows::All);
                segment.hidden = Some(Hidden::PostNorm);
                let output = model.forward(&mut [segment])?;
                let hidden = output.segments[0].hidden.as_ref().ok_or("no hidden rows")?;
                let logits = bits(output.segments[0].logits()?)?;
                Ok([logits, bits(&model.project(hidden)?)?])
            };
            let [whole, projected] = call(&model)?;
            assert_eq!(projected, whole);

            // In any order, more than once, and again from a model that has a part only.
            let chosen = [200, 0, 255, 7, 7];
            let part = model.with_head_rows(&[1, 2])?.with_head_rows(&chosen)?;
            let want: Vec<u32> = whole
                .chunks(256)
                .flat_map(|row| chosen.map(|id| row[id as usize]))
                .collect();
            assert_eq!(call(&*part)?, [want.clone(), want]);
            assert_eq!(part.spec().vocab_size, 256);
            assert_eq!(part.spec().layout, model.spec().layout);
        }
        let model = seeded::model(&config, 5, DType::F32)?;
        assert!(model.with_head_rows(&[]).is_err());
        for error in [model.with_head_rows(&[256]).err(), model.embed(&[256]).err()] {
            let error = error.ok_or("id 256 was taken")?.to_string();
            assert!(error.contains("256"), "{error}");
        }
        assert!(model
            .project(&Tensor::zeros((1, 63), DType::F32, &recant::candle::Device::Cpu)?)
            .is_err());
    }
    Ok(())
}

#[test]
fn a_model_that_offers_no_head_of_its_own_says_so() -> Result<()> {
    let model = recant_testkit::ScriptedModel::new(1, 32);
    for error in [
        model.embed(&[1]).err(),
        model
            .project(&Tensor::new(&[[1f32]], &recant::candle::Device::Cpu)?)
            .err(),
    ] {
        let error = error.ok_or("offered")?.to_string();
        assert!(error.contains("does not offer"), "{error}");
    }
    let error = model.with_head_rows(&[1]).err().ok_or("offered")?.to_string();
    assert!(error.contains("with_head_rows"), "{error}");
    Ok(())
}
