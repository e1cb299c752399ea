//! Loading takes the memory that the model takes, and little more: never the file twice, nor a whole model in between.
//!
//! What is measured is the most that was resident, by the system's own count: anonymous memory, and pages of the mapped files,
//! which the system could take back but which stand in every list of processes. Each model is loaded by a process of its own,
//! and what that had resident before is taken off.
#![cfg(target_os = "linux")]

mod common;
#[path = "common/gguf.rs"]
mod gguf;

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::process::Command;

use common::{seeded, Result};
use gguf::{text, Spec, Value};
use recant::candle::{DType, Device, Tensor};
use recant::LoadOptions;
use recant_weights::{Source, Stored};
use serde_json::json;
use tempfile::TempDir;

/// What may be resident at most, of what the files have.
const MOST: f64 = 1.15;
const LAYERS: usize = 24;
const KEY_HEADS: usize = 4;
const VALUE_HEADS: usize = 8;
const HEAD: usize = 64;

/// Names and shapes of a model's tensors, in the order in which it asks for them.
#[derive(Default)]
struct Shapes(Vec<(String, Vec<usize>)>);

impl Source for Shapes {
    fn has(&self, name: &str) -> bool {
        !name.contains(".mlp.experts.") && !name.contains(".switch_mlp.")
    }

    fn take(&mut self, name: &str, shape: &[usize]) -> recant_weights::Result<Tensor> {
        self.0.push((name.to_owned(), shape.to_vec()));
        Tensor::zeros(shape, DType::BF16, &Device::Cpu).map_err(|source| recant_weights::Error::Tensor {
            tensor: name.to_owned(),
            source: source.into(),
        })
    }

    fn take_stacked(
        &mut self,
        name: &str,
        shape: [usize; 3],
        index: usize,
    ) -> recant_weights::Result<Stored> {
        let [_, rows, width] = shape;
        let matrix = self.take(name, &[rows, width])?;
        if let Some((_, last)) = self.0.last_mut() {
            *last = shape.to_vec();
        }
        if index > 0 {
            self.0.pop();
        }
        Ok(Stored::Float(matrix))
    }

    fn discard(&mut self, _name: &str) {}
}

fn edit(text: &mut serde_json::Value, hidden: usize, vocab: usize) {
    for (name, value) in [
        ("hidden_size", hidden),
        ("intermediate_size", 3 * hidden),
        ("num_hidden_layers", LAYERS),
        ("head_dim", HEAD),
        ("linear_num_key_heads", KEY_HEADS),
        ("linear_num_value_heads", VALUE_HEADS),
        ("linear_key_head_dim", HEAD),
        ("linear_value_head_dim", HEAD),
        ("vocab_size", vocab),
    ] {
        text[name] = json!(value);
    }
    text["tie_word_embeddings"] = json!(true);
}

/// A dense model with the proportions of Qwen3.5-0.8B, of which the embedding is a third.
fn dense(hidden: usize) -> serde_json::Value {
    seeded::dense(|text| edit(text, hidden, 128 * hidden))
}

/// A mixture of which a layer is a sixth.
fn mixture() -> serde_json::Value {
    seeded::moe(|text| {
        edit(text, 512, 8192);
        text["num_hidden_layers"] = json!(6);
        text["num_experts"] = json!(64);
        text["moe_intermediate_size"] = json!(256);
        text["shared_expert_intermediate_size"] = json!(256);
    })
}

fn shapes(config: &serde_json::Value) -> Result<Vec<(String, Vec<usize>)>> {
    let mut shapes = Shapes::default();
    seeded::model_of(config, "", &mut shapes, &LoadOptions::default())?;
    Ok(shapes.0)
}

/// Random bytes of which every two are a bf16, and an f16, of ordinary size.
fn noise(bytes: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut noise = Vec::with_capacity(bytes + 8);
    while noise.len() < bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        noise.extend((state & 0xbcff_bcff_bcff_bcff).to_le_bytes());
    }
    noise.truncate(bytes);
    noise
}

/// The tensors of a matrix in some format: end of the name, type, shape, bytes of an element.
type Parts = Vec<(&'static str, &'static str, Vec<usize>, usize)>;

fn bf16(shape: &[usize]) -> Parts {
    vec![("", "BF16", shape.to_vec(), 2)]
}

/// MLX's affine, of 4 bits in groups of 64.
fn affine(shape: &[usize]) -> Parts {
    let [lead @ .., width] = shape else {
        return Parts::new();
    };
    let with = |last: usize| [lead, &[last]].concat();
    vec![
        ("weight", "U32", with(width / 8), 4),
        ("scales", "BF16", with(width / 64), 2),
        ("biases", "BF16", with(width / 64), 2),
    ]
}

