//! What is quantized already, saved in another format: taken out of its form exactly, and rounded once.

mod common;
#[path = "common/fp8.rs"]
#[allow(dead_code, reason = "it does more for another test")]
mod fp8;
#[path = "common/packed.rs"]
mod packed;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use common::checkpoint::{logits, prefixed, tensors, write, Tensors, HUB};
use common::{seeded, Result, Rng};
use packed::{packed, PACKINGS};
use recant::candle::{self, DType, Device, Tensor};
use recant::{ChatOptions, GroupFormat, LoadOptions, Message, Mtp};
use recant_layers::{group_weights, Config, HybridModel};
use recant_weights::{Coding, Folder, Norms, Source, Stored, Weights};
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

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/golden/gguf")
        .join(name)
}

/// Whether a name is that of a gate or a router, which are in floats whatever the format is.
fn is_gate(name: &str) -> bool {
    [
        "in_proj_a.",
        "in_proj_b.",
        "in_proj_ba.",
        "mlp.gate.",
        "shared_expert_gate.",
    ]
    .iter()
    .any(|gate| name.contains(gate))
}

/// A checkpoint whose matrices are all given in floats, but for those that have the format already.
struct Floats<'a> {
    weights: Weights<'a>,
    format: GroupFormat,
}

impl Floats<'_> {
    fn floats(&self, name: &str, stored: Stored) -> recant_weights::Result<Stored> {
        let GroupFormat {
            bits, group, scales, ..
        } = self.format;
        let groups = match stored {
            Stored::Groups(groups) => groups,
            other => return Ok(other),
        };
        let same = !is_gate(name)
            && groups.coding == Coding::Whole { bits, zero: 0 }
            && (groups.group, groups.scales.dtype()) == (group, scales)
            && groups.biases.is_some();
        if same {
            return Ok(Stored::Groups(groups));
        }
        let floats = group_weights(groups).and_then(|weights| weights.dequantize());
        floats
            .map(Stored::Float)
            .map_err(|source| recant_weights::Error::Tensor {
                tensor: name.to_owned(),
                source: source.into(),
            })
    }
}

impl Source for Floats<'_> {
    fn has(&self, name: &str) -> bool {
        self.weights.has(name)
    }

    fn take(&mut self, name: &str, shape: &[usize]) -> recant_weights::Result<Tensor> {
        self.weights.take(name, shape)
    }

    fn take_matrix(&mut self, name: &str, shape: [usize; 2]) -> recant_weights::Result<Stored> {
        let stored = self.weights.take_matrix(name, shape)?;
        self.floats(name, stored)
    }

    fn take_stacked(
        &mut self,
        name: &str,
        shape: [usize; 3],
        index: usize,
    ) -> recant_weights::Result<Stored> {
        let stored = self.weights.take_stacked(name, shape, index)?;
        self.floats(name, stored)
    }

    fn norms(&self) -> Norms {
        self.weights.norms()
    }

    fn discard(&mut self, name: &str) {
        self.weights.discard(name);
    }
}

/// The model that a source gives whose matrices are rounded from floats while it is loaded.
fn rounded(path: &Path, format: GroupFormat) -> Result<HybridModel> {
    let folder = Folder::open(path)?;
    let family = seeded::family(folder.config());
    let config = Config::from_json(family, folder.config(), None)?;
    let mut source = Floats {
        weights: folder.weights()?,
        format,
    };
    let options = LoadOptions {
        quantize: Some(format),
        ..LoadOptions::default()
    };
    let model = HybridModel::build(family, config, "", &mut source, &options)?;
    source.weights.finish()?;
    Ok(model)
}

fn loaded(path: &Path) -> Result<HybridModel> {
    let folder = Folder::open(path)?;
    let family = seeded::family(folder.config());
    Ok(HybridModel::load(family, &folder, &LoadOptions::default(), &mut |_, _| {})?.0)
}

/// The tensors of all files of a folder.
fn stored(dir: &Path) -> Result<BTreeMap<String, Tensor>> {
    let mut all = BTreeMap::new();
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        if path.extension().is_some_and(|end| end == "safetensors") {
            all.extend(candle::safetensors::load(path, &Device::Cpu)?);
        }
    }
    Ok(all)
}

