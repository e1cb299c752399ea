//! The grouping law and random schedules for weights of every type that files hold: each GGUF type and each packing of MLX, in a
//! model whose every matrix has it.

mod common;
#[path = "common/gguf.rs"]
mod file;
#[path = "common/packed.rs"]
mod packed;

use std::path::Path;

use common::checkpoint::{tensors, write, Tensors};
use common::{assert_same, feed, seeded, Result, Rng};
use file::{File, Spec, Value};
use packed::{packed, PACKINGS};
use recant::core::{Cache, CacheOptions, LanguageModel};
use recant::{ActivationPrecision, LoadOptions, Threads};
use recant_layers::HybridModel;
use recant_weights::Folder;
use serde_json::json;
use tempfile::TempDir;

const TOKENS: usize = 72;
/// Width of every matrix: the largest block of any type.
const WIDTH: u64 = 256;

fn random_ids(rng: &mut Rng, count: usize) -> Vec<u32> {
    (0..count).map(|_| rng.below(WIDTH as usize) as u32).collect()
}

fn load(path: &Path, activations: ActivationPrecision) -> Result<HybridModel> {
    let folder = Folder::open(path)?;
    let options = LoadOptions {
        activations,
        ..LoadOptions::default()
    };
    let family = seeded::family(folder.config());
    Ok(HybridModel::load(family, &folder, &options, &mut |_, _| {})?.0)
}

/// Fails unless a checkpoint's logits and caches are the same bits however tokens are grouped, on whatever threads, and whatever
/// was drafted and taken back between.
fn keeps_the_law(what: &str, path: &Path) -> Result<()> {
    let mut seen = Vec::new();
    for activations in [ActivationPrecision::Int8, ActivationPrecision::Full] {
        let what = format!("{what}, {activations:?}");
        let model = load(path, activations).map_err(|error| format!("{what}: {error}"))?;
        let mut rng = Rng(23);
        let ids = random_ids(&mut rng, TOKENS);
        let mut plain = model.new_caches(&CacheOptions::default())?;
        let mut rows = Vec::new();
        for id in &ids {
            rows.push(feed(&model, &mut plain, &[*id])?);
        }
        let expected = rows.concat();
        let numbers = expected.iter().map(|bits| f32::from_bits(*bits));
        assert!(numbers.clone().all(f32::is_finite), "{what}");
        let (least, most) = numbers.fold((0.0_f32, 0.0_f32), |(a, b), x| (a.min(x), b.max(x)));
        assert!(most - least > 0.1, "{what}: logits of one size");

        for round in 0..3 {
            let mut caches = model.new_caches(&CacheOptions::default())?;
            let (mut at, mut found) = (0, Vec::new());
            // At first in one call.
            let most = if round == 0 { TOKENS } else { 24 };
            let pieces = if round == 0 {
                vec![most]
            } else {
                rng.partition(TOKENS, most)
            };
            let threads = Threads::new(1 + round)?;
            for piece in &pieces {
                let fed = &ids[at..at + piece];
                found.extend(
                    threads.run(|| feed(&model, &mut caches, fed).map_err(|error| error.to_string()))?,
                );
                at += piece;
            }
            assert!(found == expected, "{what}: {pieces:?}");
            assert_same(&format!("{what}: {pieces:?}"), &plain, &caches)?;
        }
        follows_a_random_schedule(&what, &model, &ids, &rows, &mut rng)?;
        seen.push(expected);
    }
    // What is not rounded is another model; there must be two of them, or a choice had no effect.
    let rounded = what.contains("F32") || what.contains("F16") || what.contains("mxfp8");
    assert_eq!(seen[0] == seen[1], rounded, "{what}");
    Ok(())
}

/// Rounds of up to four drafts, of which every number from none to all is kept as often.
fn follows_a_random_schedule(
    what: &str,
    model: &HybridModel,
    ids: &[u32],
    rows: &[Vec<u32>],
    rng: &mut Rng,
) -> Result<()> {
    const DRAFTS: usize = 4;
    let (mut plain, mut caches) = (
        model.new_caches(&CacheOptions::default())?,
        model.new_caches(&CacheOptions::default())?,
    );
    let (mut at, mut deck) = (0, Vec::new());
    while at + DRAFTS < ids.len() {
        if deck.is_empty() {
            deck.extend(0..=DRAFTS);
        }
        let kept = 1 + deck.swap_remove(rng.below(deck.len()));
        // The pending token, drafts that are right, and others.
        let mut fed = ids[at..at + kept].to_vec();
        fed.extend(
            ids[at + kept..=at + DRAFTS]
                .iter()
                .map(|id| (id + 1) % WIDTH as u32),
        );
        let checkpoint = caches.checkpoint()?;
        let found = feed(model, &mut caches, &fed)?;
        caches.trim(fed.len() - kept)?;
        caches.commit(checkpoint);
        let expected = rows[at..at + kept].concat();
        assert!(found[..expected.len()] == expected, "{what}: {kept} kept at {at}");
        feed(model, &mut plain, &ids[at..at + kept])?;
        assert_same(&format!("{what}: {kept} kept at {at}"), &plain, &caches)?;
        at += kept;
    }
    Ok(())
}