/// A folder of safetensors in so many files. Matrices are packed if wanted, all else is bf16.
fn write_folder(dir: &Path, config: &serde_json::Value, packed: bool, files: usize) -> Result<()> {
    let mut tensors = Vec::new();
    for (name, shape) in shapes(config)? {
        // A conversion has the taps of a convolution in the middle.
        let conv = packed && name.ends_with("conv1d.weight");
        let shape = if conv { vec![shape[0], shape[2], 1] } else { shape };
        let parts = match packed && shape.len() == 2 && shape[0] >= 256 {
            true => affine(&shape),
            false => bf16(&shape),
        };
        let name = match name.as_str() {
            "lm_head.weight" => name,
            _ => format!("model.language_model.{name}"),
        };
        for (end, dtype, shape, size) in parts {
            let name = match end {
                "" => name.clone(),
                end => format!("{}{end}", name.trim_end_matches("weight")),
            };
            tensors.push((name, dtype, shape, size));
        }
    }
    let mut config = config.clone();
    if packed {
        config["quantization"] = json!({"group_size": 64, "bits": 4, "mode": "affine"});
    }
    std::fs::write(dir.join("config.json"), config.to_string())?;
    let mut map = serde_json::Map::new();
    let block = noise(1 << 20);
    for (i, tensors) in tensors.chunks(tensors.len().div_ceil(files)).enumerate() {
        let file = match files {
            1 => "model.safetensors".to_owned(),
            _ => format!("model-{:05}-of-{files:05}.safetensors", i + 1),
        };
        let (mut header, mut end) = (serde_json::Map::new(), 0);
        for (name, dtype, shape, size) in tensors {
            let start = end;
            end += shape.iter().product::<usize>() * size;
            let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]});
            header.insert(name.clone(), entry);
            map.insert(name.clone(), json!(file));
        }
        let header = serde_json::Value::from(header).to_string();
        let mut out = BufWriter::new(File::create(dir.join(file))?);
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(header.as_bytes())?;
        for start in (0..end).step_by(block.len()) {
            out.write_all(&block[..block.len().min(end - start)])?;
        }
        out.flush()?;
    }
    if files > 1 {
        let index = json!({"weight_map": map}).to_string();
        std::fs::write(dir.join("model.safetensors.index.json"), index)?;
    }
    let tokenizer = common::folder("demo-target").ok_or("no demo target")?;
    std::fs::copy(tokenizer.join("tokenizer.json"), dir.join("tokenizer.json"))?;
    Ok(())
}

/// What llama.cpp calls a tensor.
fn gguf_name(canonical: &str) -> String {
    const NAMES: [(&str, &str); 22] = [
        ("embed_tokens.weight", "token_embd.weight"),
        ("input_layernorm.weight", "attn_norm.weight"),
        ("post_attention_layernorm.weight", "post_attention_norm.weight"),
        ("self_attn.q_proj.weight", "attn_q.weight"),
        ("self_attn.k_proj.weight", "attn_k.weight"),
        ("self_attn.v_proj.weight", "attn_v.weight"),
        ("self_attn.o_proj.weight", "attn_output.weight"),
        ("self_attn.q_norm.weight", "attn_q_norm.weight"),
        ("self_attn.k_norm.weight", "attn_k_norm.weight"),
        ("linear_attn.in_proj_qkv.weight", "attn_qkv.weight"),
        ("linear_attn.in_proj_z.weight", "attn_gate.weight"),
        ("linear_attn.in_proj_b.weight", "ssm_beta.weight"),
        ("linear_attn.in_proj_a.weight", "ssm_alpha.weight"),
        ("linear_attn.conv1d.weight", "ssm_conv1d.weight"),
        ("linear_attn.A_log", "ssm_a"),
        ("linear_attn.dt_bias", "ssm_dt.bias"),
        ("linear_attn.norm.weight", "ssm_norm.weight"),
        ("linear_attn.out_proj.weight", "ssm_out.weight"),
        ("mlp.gate_proj.weight", "ffn_gate.weight"),
        ("mlp.up_proj.weight", "ffn_up.weight"),
        ("mlp.down_proj.weight", "ffn_down.weight"),
        ("norm.weight", "output_norm.weight"),
    ];
    let (block, part) = match canonical
        .strip_prefix("layers.")
        .and_then(|rest| rest.split_once('.'))
    {
        Some((layer, part)) => (format!("blk.{layer}."), part),
        None => (String::new(), canonical),
    };
    let name = NAMES
        .iter()
        .find(|(of, _)| *of == part)
        .map_or(part, |(_, name)| name);
    format!("{block}{name}")
}