fn same(a: &Tensor, b: &Tensor) -> Result<bool> {
    let alike = (a.dtype(), a.dims()) == (b.dtype(), b.dims());
    Ok(alike && a.eq(b)?.to_dtype(DType::F32)?.min_all()?.to_scalar::<f32>()? == 1.0)
}

/// Saved in a format, it is the model that rounding its exact values gives; saved again, it is the same tensors.
fn saves(what: &str, path: &Path, format: GroupFormat) -> Result<TempDir> {
    let dir = TempDir::new()?;
    let (once, twice) = (dir.path().join("once"), dir.path().join("twice"));
    let mut told = Vec::new();
    recant::save(path, &once, format, &mut |done, total| told.push((done, total)))?;
    let (done, total) = *told.last().ok_or("nothing told")?;
    assert_eq!(done, total, "{what}");
    let got = logits(&loaded(&once)?)?;
    assert!(got == logits(&rounded(path, format)?)?, "{what}: {format:?}");
    recant::save(&once, &twice, format, &mut |_, _| {})?;
    let (once, twice) = (stored(&once)?, stored(&twice)?);
    assert!(once.keys().eq(twice.keys()), "{what}");
    for (name, tensor) in &once {
        assert!(same(tensor, &twice[name])?, "{what}: {name}");
    }
    Ok(dir)
}

#[test]
fn gguf_files_become_folders_with_everything_in_them() -> Result<()> {
    for name in [
        "dense-r2.f16.gguf",
        "dense-r2.q8_0.gguf",
        "moe-r3.f16.gguf",
        "moe-r3.q8_0.gguf",
        "next-r2.f16.gguf",
    ] {
        let path = golden(name);
        for format in [format(4, 32, DType::BF16), format(8, 32, DType::F16)] {
            let dir = saves(name, &path, format)?;
            let folder = dir.path().join("once");
            let config: Value = serde_json::from_slice(&std::fs::read(folder.join("config.json"))?)?;
            // Other programs take a null for a configuration.
            assert!(config
                .as_object()
                .is_some_and(|all| all.values().all(|value| !value.is_null())));
            assert_eq!(
                config["rope_theta"], config["rope_parameters"]["rope_theta"],
                "{name}"
            );
            let report = recant::inspect(&folder);
            assert_eq!(report.refusals, [""; 0], "{name}");
            assert_eq!(report.mtp, Mtp::Complete, "{name}");
            let (before, after) = (recant::load(&path)?, recant::load(&folder)?);
            assert_eq!(before.eos(), after.eos(), "{name}");
            let text = "def f(x):\n    return <think>\u{e9}x</think> <|im_end|>";
            assert_eq!(before.text().encode(text)?, after.text().encode(text)?, "{name}");
            let messages = [Message::user("How long is a piece of string?")];
            let say = |model: &recant::Loaded| -> Option<String> {
                model.chat().ok()?.render(&messages, &ChatOptions::default()).ok()
            };
            assert_eq!(say(&before), say(&after), "{name}");
        }
    }
    Ok(())
}

/// Of an unquantized file nothing is taken out of any form, so rounding while it is loaded gives the same model.
#[test]
fn c031_a_gguf_file_of_floats_is_saved_as_it_is_rounded_while_loading_and_its_norms_are_not_shifted(
) -> Result<()> {
    for name in ["dense-r2.f16.gguf", "moe-r3.f16.gguf", "next-r2.f16.gguf"] {
        let format = format(8, 32, DType::BF16);
        let dir = TempDir::new()?;
        let to = dir.path().join("saved");
        recant::save(golden(name), &to, format, &mut |_, _| {})?;
        let options = LoadOptions {
            quantize: Some(format),
            ..LoadOptions::default()
        };
        let folder = Folder::open(golden(name))?;
        let family = seeded::family(folder.config());
        let (want, _) = HybridModel::load(family, &folder, &options, &mut |_, _| {})?;
        assert!(logits(&loaded(&to)?)? == logits(&want)?, "{name}");
        assert_eq!(Folder::open(&to)?.weights()?.norms(), Norms::OnePlus, "{name}");
        // As every other checkpoint of the family, and mlx-lm, has them.
        let written = Folder::open(&to)?;
        let fused = written
            .tensors()
            .any(|tensor| tensor.name.contains("in_proj_qkvz"));
        assert_eq!(fused, name.starts_with("next"), "{name}");
    }
    Ok(())
}

