//! Folders: their JSON files, shards and indices, fingerprints.

mod common;

use std::path::Path;

use common::{bf16, parts, raw, says, tensor, write, Checkpoint};
use recant_weights::{Dtype, Error, Folder};
use serde_json::json;

fn assert_send_sync<T: Send + Sync>(_: &T) {}

#[test]
fn the_demo_model_is_read_to_the_last_tensor() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/models/demo-target");
    let folder = Folder::open(&path).unwrap();
    assert_send_sync(&folder);
    assert_eq!(folder.path(), path);
    assert_eq!(folder.config()["model_type"], "qwen3_5");
    assert_eq!(
        folder.generation_config().unwrap()["eos_token_id"],
        json!([8189, 8187])
    );
    assert_eq!(folder.tokenizer_config().unwrap()["eos_token"], "<|im_end|>");
    assert!(folder.tokenizer_path().is_file());
    let all = read_everything(&folder);
    // 6 linear layers of 14, 2 full ones of 11, embedding and norm; a multi-token-prediction head of 15.
    assert_eq!((all.taken, all.mtp, all.vision), (6 * 14 + 2 * 11 + 2, 15, 0));
}

#[test]
fn a_sharded_model_beside_the_repository_is_read_to_the_last_tensor() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/models/target");
    if !path.is_dir() {
        println!("skipped: a_sharded_model_beside_the_repository_is_read_to_the_last_tensor (no such model)");
        return;
    }
    let folder = Folder::open(path).unwrap();
    let files: std::collections::BTreeSet<_> = folder.tensors().map(|tensor| &tensor.file).collect();
    assert_eq!(files.len(), 4);
    let all = read_everything(&folder);
    assert_eq!((all.taken, all.mtp, all.vision), (9 * 14 + 3 * 11 + 2, 15, 0));
}

/// Takes every text tensor of a raw checkpoint, and compares a few with the bytes in the files.
fn read_everything(folder: &Folder) -> recant_weights::Inventory {
    let mut weights = folder.weights().unwrap();
    let mut previous = String::new();
    for info in folder.tensors() {
        assert!(previous < info.name, "tensors come in name order");
        previous.clone_from(&info.name);
        let Some(name) = info.name.strip_prefix("model.language_model.") else {
            continue;
        };
        assert!(weights.has(name));
        let tensor = weights.take(name, &info.shape).unwrap();
        assert_eq!(tensor.dims(), info.shape);
        let is_f32 = name.ends_with("A_log") || name.ends_with("linear_attn.norm.weight");
        assert_eq!(
            tensor.dtype().as_str(),
            if is_f32 { "f32" } else { "bf16" },
            "{name}"
        );
        let values = tensor
            .to_dtype(candle_core::DType::F32)
            .unwrap()
            .flatten_all()
            .unwrap();
        assert!(
            values.to_vec1::<f32>().unwrap().iter().any(|x| *x != 0.0),
            "{name}"
        );
    }
    assert_eq!(weights.bytes_taken(), weights.bytes_total());
    weights.finish().unwrap()
}

// JSON files

#[test]
fn a_folder_that_does_not_exist_is_an_error() {
    let error = Folder::open("no/such/folder").unwrap_err();
    assert!(matches!(error, Error::NoFolder { .. }));
    says(&error, &["no/such/folder", "nothing at that path"]);
}

#[test]
fn a_file_in_place_of_a_folder_is_an_error() {
    let folder = Checkpoint::single(&raw());
    let error = Folder::open(folder.file("model.safetensors")).unwrap_err();
    says(
        &error,
        &["model.safetensors is no checkpoint folder", "found a file"],
    );
}

#[test]
fn a_folder_without_a_configuration_is_refused() {
    let folder = Checkpoint::single(&raw());
    std::fs::remove_file(folder.file("config.json")).unwrap();
    says(&folder.refused(), &["found a folder without config.json"]);
}