/// GGUF's types: name, number, elements and bytes of a block, where in it what is multiplied with numbers stands, and its size
/// that gives weights like those of a model.
const KINDS: [(&str, u32, u64, usize, &[(usize, f32)]); 17] = [
    ("F32", 0, 1, 4, &[]),
    ("F16", 1, 1, 2, &[]),
    ("BF16", 30, 1, 2, &[]),
    ("Q4_0", 2, 32, 18, &[(0, 0.013)]),
    ("Q4_1", 3, 32, 20, &[(0, 0.013), (2, -0.1)]),
    ("Q5_0", 6, 32, 22, &[(0, 0.006)]),
    ("Q5_1", 7, 32, 24, &[(0, 0.006), (2, -0.1)]),
    ("Q8_0", 8, 32, 34, &[(0, 8e-4)]),
    ("Q2_K", 10, 256, 84, &[(80, 0.006), (82, 0.009)]),
    ("Q3_K", 11, 256, 110, &[(108, 0.0014)]),
    ("Q4_K", 12, 256, 144, &[(0, 3e-4), (2, 0.0022)]),
    ("Q5_K", 13, 256, 176, &[(0, 1.5e-4), (2, 0.0022)]),
    ("Q6_K", 14, 256, 210, &[(208, 1.2e-4)]),
    ("IQ4_NL", 20, 32, 18, &[(0, 9e-4)]),
    ("IQ4_XS", 23, 256, 136, &[(0, 1.2e-4)]),
    ("MXFP4", 39, 32, 17, &[]),
    ("NVFP4", 40, 64, 36, &[]),
];

/// The bytes of an f16, rounded down. What is below 2^-14 becomes zero.
fn f16(x: f32) -> [u8; 2] {
    let magnitude = (x.abs().to_bits() >> 13).saturating_sub(112 << 10) as u16;
    (magnitude | u16::from(x < 0.0) << 15).to_le_bytes()
}

/// A random matrix of a type.
fn matrix(name: &str, rows: u64, kind: (&str, u32, u64, usize, &[(usize, f32)]), rng: &mut Rng) -> Spec {
    let (of, number, block, bytes, scales) = kind;
    let mut data = Vec::new();
    for _ in 0..rows * WIDTH / block {
        let mut block: Vec<u8> = (0..bytes).map(|_| rng.below(256) as u8).collect();
        let float = (rng.below(2001) as f32 - 1000.0) / 10_000.0;
        match of {
            "F32" => block.copy_from_slice(&float.to_le_bytes()),
            "F16" => block.copy_from_slice(&f16(float)),
            "BF16" => block.copy_from_slice(&float.to_le_bytes()[2..]),
            "MXFP4" => block[0] = 120 + (block[0] & 1),
            "NVFP4" => block[..4].iter_mut().for_each(|scale| *scale = 8 | *scale & 7),
            _ => {}
        }
        for (at, scale) in scales {
            block[*at..at + 2].copy_from_slice(&f16(scale * (0.75 + float)));
        }
        data.extend(block);
    }
    Spec {
        name: name.to_owned(),
        shape: vec![rows, WIDTH],
        kind: number,
        data,
    }
}