/// Every matrix in a packing of its own, gates included, and all else as conversions have it.
fn conversion(config: &Value) -> Result<(Value, Tensors)> {
    let mut config = config.clone();
    let mut quantization = json!({"group_size": 64, "bits": 4});
    let mut all = Tensors::new();
    let mut rng = Rng(9);
    for (i, (name, tensor)) in prefixed(&tensors(&config)?, HUB, "").into_iter().enumerate() {
        let name = name
            .replace("experts.gate_up_proj", "switch_mlp.gate_up_proj.weight")
            .replace("experts.down_proj", "switch_mlp.down_proj.weight");
        if name.contains("switch_mlp.gate_up") {
            for (part, rows) in ["gate_proj", "up_proj"].iter().zip(tensor.chunk(2, 1)?) {
                let path = name.replace("gate_up_proj.weight", part);
                let (parts, _) = packed(rows.dims(), PACKINGS[i % PACKINGS.len()], &mut rng)?;
                insert(
                    &mut all,
                    &mut quantization,
                    &path,
                    parts,
                    PACKINGS[i % PACKINGS.len()],
                );
            }
            continue;
        }
        let width = tensor.dims()[tensor.dims().len() - 1];
        let packing = PACKINGS[i % PACKINGS.len()];
        match tensor.dims().len() {
            2 | 3 if width % 64 == 0 && !name.ends_with("conv1d.weight") => {
                let path = name.strip_suffix(".weight").ok_or("no weight")?.to_owned();
                let (parts, _) = packed(tensor.dims(), packing, &mut rng)?;
                insert(&mut all, &mut quantization, &path, parts, packing);
            }
            3 => {
                all.insert(name, tensor.transpose(1, 2)?.contiguous()?);
            }
            _ => {
                all.insert(name, tensor);
            }
        }
    }
    config["quantization"] = quantization;
    Ok((config, all))
}

fn insert(all: &mut Tensors, config: &mut Value, path: &str, parts: Tensors, packing: (&str, usize, usize)) {
    let (mode, bits, group) = packing;
    let mode = if mode == "global" { "nvfp4" } else { mode };
    config[path] = json!({"mode": mode, "bits": bits, "group_size": group});
    for (end, tensor) in parts {
        all.insert(format!("{path}.{end}"), tensor);
    }
}

#[test]
fn c050_c061_conversions_of_mixed_formats_become_one_format_and_gates_stay_exact() -> Result<()> {
    let wide = |text: &mut Value| {
        text["moe_intermediate_size"] = json!(64);
        text["shared_expert_intermediate_size"] = json!(64);
    };
    let dense = seeded::dense(|text| text["intermediate_size"] = json!(128));
    for (what, config) in [
        ("dense", dense),
        ("moe", seeded::moe(wide)),
        ("next", seeded::next(wide)),
    ] {
        let (config, all) = conversion(&config)?;
        let dir = TempDir::new()?;
        write(dir.path(), &config, &all)?;
        for format in [format(8, 64, DType::BF16), format(4, 64, DType::BF16)] {
            let saved = saves(what, dir.path(), format)?;
            let folder = Folder::open(saved.path().join("once"))?;
            for tensor in folder.tensors() {
                let gate = is_gate(&tensor.name);
                assert!(!gate || tensor.dtype.to_string() == "F32", "{what}: {tensor:?}");
            }
        }
    }
    Ok(())
}

