//! What is quantized already, saved in another format: taken out of its form exactly, and rounded once.

mod common;
#[path = "common/packed.rs"]
mod packed;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use common::checkpoint::{logits, prefixed, tensors, write, Tensors, HUB};
use common::{seeded, Result, Rng};
use packed::{packed, PACKINGS};
use recant::candle::{DType, Tensor};
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

/// A checkpoint whose matrices are all given in floats, but for those that have the format already.
struct Floats<'a> {
    weights: Weights<'a>,
    format: GroupFormat,
}

impl Floats<'_> {
    fn floats(&self, stored: Stored) -> recant_weights::Result<Stored> {
        let GroupFormat {
            bits, group, scales, ..
        } = self.format;
        let groups = match stored {
            Stored::Groups(groups) => groups,
            other => return Ok(other),
        };
        let same = groups.coding == Coding::Whole { bits, zero: 0 }
            && (groups.group, groups.scales.dtype(), groups.biases.is_some()) == (group, scales, true);
        if same {
            return Ok(Stored::Groups(groups));
        }
        let floats = group_weights(groups).and_then(|weights| weights.dequantize());
        floats.map(Stored::Float).map_err(|source| recant_weights::Error::Tensor {
            tensor: String::new(),
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
        self.floats(stored)
    }

    fn take_stacked(&mut self, name: &str, shape: [usize; 3], index: usize) -> recant_weights::Result<Stored> {
        let stored = self.weights.take_stacked(name, shape, index)?;
        self.floats(stored)
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

fn bytes(dir: &Path) -> Result<BTreeMap<String, Vec<u8>>> {
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        files.insert(
            entry.file_name().to_string_lossy().into_owned(),
            std::fs::read(entry.path())?,
        );
    }
    Ok(files)
}

/// Saved in a format, it is the model that rounding its exact values gives; saved again, it is the same files.
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
    let (once, twice) = (bytes(&once)?, bytes(&twice)?);
    assert!(once.keys().eq(twice.keys()), "{what}");
    for (name, file) in &once {
        // The order in which a configuration is written is no matter.
        assert!(name.ends_with(".json") || twice[name] == *file, "{what}: {name}");
    }
    Ok(dir)
}

#[test]
fn gguf_files_become_folders_with_everything_in_them() -> Result<()> {
    for (name, head) in [
        ("dense-r2.f16.gguf", true),
        ("dense-r2.q8_0.gguf", true),
        ("moe-r3.f16.gguf", true),
        ("moe-r3.q8_0.gguf", true),
        ("next-r2.f16.gguf", false),
    ] {
        let path = golden(name);
        for format in [format(4, 32, DType::BF16), format(8, 32, DType::F16)] {
            let dir = saves(name, &path, format)?;
            let folder = dir.path().join("once");
            let report = recant::inspect(&folder);
            assert_eq!(report.refusals, [""; 0], "{name}");
            assert_eq!(report.mtp == Mtp::Complete, head, "{name}: {:?}", report.mtp);
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
fn c031_a_gguf_file_of_floats_is_saved_as_it_is_rounded_while_loading_and_its_norms_are_not_shifted() -> Result<()> {
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
                insert(&mut all, &mut quantization, &path, parts, PACKINGS[i % PACKINGS.len()]);
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
    for (what, config) in [("dense", dense), ("moe", seeded::moe(wide)), ("next", seeded::next(wide))] {
        let (config, all) = conversion(&config)?;
        let dir = TempDir::new()?;
        write(dir.path(), &config, &all)?;
        for format in [format(8, 64, DType::BF16), format(4, 64, DType::BF16)] {
            let saved = saves(what, dir.path(), format)?;
            let folder = Folder::open(saved.path().join("once"))?;
            for tensor in folder.tensors() {
                let gate = ["in_proj_a.", "in_proj_b.", "in_proj_ba.", "mlp.gate.", "shared_expert_gate."]
                    .iter()
                    .any(|gate| tensor.name.contains(gate));
                assert!(!gate || tensor.dtype.to_string() == "F32", "{what}: {tensor:?}");
            }
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
    let read = |path: PathBuf| recant::candle::safetensors::load(path, &recant::candle::Device::Cpu);
    let (before, after) = (read(from.join("model.safetensors"))?, read(to.join("model.safetensors"))?);
    let mut same = 0;
    for (name, tensor) in &after {
        let Some(old) = before.get(name) else {
            continue;
        };
        if (old.dtype(), old.dims()) == (tensor.dtype(), tensor.dims()) {
            let equal = old.eq(tensor)?.to_dtype(DType::F32)?.mean_all()?.to_scalar::<f32>()?;
            assert_eq!(equal, 1.0, "{name}");
            same += 1;
        }
    }
    // Four matrices were in other formats or in none.
    assert!(after.len() - same <= 12 && same > 100, "{same} of {}", after.len());
    Ok(())
}
