//! GGUF files: what metadata and tensors become, models in parts, and what cannot be used, by name.

#[path = "common/gguf.rs"]
mod common;

use std::path::{Path, PathBuf};

use common::file::{self, text, File, Value};
use common::{changed, refused, says, Dir};
use recant_weights::{Cutting, Folder, Norms, Stored, TokenKind, Weights};
use serde_json::json;

fn open(file: &File) -> (Dir, Folder) {
    let dir = Dir::new();
    let path = dir.write("model.gguf", &file.bytes());
    let folder = Folder::open(path).unwrap();
    (dir, folder)
}

fn floats(stored: &Stored) -> Vec<f32> {
    match stored {
        Stored::Float(x) => x.flatten_all().unwrap().to_vec1().unwrap(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn metadata_are_the_configuration_of_the_same_model_on_the_hub() {
    let mut file = File::model();
    file.set(
        "qwen35.attention.recurrent_layers",
        Value::Bools(vec![true, false, false]),
    );
    let (_dir, folder) = open(&file);
    assert!(folder.is_gguf());
    let expected = json!({
        "model_type": "qwen3_5",
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "linear_conv_kernel_dim": 4,
        "intermediate_size": 12,
        "full_attention_interval": 2,
        "num_hidden_layers": 2,
        "head_dim": 8,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 4,
        "vocab_size": 6,
        "tie_word_embeddings": true,
        "attention_bias": false,
        "mtp_num_hidden_layers": 1,
        "eos_token_id": [3],
        // Not 9.999999974752427e-7, which is what an f32 holds.
        "rms_norm_eps": 1e-6,
        "layer_types": ["linear_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    });
    assert_eq!(*folder.config(), expected);
    let said = folder.tokenizer_config().unwrap();
    assert_eq!(said["eos_token"], "<|im_end|>");
    assert_eq!(said["chat_template"][0]["name"], "default");
}

#[test]
fn the_vocabulary_tells_marked_tokens_from_pieces_and_padding() {
    let (_dir, folder) = open(&File::model());
    let vocabulary = folder.vocabulary().unwrap().unwrap();
    use TokenKind::*;
    let expected = [
        ("a", Normal),
        ("b", Normal),
        ("ab", Normal),
        ("<|im_end|>", Control),
        ("<think>", UserDefined),
        ("[PAD5]", Unused),
    ];
    assert_eq!(vocabulary.tokens, expected);
    assert_eq!(vocabulary.merges, [("a", "b")]);
    assert_eq!(vocabulary.cutting, Cutting::Qwen35);
}

#[test]
fn every_tensor_is_taken_once_in_the_order_and_form_of_the_hub() {
    let (_dir, folder) = open(&File::model());
    let mut weights = folder.weights().unwrap();
    assert_eq!(weights.norms(), Norms::OnePlus);
    // sglang#38363, tensai#251: `ssm_a` is -exp(A_log), the convolution is squeezed.
    let a_log = weights.take("layers.0.linear_attn.A_log", &[2]).unwrap();
    let a_log: Vec<f32> = a_log.to_vec1().unwrap();
    assert_eq!(a_log, [0.5_f32.ln(), (0.5_f32 - 1.0 / 1024.0).ln()]);
    let conv = weights
        .take("layers.0.linear_attn.conv1d.weight", &[16, 1, 4])
        .unwrap();
    assert_eq!(conv.dims(), [16, 1, 4]);
    let norm = weights
        .take("norm.weight", &[8])
        .unwrap()
        .to_vec1::<f32>()
        .unwrap();
    assert_eq!(norm[1], 1.0 + 1.0 / 1024.0);
    take_rest(&mut weights);
    let inventory = weights.finish().unwrap();
    assert_eq!((inventory.taken, inventory.mtp), (27, 15));

    let mut head = folder.mtp().unwrap().unwrap();
    assert_eq!(head.norms(), Norms::OnePlus);
    head.take_matrix("fc.weight", [8, 16]).unwrap();
    for name in ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"] {
        head.take(&format!("{name}.weight"), &[8]).unwrap();
    }
    take_full(&mut head, "layers.0");
    head.finish().unwrap();
}

fn take_rest(weights: &mut Weights<'_>) {
    weights.take_matrix("embed_tokens.weight", [6, 8]).unwrap();
    let mixer = "layers.0.linear_attn";
    for (name, rows) in [
        ("in_proj_qkv", 16),
        ("in_proj_z", 8),
        ("in_proj_b", 2),
        ("in_proj_a", 2),
        ("out_proj", 8),
    ] {
        weights
            .take_matrix(&format!("{mixer}.{name}.weight"), [rows, 8])
            .unwrap();
    }
    weights.take(&format!("{mixer}.dt_bias"), &[2]).unwrap();
    weights.take(&format!("{mixer}.norm.weight"), &[4]).unwrap();
    take_both(weights, "layers.0");
    take_full(weights, "layers.1");
}

fn take_both(weights: &mut Weights<'_>, layer: &str) {
    for name in ["input_layernorm", "post_attention_layernorm"] {
        weights.take(&format!("{layer}.{name}.weight"), &[8]).unwrap();
    }
    for (name, shape) in [
        ("gate_proj", [12, 8]),
        ("up_proj", [12, 8]),
        ("down_proj", [8, 12]),
    ] {
        weights
            .take_matrix(&format!("{layer}.mlp.{name}.weight"), shape)
            .unwrap();
    }
}

fn take_full(weights: &mut Weights<'_>, layer: &str) {
    take_both(weights, layer);
    for (name, shape) in [("q", [32, 8]), ("k", [8, 8]), ("v", [8, 8]), ("o", [8, 16])] {
        weights
            .take_matrix(&format!("{layer}.self_attn.{name}_proj.weight"), shape)
            .unwrap();
    }
    for name in ["q_norm", "k_norm"] {
        weights
            .take(&format!("{layer}.self_attn.{name}.weight"), &[8])
            .unwrap();
    }
}

/// sglang#38363, ik_llama.cpp#1654.
#[test]
fn three_value_heads_a_key_head_go_back_to_their_places_in_every_tensor() {
    let mut file = File::model();
    for (key, value) in [
        ("state_size", 1),
        ("group_count", 2),
        ("time_step_rank", 6),
        ("inner_size", 6),
    ] {
        file.set(&format!("qwen35.ssm.{key}"), Value::U32(value));
    }
    // Of each tensor, where grouped head `h` is to be, the number h; queries and keys are -1.
    let dealt = [0.0, 3.0, 1.0, 4.0, 2.0, 5.0];
    let heads = |i: u64| dealt[i as usize];
    let mut set = |name: &str, shape: &[u64], number: &dyn Fn(u64) -> f32| {
        let name = format!("blk.0.{name}");
        *file.tensor(&name) = file::Spec::f32(&name, shape, number);
    };
    let channel = |row: u64| if row < 4 { -1.0 } else { heads(row - 4) };
    set("attn_qkv.weight", &[10, 8], &|i| channel(i / 8));
    set("ssm_conv1d.weight", &[10, 4], &|i| channel(i / 4));
    set("attn_gate.weight", &[6, 8], &|i| heads(i / 8));
    set("ssm_alpha.weight", &[6, 8], &|i| heads(i / 8));
    set("ssm_beta.weight", &[6, 8], &|i| heads(i / 8));
    set("ssm_a", &[6], &|i| -(heads(i).exp()));
    set("ssm_dt.bias", &[6], &heads);
    set("ssm_norm.weight", &[1], &|_| 1.0);
    set("ssm_out.weight", &[8, 6], &|i| heads(i % 6));
    let (_dir, folder) = open(&file);
    let mut weights = folder.weights().unwrap();
    let grouped = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0];
    let mut matrix = |name: &str, shape: [usize; 2]| {
        let found = weights.take_matrix(&format!("layers.0.linear_attn.{name}.weight"), shape);
        floats(&found.unwrap())
    };
    let first = |x: &[f32], width| x.iter().step_by(width).copied().collect::<Vec<_>>();
    assert_eq!(first(&matrix("in_proj_qkv", [10, 8])[32..], 8), grouped);
    for (name, rows) in [("in_proj_z", 6), ("in_proj_a", 6), ("in_proj_b", 6)] {
        assert_eq!(first(&matrix(name, [rows, 8]), 8), grouped, "{name}");
    }
    assert_eq!(matrix("out_proj", [8, 6])[6..12], grouped);
    let mut vector = |name: &str, shape: &[usize]| -> Vec<f32> {
        let found = weights.take(&format!("layers.0.linear_attn.{name}"), shape);
        found.unwrap().flatten_all().unwrap().to_vec1().unwrap()
    };
    assert_eq!(first(&vector("conv1d.weight", &[10, 1, 4])[16..], 4), grouped);
    assert_eq!(vector("dt_bias", &[6]), grouped);
    for (found, head) in vector("A_log", &[6]).iter().zip(grouped) {
        assert!((found - head).abs() < 1e-6, "{found} {head}");
    }
}

#[test]
fn a_head_that_is_promised_and_absent_is_no_head() {
    let mut file = File::model();
    file.tensors.retain(|tensor| !tensor.name.starts_with("blk.2."));
    let (_dir, folder) = open(&file);
    assert!(folder.mtp().unwrap().is_none());
    let mut weights = folder.weights().unwrap();
    take_rest(&mut weights);
    assert_eq!(folder.config()["num_hidden_layers"], 2);
}

#[test]
fn a_file_with_a_head_alone_is_no_model() {
    let mut file = File::model();
    file.tensors
        .retain(|tensor| !tensor.name.starts_with("blk.0.") && !tensor.name.starts_with("blk.1."));
    let (_dir, folder) = open(&file);
    assert!(folder.is_mtp_alone());
    assert!(folder.mtp().unwrap().is_some());
}

#[test]
fn a_head_of_missing_parts_is_told_from_a_whole_one() {
    let mut file = File::model();
    file.tensors
        .retain(|tensor| tensor.name != "blk.2.nextn.hnorm.weight");
    let (_dir, folder) = open(&file);
    let mut head = folder.mtp().unwrap().unwrap();
    says(
        &head.take("pre_fc_norm_hidden.weight", &[8]),
        &["pre_fc_norm_hidden.weight"],
    );
}

#[test]
fn a_tensor_of_another_shape_is_named_as_the_file_names_it() {
    let (_dir, folder) = open(&File::model());
    let mut weights = folder.weights().unwrap();
    let words = ["blk.0.ssm_conv1d.weight", "model.gguf", "[17, 4]", "[16, 4]"];
    says(
        &weights.take("layers.0.linear_attn.conv1d.weight", &[17, 1, 4]),
        &words,
    );
    says(
        &weights.take_matrix("layers.0.mlp.up_proj.weight", [8, 12]),
        &["blk.0.ffn_up.weight"],
    );
    // Nothing was taken.
    weights
        .take("layers.0.linear_attn.conv1d.weight", &[16, 1, 4])
        .unwrap();
}

#[test]
fn shapes_that_no_tensor_has_are_refused() {
    let mut file = File::model();
    file.tensors
        .push(file::Spec::f32("blk.0.ffn_gate_inp_shexp.weight", &[8], |_| 0.5));
    let (_dir, folder) = open(&file);
    let mut weights = folder.weights().unwrap();
    for shape in [&[][..], &[0], &[usize::MAX, 2], &[1, 1, 1, 1, 1]] {
        for name in [
            "mlp.shared_expert_gate.weight",
            "linear_attn.A_log",
            "linear_attn.conv1d.weight",
        ] {
            says(&weights.take(&format!("layers.0.{name}"), shape), &["blk.0."]);
        }
    }
    weights
        .take("layers.0.mlp.shared_expert_gate.weight", &[1, 8])
        .unwrap();
}

#[test]
fn a_tensor_that_fits_the_heads_of_no_metadata_is_refused() {
    let mut file = File::model();
    file.set("qwen35.ssm.group_count", Value::U32(2));
    file.set("qwen35.ssm.time_step_rank", Value::U32(4));
    file.set("qwen35.ssm.inner_size", Value::U32(16));
    let (_dir, folder) = open(&file);
    let mut weights = folder.weights().unwrap();
    let name = "layers.0.linear_attn.in_proj_qkv.weight";
    says(
        &weights.take_matrix(name, [16, 8]),
        &["blk.0.attn_qkv.weight", "value heads in the metadata"],
    );
}

#[test]
fn decays_that_grow_are_refused() {
    let mut file = File::model();
    *file.tensor("blk.0.ssm_a") = file::Spec::f32("blk.0.ssm_a", &[2], |i| i as f32 - 0.5);
    let (_dir, folder) = open(&file);
    let mut weights = folder.weights().unwrap();
    let words = ["blk.0.ssm_a", "value head 1 decays by 0.5"];
    says(&weights.take("layers.0.linear_attn.A_log", &[2]), &words);
}

#[test]
fn types_that_are_not_read_are_refused_by_name_before_any_tensor_is() {
    let mut file = File::model();
    *file.tensor("blk.0.ffn_up.weight") = file::Spec {
        name: "blk.0.ffn_up.weight".to_owned(),
        shape: vec![12, 256],
        kind: 16,
        data: vec![0; 12 * 66],
    };
    let (_dir, folder) = open(&file);
    says(
        &folder.weights().map(|_| ()),
        &["blk.0.ffn_up.weight", "IQ2_XXS", "Q4_K"],
    );
    assert!(folder.mtp().unwrap().is_some(), "the head has none of them");
}

/// The model with a matrix of NVFP4, and a tensor beside it.
fn with_factor(beside: file::Spec) -> File {
    let mut file = File::model();
    let name = "blk.0.ffn_up.weight";
    *file.tensor(name) = file::Spec {
        name: name.to_owned(),
        shape: vec![12, 64],
        kind: 40,
        // Scales of 1, all numbers 6.
        data: [&[0x38; 4][..], &[0x77; 32]].concat().repeat(12),
    };
    file.tensors.push(beside);
    file
}

#[test]
fn a_factor_of_nvfp4_multiplies_its_matrix_and_that_of_activations_does_nothing() {
    for (name, expected) in [("blk.0.ffn_up.scale", 1.5), ("blk.0.ffn_up.input_scale", 0.5)] {
        let (_dir, folder) = open(&with_factor(file::Spec::f32(name, &[1], |_| 3.0)));
        let mut weights = folder.weights().unwrap();
        let stored = weights
            .take_matrix("layers.0.mlp.up_proj.weight", [12, 64])
            .unwrap();
        let Stored::Groups(groups) = stored else {
            panic!("groups were expected");
        };
        let scales = groups.scales.to_dtype(candle_core::DType::F32).unwrap();
        // Of numbers that are doubled.
        assert_eq!(
            scales.flatten_all().unwrap().to_vec1::<f32>().unwrap(),
            [expected; 48]
        );
        // Nobody has to take what is beside it.
        assert_eq!(folder.config()["num_hidden_layers"], 2);
    }
}

#[test]
fn factors_that_are_not_read_are_refused_by_name() {
    let name = "blk.0.ffn_up.scale";
    let of_experts = with_factor(file::Spec::f32(name, &[12], |_| 1.0));
    refused(&of_experts.bytes(), &[name, "[12]", "factors of each expert"]);
    refused(
        &with_factor(file::Spec::f32(name, &[1], |_| f32::NAN)).bytes(),
        &[name, "NaN"],
    );
    let mut other = File::model();
    other.tensors.push(file::Spec::f32(name, &[1], |_| 1.0));
    refused(
        &other.bytes(),
        &[name, "blk.0.ffn_up.weight", "F32; expected NVFP4"],
    );
    changed(
        |file| {
            file.tensors
                .push(file::Spec::f32("blk.0.ffn_sideways.scale", &[1], |_| 1.0))
        },
        &["blk.0.ffn_sideways.scale"],
    );
}

#[test]
fn names_that_are_not_known_are_refused_by_name() {
    changed(
        |file| file.tensor("blk.0.ffn_up.weight").name = "blk.0.ffn_sideways.weight".to_owned(),
        &["1 tensor in no known naming", "blk.0.ffn_sideways.weight"],
    );
    changed(
        |file| file.tensor("blk.1.ffn_up.weight").name = "blk.7.ffn_up.weight".to_owned(),
        &["blk.7.ffn_up.weight"],
    );
}

#[test]
fn metadata_that_are_missing_mistyped_or_incoherent_are_refused_by_their_key() {
    let set = |key: &'static str, value: Value| move |file: &mut File| file.set(key, value);
    let unset = |key: &'static str| move |file: &mut File| file.unset(key);
    changed(
        set("general.architecture", text("llama")),
        &["llama", "qwen35, qwen35moe, qwen3next"],
    );
    changed(
        unset("general.architecture"),
        &["general.architecture", "nothing"],
    );
    changed(
        unset("qwen35.embedding_length"),
        &["qwen35.embedding_length", "nothing"],
    );
    changed(
        set("qwen35.embedding_length", text("8")),
        &["a whole number", "\"8\""],
    );
    changed(
        set("qwen35.block_count", Value::I32(-1)),
        &["qwen35.block_count", "-1"],
    );
    changed(
        set("qwen35.nextn_predict_layers", Value::U32(3)),
        &["less than the 3 blocks"],
    );
    changed(
        set("qwen35.nextn_predict_layers", Value::U64(u64::MAX)),
        &["less than the 3 blocks"],
    );
    changed(
        set("qwen35.attention.value_length", Value::U32(4)),
        &["value_length", "8, as key_length"],
    );
    changed(
        set("qwen35.ssm.time_step_rank", Value::U32(0)),
        &["time_step_rank", "from 1 to"],
    );
    changed(
        set("qwen35.ssm.group_count", Value::U32(u32::MAX)),
        &["group_count", "from 1 to"],
    );
    changed(
        set("qwen35.ssm.inner_size", Value::U32(9)),
        &["inner_size", "a multiple of 2"],
    );
    changed(
        set("qwen35.rope.dimension_count", Value::U32(16)),
        &["dimension_count", "at most 8"],
    );
    changed(
        set("qwen35.attention.recurrent_layers", Value::Bools(vec![true])),
        &["recurrent_layers", "3 in all"],
    );
    changed(
        set("qwen35.attention.head_count_kv", Value::I32s(vec![0, 1, 2])),
        &["head_count_kv", "different"],
    );
    changed(
        set("general.alignment", Value::U32(24)),
        &["general.alignment", "24"],
    );
    changed(
        set("tokenizer.ggml.eos_token_id", Value::I32(-1)),
        &["eos_token_id", "-1"],
    );
}

#[test]
fn numbers_of_layers_are_one_where_those_that_have_any_agree() {
    let mut file = File::model();
    file.set("qwen35.attention.head_count_kv", Value::I32s(vec![0, 1, 1]));
    let (_dir, folder) = open(&file);
    assert_eq!(folder.config()["num_key_value_heads"], 1);
}

#[test]
fn a_scaling_of_positions_reaches_the_configuration_by_its_name() {
    let mut file = File::model();
    file.set("qwen35.rope.scaling.type", text("yarn"));
    assert_eq!(open(&file).1.config()["rope_parameters"]["rope_type"], "yarn");
    file.set("qwen35.rope.scaling.type", text("none"));
    assert_eq!(open(&file).1.config()["rope_parameters"]["rope_type"], "default");
}

#[test]
fn vocabularies_of_other_kinds_and_broken_ones_are_refused_by_their_key() {
    for (key, value, words) in [
        (
            "model",
            text("llama"),
            &["tokenizer.ggml.model", "\"gpt2\"", "llama"][..],
        ),
        (
            "pre",
            text("deepseek"),
            &["tokenizer.ggml.pre", "\"qwen35\" or \"qwen2\"", "deepseek"],
        ),
        (
            "tokens",
            Value::I32s(vec![1]),
            &["tokenizer.ggml.tokens", "an array of texts"],
        ),
        (
            "token_type",
            Value::I32s(vec![1]),
            &["tokenizer.ggml.token_type", "6 elements"],
        ),
        (
            "token_type",
            Value::I32s(vec![1, 1, 6, 1, 1, 1]),
            &["token 2", "6"],
        ),
        (
            "merges",
            Value::Texts(vec!["ab".to_owned()]),
            &["tokenizer.ggml.merges", "\"ab\""],
        ),
    ] {
        let mut file = File::model();
        let key = format!("tokenizer.ggml.{key}");
        file.set(&key, value);
        let dir = Dir::new();
        // Some of it is read when the file is opened.
        let opened = Folder::open(dir.write("model.gguf", &file.bytes()));
        says(&opened.and_then(|folder| folder.vocabulary().map(|_| ())), words);
        file.unset(&key);
        says(&open(&file).1.vocabulary().map(|_| ()), &[&key, "nothing"]);
    }
}

// Files in parts, and folders.

/// The model in three parts: metadata alone, and two with tensors.
fn in_parts(dir: &Dir) -> [PathBuf; 3] {
    in_parts_of(dir, &File::model())
}

fn in_parts_of(dir: &Dir, whole: &File) -> [PathBuf; 3] {
    let mut parts = [(); 3].map(|()| File::default());
    parts[0].metadata.clone_from(&whole.metadata);
    for (number, part) in parts.iter_mut().enumerate() {
        part.set("split.no", Value::U32(number as u32));
        part.set("split.count", Value::U32(3));
        part.set("split.tensors.count", Value::I32(whole.tensors.len() as i32));
    }
    let (a, b) = whole.tensors.split_at(20);
    parts[1].tensors = a.to_vec();
    parts[2].tensors = b.to_vec();
    let mut number = 0;
    parts.map(|part| {
        number += 1;
        dir.write(&format!("model-{number:05}-of-00003.gguf"), &part.bytes())
    })
}

#[test]
fn any_part_of_a_model_opens_all_of_it() {
    let whole = open(&File::model());
    let dir = Dir::new();
    let parts = in_parts(&dir);
    for part in parts.iter().map(PathBuf::as_path).chain([dir.0.path()]) {
        let folder = Folder::open(part).unwrap();
        assert_eq!(folder.path(), parts[0]);
        assert_eq!(folder.fingerprint(), whole.1.fingerprint());
        assert_eq!(folder.config(), whole.1.config());
        let mut weights = folder.weights().unwrap();
        take_rest(&mut weights);
    }
}

#[test]
fn parts_that_are_missing_or_of_another_model_are_refused_by_name() {
    let dir = Dir::new();
    let parts = in_parts(&dir);
    std::fs::remove_file(&parts[1]).unwrap();
    says(
        &Folder::open(&parts[2]).map(|_| ()),
        &["1 shard", "model-00002-of-00003.gguf"],
    );
    // The third in the second's place.
    std::fs::copy(&parts[2], &parts[1]).unwrap();
    says(&Folder::open(&parts[0]).map(|_| ()), &["split.", "model-0000"]);
    let lone = Dir::new();
    let path = lone.write("part.gguf", &std::fs::read(&parts[2]).unwrap());
    says(
        &Folder::open(path).map(|_| ()),
        &["split.count", "1 from the names"],
    );
    let path = lone.write("x-00004-of-00003.gguf", b"");
    says(&Folder::open(path).map(|_| ()), &["part 4 of 3"]);
    let path = lone.write("x-00001-of-99999.gguf", b"");
    says(&Folder::open(path).map(|_| ()), &["part 1 of 99999"]);
}

#[test]
fn a_tensor_in_two_parts_is_refused_by_name() {
    let mut whole = File::model();
    let twice = whole.tensors[0].clone();
    whole.tensors.push(twice);
    let dir = Dir::new();
    let path = in_parts_of(&dir, &whole)[0].clone();
    says(
        &Folder::open(path).map(|_| ()),
        &["token_embd.weight", "another part of the model holds it too"],
    );
}

#[test]
fn a_folder_is_the_one_model_in_it() {
    let dir = Dir::new();
    dir.write("mmproj-F16.gguf", b"the vision tower");
    says(&Folder::open(dir.0.path()).map(|_| ()), &["without config.json"]);
    dir.write("model-Q8_0.gguf", &File::model().bytes());
    assert!(Folder::open(dir.0.path()).unwrap().is_gguf());
    dir.write("model-Q4_0.gguf", b"");
    let words = [
        "2 models in GGUF",
        "model-Q4_0.gguf, model-Q8_0.gguf",
        "name the file",
    ];
    says(&Folder::open(dir.0.path()).map(|_| ()), &words);
    says(
        &Folder::open(Path::new("nowhere.gguf")).map(|_| ()),
        &["nowhere.gguf"],
    );
}