/// Matrices in two forms by turns, experts each on its own.
fn release(config: &Value, quantization: Value, forms: [fp8::Form; 2]) -> Result<(Value, Tensors)> {
    let mut all = Tensors::new();
    let mut matrices = 0;
    let mut insert = |name: &str, tensor: Tensor| -> Result<()> {
        let path = name.strip_suffix(".weight").filter(|_| tensor.rank() == 2);
        let Some(path) = path else {
            all.insert(name.to_owned(), tensor);
            return Ok(());
        };
        matrices += 1;
        for (end, part) in fp8::rounded(forms[matrices % 2], &tensor)?.0 {
            all.insert(format!("{path}.{end}"), part);
        }
        Ok(())
    };
    for (name, tensor) in prefixed(&tensors(config)?, HUB, "") {
        let Some((prefix, which)) = name.split_once(".experts.") else {
            insert(&name, tensor)?;
            continue;
        };
        let parts: &[&str] = match which {
            "gate_up_proj" => &["gate_proj", "up_proj"],
            _ => &["down_proj"],
        };
        for e in 0..tensor.dim(0)? {
            for (part, rows) in parts.iter().zip(tensor.get(e)?.chunk(parts.len(), 0)?) {
                insert(&format!("{prefix}.experts.{e}.{part}.weight"), rows.contiguous()?)?;
            }
        }
    }
    let scale = Tensor::new(&[0.75_f32], &Device::Cpu)?;
    all.insert(format!("{HUB}layers.3.self_attn.k_scale"), scale);
    let mut config = config.clone();
    config["quantization_config"] = quantization;
    Ok((config, all))
}

#[test]
fn c051_c052_c053_releases_in_fp8_and_nvfp4_become_conversions() -> Result<()> {
    use fp8::Form;
    let weights = |bits: usize, strategy: &str| json!({"num_bits": bits, "type": "float", "strategy": strategy, "group_size": 16});
    let group = |weights: Value| json!({"targets": ["Linear"], "weights": weights});
    let releases = [
        (
            json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}),
            [Form::Blocks([128, 128]); 2],
        ),
        (
            json!({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {
                "lm_head": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
                "model.language_model.layers.3.self_attn.q_proj": {"quant_algo": "FP8"},
            }}),
            [Form::ModelOpt, Form::One],
        ),
        (
            json!({"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": {
                "group_0": group(weights(8, "channel")), "group_1": group(weights(4, "tensor_group")),
            }}),
            [Form::Packed, Form::Rows],
        ),
    ];
    let moe = seeded::moe(|text| {
        text["moe_intermediate_size"] = json!(64);
        text["shared_expert_intermediate_size"] = json!(64);
    });
    for config in [seeded::dense(|text| text["intermediate_size"] = json!(160)), moe] {
        for (quantization, forms) in releases.clone() {
            let what = format!("{forms:?} {}", config["model_type"]);
            let (config, all) = release(&config, quantization, forms)?;
            let dir = TempDir::new()?;
            write(dir.path(), &config, &all)?;
            let saved = saves(&what, dir.path(), format(4, 32, DType::BF16))?;
            let written = std::fs::read(saved.path().join("once/config.json"))?;
            let written: Value = serde_json::from_slice(&written)?;
            assert_eq!(written["quantization_config"], written["quantization"], "{what}");
            let folder = Folder::open(saved.path().join("once"))?;
            let scales: Vec<&str> = folder
                .tensors()
                .map(|tensor| tensor.name.as_str())
                .filter(|name| name.contains("_scale"))
                .collect();
            assert_eq!(scales, [""; 0], "{what}");
        }
    }
    Ok(())
}

/// Whatever has the wanted format already is the same bytes, not rounded again.
#[test]
fn a_conversion_in_the_wanted_format_is_copied() -> Result<()> {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/mlx/4bit");
    let dir = TempDir::new()?;
    let to = dir.path().join("saved");
    recant::save(&from, &to, format(4, 64, DType::BF16), &mut |_, _| {})?;
    let (before, after) = (stored(&from)?, stored(&to)?);
    let config: Value = serde_json::from_slice(&std::fs::read(from.join("config.json"))?)?;
    // Matrices in a format of their own, and one that is not quantized.
    let other = |name: &str| {
        let (path, _) = name.rsplit_once('.').unwrap_or((name, ""));
        let whole = before[name].rank() == 2 && !before.contains_key(&format!("{path}.scales"));
        whole || config["quantization"].get(path).is_some()
    };
    let mut copied = 0;
    for (name, tensor) in before.iter().filter(|(name, _)| !other(name) && !is_gate(name)) {
        let found = after.get(name).ok_or_else(|| format!("there is no {name}"))?;
        assert!(same(tensor, found)?, "{name}");
        copied += 1;
    }
    assert!(copied > 100, "{copied}");
    Ok(())
}