#[test]
fn a_configuration_that_is_no_json_object_is_refused() {
    for (text, part) in [
        ("", "EOF"),
        ("{", "EOF"),
        ("[1]", "another kind"),
        ("null", "null"),
        ("\u{0}", ""),
    ] {
        let folder = Checkpoint::single(&raw());
        std::fs::write(folder.file("config.json"), text).unwrap();
        let error = folder.refused();
        assert!(matches!(error, Error::Json { .. }), "{error:?}");
        says(&error, &["config.json", "a JSON object", part]);
    }
}

#[test]
fn the_other_json_files_may_be_absent_or_null_but_not_broken() {
    let folder = Checkpoint::single(&raw());
    for name in ["generation_config.json", "tokenizer_config.json"] {
        let get = |folder: &Folder| match name {
            "generation_config.json" => folder.generation_config().cloned(),
            _ => folder.tokenizer_config().cloned(),
        };
        assert_eq!(get(&folder.open()), None);
        folder.json(name, &json!(null));
        assert_eq!(get(&folder.open()), None);
        folder.json(name, &json!({"eos_token_id": 7}));
        assert_eq!(get(&folder.open()), Some(json!({"eos_token_id": 7})));
        folder.json(name, &json!(7));
        says(&folder.refused(), &[name]);
        std::fs::remove_file(folder.file(name)).unwrap();
    }
    assert_eq!(folder.open().tokenizer_path(), folder.file("tokenizer.json"));
}

// Which files are read

#[test]
fn a_folder_without_weights_is_refused_and_says_what_it_holds() {
    let folder = Checkpoint::empty();
    says(&folder.refused(), &["model.safetensors", "no weight file"]);
    std::fs::write(folder.file("model.Q4_K_M.gguf"), "GGUF").unwrap();
    write(&folder.file("model-00001-of-00002.safetensors"), &raw());
    let error = folder.refused();
    assert!(matches!(error, Error::NoCheckpoint { .. }));
    says(
        &error,
        &[
            "found model-00001-of-00002.safetensors, model.Q4_K_M.gguf",
            "index.json",
        ],
    );
}

fn two_shards() -> Checkpoint {
    let tensors = raw();
    Checkpoint::sharded(&[("a.safetensors", &tensors[..4]), ("b.safetensors", &tensors[4..])])
}

#[test]
fn shards_give_the_tensors_that_one_file_gives() {
    let (single, shards) = (Checkpoint::single(&raw()), two_shards());
    let (single, shards) = (single.open(), shards.open());
    let (mut one, mut two) = (single.weights().unwrap(), shards.weights().unwrap());
    for (name, shape) in parts() {
        let (one, two) = (one.take(&name, &shape).unwrap(), two.take(&name, &shape).unwrap());
        assert_eq!(one.dtype(), two.dtype());
        let bytes = |tensor: candle_core::Tensor| {
            let tensor = tensor.flatten_all().unwrap();
            let mut bytes = Vec::new();
            tensor.write_bytes(&mut bytes).unwrap();
            bytes
        };
        assert_eq!(bytes(one), bytes(two), "{name}");
    }
    assert_eq!(one.finish().unwrap(), two.finish().unwrap());
}

#[test]
fn a_shard_that_is_absent_is_refused_by_name() {
    // sglang#32279: an interrupted download starts with weights that were never set.
    let folder = two_shards();
    std::fs::remove_file(folder.file("b.safetensors")).unwrap();
    let error = folder.refused();
    assert!(matches!(error, Error::MissingShards { .. }));
    says(&error, &["1 shard", "b.safetensors", "incomplete"]);
}

