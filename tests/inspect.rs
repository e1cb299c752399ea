//! What a checkpoint holds is told of those that load and of those that do not.

mod common;

use std::path::Path;

use common::checkpoint::{prefixed, tensors, write, HUB};
use common::{seeded, Result};
use recant::candle::{DType, Tensor};
use recant::{GroupFormat, ModuleKind, Mtp, Report};
use serde_json::json;
use tempfile::TempDir;

fn numbers(report: &Report, kind: ModuleKind) -> Option<(usize, u64)> {
    let module = report.modules.iter().find(|module| module.kind == kind)?;
    Some((module.tensors, module.parameters))
}

/// Whether some refusal says all of it.
fn refused(report: &Report, words: &[&str]) -> bool {
    let says = |reason: &String| words.iter().all(|word| reason.contains(word));
    report.refusals.iter().any(says)
}

#[test]
fn the_demo_target_is_whole() -> Result<()> {
    let folder = common::folder("demo-target").ok_or("no demo target")?;
    let report = recant::inspect(&folder);
    assert_eq!(report.refusals, [""; 0]);
    assert_eq!(report.family.as_deref(), Some("qwen3_5"));
    let layers = report.layers.ok_or("no layers")?;
    assert_eq!((layers.total, layers.linear, layers.full), (8, 6, 2));
    assert_eq!(report.mtp, Mtp::Complete);
    assert!(report.tokenizer && report.template);
    assert_eq!(numbers(&report, ModuleKind::Embedding), Some((1, 8192 * 256)));
    assert_eq!(
        numbers(&report, ModuleKind::Mtp).map(|(tensors, _)| tensors),
        Some(15)
    );
    let sizes: u64 = report.modules.iter().map(|module| module.bytes).sum();
    assert_eq!(sizes, report.bytes);
    assert!(report.bytes > 13_000_000);

    let json = serde_json::to_value(&report)?;
    for field in ["family", "layers", "parameters", "formats", "mtp"] {
        assert!(!json[field].is_null(), "{field}");
    }
    assert_eq!(json["mtp"]["state"], "complete");
    Ok(())
}

#[test]
fn a_quantized_checkpoint_has_the_parameters_of_its_original() -> Result<()> {
    let folder = common::folder("demo-target").ok_or("no demo target")?;
    let dir = TempDir::new()?;
    let to = dir.path().join("quantized");
    let format = GroupFormat {
        bits: 4,
        group: 32,
        affine: true,
        scales: DType::BF16,
    };
    recant::save(&folder, &to, format, &mut |_, _| {})?;
    let (before, after) = (recant::inspect(&folder), recant::inspect(&to));
    assert_eq!(after.refusals, [""; 0]);
    assert_eq!(after.parameters, before.parameters);
    assert!(after.bytes * 3 < before.bytes);
    let packed = after.formats["affine of 4 bits in groups of 32"];
    assert!(packed * 10 > after.parameters * 9, "{:?}", after.formats);
    Ok(())
}

#[test]
fn what_keeps_a_checkpoint_from_being_loaded_is_told_beside_what_it_holds() -> Result<()> {
    let config = seeded::dense(|_| {});
    let all = prefixed(&tensors(&config)?, HUB, "");
    let of = |config: &serde_json::Value, all: &common::checkpoint::Tensors| -> Result<Report> {
        let dir = TempDir::new()?;
        write(dir.path(), config, all)?;
        Ok(recant::inspect(dir.path()))
    };
    let report = of(&config, &all)?;
    assert!(
        refused(&report, &["tokenizer.json"]) && report.refusals.len() == 1,
        "{:?}",
        report.refusals
    );
    assert!(!report.tokenizer && !report.template);

    let mut other = config.clone();
    other["model_type"] = json!("llama");
    let report = of(&other, &all)?;
    assert!(refused(&report, &["llama", "supported are"]));
    assert_eq!(
        (report.family, report.model_type.as_deref()),
        (None, Some("llama"))
    );
    assert!(report.parameters > 100_000);

    let report = of(&seeded::dense(|text| text["num_hidden_layers"] = json!(6)), &all)?;
    assert!(
        refused(&report, &["no tensors of layers 4, 5"]),
        "{:?}",
        report.refusals
    );
    let report = of(&seeded::dense(|text| text["num_hidden_layers"] = json!(3)), &all)?;
    assert!(
        refused(&report, &["knows nothing of layers 3"]),
        "{:?}",
        report.refusals
    );
    let report = of(&seeded::dense(|text| text["head_dim"] = json!(null)), &all)?;
    assert!(refused(&report, &["head_dim"]) && report.layers.is_none());

    let mut foreign = all.clone();
    let norm = all[&format!("{HUB}norm.weight")].clone();
    foreign.insert("transformer.wte.weight".to_owned(), norm.clone());
    foreign.insert("model.visual.blocks.0.norm1.weight".to_owned(), norm.clone());
    foreign.insert("mtp.norm.weight".to_owned(), norm.clone());
    foreign.remove(&format!("{HUB}embed_tokens.weight"));
    let report = of(&config, &foreign)?;
    assert!(
        refused(&report, &["transformer.wte.weight"]),
        "{:?}",
        report.refusals
    );
    assert!(refused(&report, &["no tensor embed_tokens.weight"]));
    assert_eq!(numbers(&report, ModuleKind::Unknown), Some((1, 64)));
    assert_eq!(numbers(&report, ModuleKind::Vision), Some((1, 64)));
    let Mtp::Incomplete { missing } = &report.mtp else {
        return Err("complete".into());
    };
    assert!(missing.contains(&"fc.weight".to_owned()) && !missing.contains(&"norm.weight".to_owned()));

    let name = format!("{HUB}layers.0.mlp.up_proj.weight");
    let mut scaled = all;
    scaled.insert(
        format!("{name}_scale_inv"),
        Tensor::ones((1, 1), DType::F32, norm.device())?,
    );
    let report = of(&config, &scaled)?;
    assert!(
        refused(&report, &["weight_scale_inv", "nothing uses it"]),
        "{:?}",
        report.refusals
    );
    Ok(())
}

#[test]
fn c054_folders_that_cannot_be_opened_are_told_about() -> Result<()> {
    let report = recant::inspect(Path::new("no/such/folder"));
    assert!(refused(&report, &["nothing at that path"]));
    let dir = TempDir::new()?;
    std::fs::write(dir.path().join("config.json"), r#"{"model_type": "qwen3_5"}"#)?;
    let index = json!({"weight_map": {"a": "model-00001-of-00001.safetensors"}});
    std::fs::write(dir.path().join("model.safetensors.index.json"), index.to_string())?;
    let report = recant::inspect(dir.path());
    assert!(refused(&report, &["model-00001-of-00001.safetensors"]));
    assert_eq!(report.model_type.as_deref(), Some("qwen3_5"));
    std::fs::write(dir.path().join("config.json"), "[")?;
    assert_eq!(recant::inspect(dir.path()).refusals.len(), 1);
    Ok(())
}