/// A model of a linear layer, with two value heads a key head, and a full one, every matrix of one type.
fn model_of(kind: (&str, u32, u64, usize, &[(usize, f32)])) -> File {
    let mut file = File::model();
    for (key, value) in [
        ("block_count", 2),
        ("nextn_predict_layers", 0),
        ("context_length", 512),
        ("embedding_length", 256),
        ("feed_forward_length", 256),
        ("attention.key_length", 128),
        ("attention.value_length", 128),
        ("rope.dimension_count", 32),
        ("ssm.state_size", 64),
        ("ssm.group_count", 2),
        ("ssm.time_step_rank", 4),
        ("ssm.inner_size", 256),
    ] {
        file.set(&format!("qwen35.{key}"), Value::U32(value));
    }
    file.tensors.clear();
    let mut rng = Rng(5);
    let mut matrices = vec![("token_embd".to_owned(), 256), ("output".to_owned(), 256)];
    let mut vectors = vec![("output_norm.weight".to_owned(), vec![256])];
    for block in 0..2 {
        let own: &[(&str, u64)] = match block {
            0 => &[
                ("attn_qkv", 512),
                ("attn_gate", 256),
                ("ssm_beta", 4),
                ("ssm_alpha", 4),
                ("ssm_out", 256),
            ],
            _ => &[
                ("attn_q", 512),
                ("attn_k", 128),
                ("attn_v", 128),
                ("attn_output", 256),
            ],
        };
        let both = [("ffn_gate", 256), ("ffn_up", 256), ("ffn_down", 256)];
        matrices.extend(
            own.iter()
                .chain(&both)
                .map(|(name, rows)| (format!("blk.{block}.{name}"), *rows)),
        );
        let own: &[(&str, &[u64])] = match block {
            0 => &[
                ("ssm_conv1d.weight", &[512, 4]),
                ("ssm_a", &[4]),
                ("ssm_dt.bias", &[4]),
                ("ssm_norm.weight", &[64]),
            ],
            _ => &[("attn_q_norm.weight", &[128]), ("attn_k_norm.weight", &[128])],
        };
        let both: [(&str, &[u64]); 2] = [
            ("attn_norm.weight", &[256]),
            ("post_attention_norm.weight", &[256]),
        ];
        let all = own.iter().chain(&both);
        vectors.extend(all.map(|(name, shape)| (format!("blk.{block}.{name}"), shape.to_vec())));
    }
    for (name, rows) in matrices {
        file.tensors
            .push(matrix(&format!("{name}.weight"), rows, kind, &mut rng));
    }
    for (name, shape) in vectors {
        let (least, most) = match name.rsplit_once('.').map_or("", |(_, end)| end) {
            "ssm_a" => (-1.5, -0.2),
            _ if name.contains("conv1d") => (-0.5, 0.5),
            _ => (0.7, 1.3),
        };
        let numbers: Vec<f32> = (0..shape.iter().product())
            .map(|_: u64| least + (most - least) * rng.below(1000) as f32 / 1000.0)
            .collect();
        file.tensors
            .push(Spec::f32(&name, &shape, |i| numbers[i as usize]));
    }
    file
}

#[test]
fn every_gguf_type_keeps_the_law_and_follows_random_schedules() -> Result<()> {
    for kind in KINDS {
        let dir = TempDir::new()?;
        let path = dir.path().join("model.gguf");
        std::fs::write(&path, model_of(kind).bytes())?;
        keeps_the_law(kind.0, &path)?;
    }
    Ok(())
}

#[test]
fn every_packing_of_mlx_keeps_the_law_and_follows_random_schedules() -> Result<()> {
    let config = seeded::dense(|text| {
        for (name, value) in [
            ("hidden_size", 256),
            ("intermediate_size", 256),
            ("num_hidden_layers", 2),
            ("full_attention_interval", 2),
            ("head_dim", 64),
            ("linear_key_head_dim", 64),
            ("linear_value_head_dim", 64),
        ] {
            text[name] = json!(value);
        }
    });
    let tensors = tensors(&config)?;
    for packing in PACKINGS {
        let (mode, bits, group) = packing;
        let (mut file, mut rng) = (Tensors::new(), Rng(29));
        for (name, tensor) in &tensors {
            let own = match name.starts_with("lm_head") {
                true => format!("language_model.{name}"),
                false => format!("language_model.model.{name}"),
            };
            match own.strip_suffix(".weight") {
                Some(path) if tensor.rank() == 2 => {
                    let (parts, _) = packed(tensor.dims(), packing, &mut rng)?;
                    file.extend(
                        parts
                            .into_iter()
                            .map(|(end, part)| (format!("{path}.{end}"), part)),
                    );
                }
                _ if name.ends_with("conv1d.weight") => {
                    file.insert(own, tensor.transpose(1, 2)?.contiguous()?);
                }
                // Norms of 1 + w.
                _ if name.ends_with("norm.weight") && !name.ends_with("linear_attn.norm.weight") => {
                    file.insert(own, (tensor + 1.0)?);
                }
                _ => {
                    file.insert(own, tensor.clone());
                }
            }
        }
        let mut config = config.clone();
        config["quantization"] = match mode {
            "global" => json!({"group_size": group, "bits": bits, "mode": "nvfp4", "global_scale": true}),
            _ => json!({"group_size": group, "bits": bits, "mode": mode}),
        };
        let dir = TempDir::new()?;
        write(dir.path(), &config, &file)?;
        keeps_the_law(&format!("{mode} of {bits} bits in groups of {group}"), dir.path())?;
    }
    Ok(())
}