#[test]
fn a_shard_that_was_cut_short_is_refused_by_name() {
    let folder = two_shards();
    let path = folder.file("b.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    says(&folder.refused(), &["b.safetensors", "cut short"]);
}

#[test]
fn a_stray_file_beside_the_shards_is_not_read() {
    // mlx-vlm#1464: a `model.safetensors` of another quantization was merged in.
    let folder = two_shards();
    let fingerprint = folder.open().fingerprint().to_owned();
    std::fs::write(folder.file("model.safetensors"), "not even safetensors").unwrap();
    write(
        &folder.file("c.safetensors"),
        &[tensor("lm_head.weight", safetensors::Dtype::U32, &[8, 1])],
    );
    let opened = folder.open();
    assert_eq!(opened.tensors().count(), raw().len());
    assert_eq!(opened.fingerprint(), fingerprint);
}

#[test]
fn a_tensor_that_its_shard_lacks_is_refused_by_name() {
    let folder = two_shards();
    let tensors = raw();
    let mut map: serde_json::Map<_, _> = tensors
        .iter()
        .enumerate()
        .map(|(i, spec)| {
            (
                spec.name.clone(),
                json!(if i < 4 { "a.safetensors" } else { "b.safetensors" }),
            )
        })
        .collect();
    map.insert(
        "model.language_model.layers.9.missing".into(),
        json!("a.safetensors"),
    );
    folder.index(map.into());
    let error = folder.refused();
    assert!(matches!(error, Error::Index { .. }));
    says(&error, &["1 tensor in a.safetensors", "layers.9.missing"]);
}

#[test]
fn a_tensor_that_the_index_puts_in_the_wrong_shard_is_refused() {
    let folder = two_shards();
    let tensors = raw();
    let wrong = tensors
        .iter()
        .enumerate()
        .map(|(i, spec)| {
            (
                spec.name.clone(),
                json!(if i < 5 { "a.safetensors" } else { "b.safetensors" }),
            )
        })
        .collect::<serde_json::Map<_, _>>();
    folder.index(wrong.into());
    says(&folder.refused(), &["a.safetensors", &tensors[4].name]);
}

#[test]
fn a_tensor_that_the_index_does_not_list_is_refused_by_name() {
    let folder = two_shards();
    let mut more = raw()[4..].to_vec();
    more.push(bf16("model.language_model.layers.0.extra", &[1]));
    write(&folder.file("b.safetensors"), &more);
    says(
        &folder.refused(),
        &["b.safetensors holds 1 tensor", "layers.0.extra"],
    );
}

#[test]
fn a_tensor_in_two_shards_is_refused() {
    let tensors = raw();
    let folder = Checkpoint::sharded(&[("a.safetensors", &tensors[..5]), ("b.safetensors", &tensors[4..])]);
    says(
        &folder.refused(),
        &["a.safetensors holds 1 tensor", &tensors[4].name],
    );
}

#[test]
fn shard_names_that_leave_the_folder_are_refused() {
    let elsewhere = tempfile::tempdir().unwrap();
    write(&elsewhere.path().join("x.safetensors"), &raw());
    let absolute = elsewhere.path().join("x.safetensors");
    for name in [
        "../x.safetensors",
        "sub/x.safetensors",
        "sub\\x.safetensors",
        "./x.safetensors",
        "x.safetensors/",
        "..",
        ".",
        "",
        "/",
        "x\0.safetensors",
        absolute.to_str().unwrap(),
    ] {
        let folder = Checkpoint::empty();
        folder.index(json!({"norm.weight": name}));
        let error = folder.refused();
        assert!(matches!(error, Error::Index { .. }), "{name:?}: {error:?}");
        says(&error, &["index.json", "norm.weight", "same folder"]);
    }
}

#[test]
fn a_malformed_index_is_refused() {
    for (text, part) in [
        ("", "EOF"),
        ("[]", "weight_map"),
        ("{}", "weight_map"),
        (r#"{"weight_map": null}"#, "weight_map"),
        (r#"{"weight_map": {}}"#, "found none"),
        (r#"{"weight_map": {"a": 1}}"#, "string"),
        (
            r#"{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}"#,
            "a occurs twice",
        ),
    ] {
        let folder = Checkpoint::single(&raw());
        std::fs::write(folder.file("model.safetensors.index.json"), text).unwrap();
        let error = folder.refused();
        assert!(matches!(error, Error::Json { .. }), "{text}: {error:?}");
        says(&error, &["model.safetensors.index.json", part]);
    }
}

// Fingerprints

#[test]
fn a_fingerprint_depends_on_tensors_and_not_on_where_they_lie() {
    let (single, shards) = (Checkpoint::single(&raw()), two_shards());
    let print = single.open().fingerprint().to_owned();
    assert_eq!(print.len(), 64);
    assert!(print
        .bytes()
        .all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)));
    assert_eq!(print, shards.open().fingerprint());
    single.json("config.json", &json!({"model_type": "other"}));
    assert_eq!(print, single.open().fingerprint());
}

#[test]
fn a_fingerprint_tells_names_dtypes_and_shapes_apart() {
    // The same eight bytes under other headers.
    let mut prints: Vec<String> = [
        r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#,
        r#"{"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#,
        r#"{"a":{"dtype":"U32","shape":[2],"data_offsets":[0,8]}}"#,
        r#"{"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]}}"#,
        r#"{"a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}}"#,
        r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#,
    ]
    .iter()
    .map(|header| {
        let folder = Checkpoint::empty();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.extend_from_slice(&[7; 8]);
        std::fs::write(folder.file("model.safetensors"), bytes).unwrap();
        folder.open().fingerprint().to_owned()
    })
    .collect();
    prints.sort();
    prints.dedup();
    assert_eq!(prints.len(), 6);
}

#[test]
fn a_fingerprint_sees_both_ends_of_a_tensor_and_not_its_middle() {
    let folder = Checkpoint::single(&[bf16("model.norm.weight", &[10_000])]);
    let path = folder.file("model.safetensors");
    let print = folder.open().fingerprint().to_owned();
    let bytes = std::fs::read(&path).unwrap();
    let start = bytes.len() - 20_000;
    for (place, seen) in [
        (0, true),
        (4095, true),
        (4096, false),
        (15_903, false),
        (15_904, true),
        (19_999, true),
    ] {
        let mut changed = bytes.clone();
        changed[start + place] ^= 1;
        std::fs::write(&path, changed).unwrap();
        assert_eq!(folder.open().fingerprint() != print, seen, "byte {place}");
    }
}

#[test]
fn a_fingerprint_covers_small_tensors_whole() {
    let folder = Checkpoint::single(&[bf16("model.norm.weight", &[3000])]);
    let path = folder.file("model.safetensors");
    let print = folder.open().fingerprint().to_owned();
    let bytes = std::fs::read(&path).unwrap();
    for place in [0, 2999, 4095, 4096, 5999] {
        let mut changed = bytes.clone();
        changed[bytes.len() - 6000 + place] ^= 1;
        std::fs::write(&path, changed).unwrap();
        assert_ne!(folder.open().fingerprint(), print, "byte {place}");
    }
}

#[test]
fn what_a_header_says_can_be_listed() {
    let folder = Checkpoint::single(&[
        tensor("b", safetensors::Dtype::U32, &[2, 3]),
        tensor("a", safetensors::Dtype::F32, &[]),
    ]);
    let folder = folder.open();
    let seen: Vec<_> = folder
        .tensors()
        .map(|tensor| {
            (
                tensor.name.as_str(),
                tensor.dtype.clone(),
                tensor.shape.clone(),
                tensor.bytes(),
            )
        })
        .collect();
    assert_eq!(
        seen,
        [
            ("a", Dtype::F32, vec![], 4),
            ("b", Dtype::Other("U32".to_owned()), vec![2, 3], 24)
        ]
    );
    assert!(folder
        .tensors()
        .all(|tensor| tensor.file.ends_with("model.safetensors")));
}