/// A GGUF file of the dense model. Blocks of `bytes` bytes hold `numbers` numbers and have f16 scales at some places.
fn write_gguf(
    path: &Path,
    hidden: usize,
    kind: u32,
    numbers: u64,
    bytes: u64,
    scales: &[usize],
) -> Result<()> {
    let mut file = gguf::File::model();
    for (key, value) in [
        ("block_count", LAYERS),
        ("nextn_predict_layers", 0),
        ("embedding_length", hidden),
        ("feed_forward_length", 3 * hidden),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("attention.key_length", HEAD),
        ("attention.value_length", HEAD),
        ("rope.dimension_count", HEAD / 4),
        ("full_attention_interval", 4),
        ("ssm.state_size", HEAD),
        ("ssm.group_count", KEY_HEADS),
        ("ssm.time_step_rank", VALUE_HEADS),
        ("ssm.inner_size", VALUE_HEADS * HEAD),
    ] {
        file.set(&format!("qwen35.{key}"), Value::U32(value as u32));
    }
    file.set("qwen35.rope.freq_base", Value::F32(1e7));
    file.set("general.name", text("random weights"));
    file.tensors.clear();
    for (name, shape) in shapes(&dense(hidden))? {
        let named = gguf_name(&name);
        let mut shape: Vec<u64> = shape.iter().map(|size| *size as u64).collect();
        shape.retain(|size| *size != 1);
        let count: u64 = shape.iter().product();
        if shape.len() == 2 && shape[0] >= 256 && !name.ends_with("conv1d.weight") {
            let mut data = noise((count / numbers * bytes) as usize);
            for block in data.chunks_exact_mut(bytes as usize) {
                for at in scales {
                    block[*at..at + 2].copy_from_slice(&[0x66, 0x2e]);
                }
            }
            let name = named;
            file.tensors.push(Spec {
                name,
                shape,
                kind,
                data,
            });
        } else {
            let number = if name.ends_with("A_log") { -0.5 } else { 0.1 };
            file.tensors.push(Spec::f32(&named, &shape, |_| number));
        }
    }
    std::fs::write(path, file.bytes())?;
    Ok(())
}

fn size(path: &Path) -> Result<u64> {
    if path.is_file() {
        return Ok(path.metadata()?.len());
    }
    let mut size = 0;
    for entry in std::fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().ends_with(".safetensors") {
            size += entry.metadata()?.len();
        }
    }
    Ok(size)
}

/// Loads a model in another process: the most that was resident, and what is in the end, of what the files have.
fn measure(what: &str, path: &Path) -> Result<(f64, f64)> {
    let output = Command::new(std::env::current_exe()?)
        .args(["--exact", "child", "--ignored", "--nocapture"])
        .env("RECANT_MODEL", path)
        .output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    let found = said.lines().find_map(|line| line.strip_prefix("resident "));
    let found = found.ok_or_else(|| format!("{said}\n{}", String::from_utf8_lossy(&output.stderr)))?;
    let mut numbers = found.split(' ').map(str::parse::<f64>);
    let mut next = || numbers.next().ok_or("a number is missing");
    let (peak, held, seconds) = (next()??, next()??, next()??);
    let file = size(path)? as f64;
    println!(
        "{what}: {:.0} MB of files, {:.3} times that at most, {:.3} in the end, {seconds:.2} s",
        file / 1e6,
        peak / file,
        held / file
    );
    Ok((peak / file, held / file))
}

/// A number of bytes that the system knows of this process.
fn status(field: &str) -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    let kilobytes = line.ok_or("no such field")?.trim().trim_end_matches(" kB");
    Ok(kilobytes.parse::<u64>()? * 1024)
}

#[test]
#[ignore = "run by other tests, in a process of its own"]
fn child() -> Result<()> {
    let path = std::env::var("RECANT_MODEL")?;
    let before = status("VmRSS")?;
    // The most is counted anew from here on.
    std::fs::write("/proc/self/clear_refs", "5")?;
    let start = std::time::Instant::now();
    let model = recant::load(path)?;
    let seconds = start.elapsed().as_secs_f64();
    let (most, now) = (status("VmHWM")?, status("VmRSS")?);
    println!("resident {} {} {seconds}", most - before, now - before);
    drop(model);
    Ok(())
}

#[test]
fn weights_in_bf16_are_never_there_twice() -> Result<()> {
    for files in [1, 3] {
        let dir = TempDir::new()?;
        write_folder(dir.path(), &dense(640), false, files)?;
        let (peak, _) = measure(&format!("bf16 in {files}"), dir.path())?;
        assert!(peak < MOST, "{peak}");
    }
    Ok(())
}

#[test]
fn experts_that_are_stored_together_are_not_copied_together() -> Result<()> {
    let dir = TempDir::new()?;
    write_folder(dir.path(), &mixture(), false, 1)?;
    let (peak, _) = measure("bf16 experts", dir.path())?;
    assert!(peak < MOST, "{peak}");
    Ok(())
}

#[test]
fn a_packed_conversion_stays_packed() -> Result<()> {
    let dir = TempDir::new()?;
    write_folder(dir.path(), &dense(1024), true, 1)?;
    let (peak, _) = measure("MLX 4 bits", dir.path())?;
    assert!(peak < MOST, "{peak}");
    Ok(())
}

#[test]
fn blocks_of_a_gguf_file_are_not_there_twice() -> Result<()> {
    let dir = TempDir::new()?;
    let path = dir.path().join("model.gguf");
    write_gguf(&path, 768, 8, 32, 34, &[0])?;
    let (peak, _) = measure("GGUF Q8_0", &path)?;
    assert!(peak < MOST, "{peak}");
    write_gguf(&path, 1024, 12, 256, 144, &[0, 2])?;
    let (peak, _) = measure("GGUF Q4_K", &path)?;
    assert!(peak < MOST, "{peak}");
    Ok(())
}
