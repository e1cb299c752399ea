//! The grouping law and random schedules for weights of every type that files hold: each GGUF type and each packing of MLX, in a
//! model whose every matrix has it.

mod common;
#[path = "common/gguf.rs"]
mod file;
#[path = "common/packed.rs"]
mod packed;

use std::path::Path;

use common::checkpoint::{tensors, write, Tensors};
use common::law::{in_full, keeps_the_law, model};
use common::{seeded, Result, Rng};
use file::{File, Spec, Value};
use packed::{packed, PACKINGS};
use recant::LoadOptions;
use serde_json::json;
use tempfile::TempDir;

const TOKENS: usize = 72;
/// Width of every matrix: the largest block of any type.
const WIDTH: u64 = 256;

fn random_ids(rng: &mut Rng, count: usize) -> Vec<u32> {
    (0..count).map(|_| rng.below(WIDTH as usize) as u32).collect()
}

/// Fails unless a checkpoint keeps the law, with activations rounded and not.
fn check(what: &str, path: &Path) -> Result<()> {
    let ids = random_ids(&mut Rng(23), TOKENS);
    let mut seen = Vec::new();
    for options in [LoadOptions::default(), in_full()] {
        let what = format!("{what}, {:?}", options.activations);
        let model = model(path, &options).map_err(|error| format!("{what}: {error}"))?;
        let logits = keeps_the_law(&what, &model, &ids)?.concat();
        let numbers = logits.iter().map(|bits| f32::from_bits(*bits));
        assert!(numbers.clone().all(f32::is_finite), "{what}");
        let (least, most) = numbers.fold((0.0_f32, 0.0_f32), |(a, b), x| (a.min(x), b.max(x)));
        assert!(most - least > 0.1, "{what}: logits of one size");
        seen.push(logits);
    }
    // What is not rounded is another model; there must be two of them, or a choice had no effect.
    let rounded = what.contains("F32") || what.contains("F16") || what.contains("mxfp8");
    assert_eq!(seen[0] == seen[1], rounded, "{what}");
    Ok(())
}

/// A type of GGUF: name, number, elements and bytes of a block, where in it what is multiplied with numbers stands, and its size
/// that gives weights like those of a model.
type Kind = (&'static str, u32, u64, usize, &'static [(usize, f32)]);

const KINDS: [Kind; 17] = [
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
fn matrix(name: &str, rows: u64, kind: Kind, rng: &mut Rng) -> Spec {
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
fn model_of(kind: Kind) -> File {
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
        check(kind.0, &path)?;
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
        check(&format!("{mode} of {bits} bits in groups of {group}"), dir.path())?;
    }
    Ok(())
}
