//! Matrices in FP8 and NVFP4 as releases of the Hub store them: how their parts, their shapes and the configuration fit
//! together. What the numbers are is tested against the programs that make such releases, across crates.

mod common;

use common::{bf16, groups, raw, says, tensor, Checkpoint, Spec};
use recant_weights::{Coding, Error, Stored};
use safetensors::tensor::TensorView;
use safetensors::Dtype;
use serde_json::{json, Value};

const PATH: &str = "model.language_model.layers.0.mlp.down_proj";
const NAME: &str = "layers.0.mlp.down_proj.weight";

/// A part of the matrix.
fn part(end: &str, dtype: Dtype, shape: &[usize]) -> Spec {
    tensor(&format!("{PATH}.{end}"), dtype, shape)
}

fn fp8(shape: [usize; 2], scales: Spec) -> Vec<Spec> {
    vec![part("weight", Dtype::F8_E4M3, &shape), scales]
}

fn modelopt() -> Vec<Spec> {
    vec![
        part("weight", Dtype::U8, &[3, 32]),
        part("weight_scale", Dtype::F8_E4M3, &[3, 4]),
        part("weight_scale_2", Dtype::F32, &[]),
        part("input_scale", Dtype::F32, &[]),
    ]
}

fn packed() -> Vec<Spec> {
    vec![
        part("weight_packed", Dtype::U8, &[3, 32]),
        part("weight_scale", Dtype::F8_E4M3, &[3, 4]),
        part("weight_global_scale", Dtype::F32, &[1]),
        part("input_global_scale", Dtype::F32, &[1]),
    ]
}

/// A part's bytes: codes that are numbers, scales of one.
fn bytes(spec: &Spec) -> Vec<u8> {
    let count = spec.shape.iter().product::<usize>();
    match spec.dtype {
        Dtype::F8_E4M3 if spec.name.ends_with(".weight") => {
            let codes = spec.bytes().into_iter();
            codes
                .map(|code| if code & 0x7f == 0x7f { 0 } else { code })
                .collect()
        }
        Dtype::F8_E4M3 => vec![0x38; count],
        Dtype::F32 if spec.name.starts_with(PATH) => 1.0_f32.to_le_bytes().repeat(count),
        Dtype::F16 if spec.name.starts_with(PATH) => [0, 0x3c].repeat(count),
        Dtype::BF16 if spec.name.starts_with(PATH) => [0x80, 0x3f].repeat(count),
        _ => spec.bytes(),
    }
}

/// A small model with the matrix in it, and what its configuration says.
fn checkpoint(parts: &[Spec], quantization: Value) -> Checkpoint {
    checkpoint_of(parts, quantization, bytes)
}

fn checkpoint_of(parts: &[Spec], quantization: Value, bytes: impl Fn(&Spec) -> Vec<u8>) -> Checkpoint {
    let checkpoint = Checkpoint::empty();
    let specs = [&raw(), parts].concat();
    let data: Vec<Vec<u8>> = specs.iter().map(&bytes).collect();
    let views = specs.iter().zip(&data).map(|(spec, data)| {
        let view = TensorView::new(spec.dtype, spec.shape.clone(), data).unwrap();
        (spec.name.as_str(), view)
    });
    safetensors::serialize_to_file(views, None, &checkpoint.file("model.safetensors")).unwrap();
    checkpoint.json(
        "config.json",
        &json!({"model_type": "qwen3_5", "quantization_config": quantization}),
    );
    checkpoint
}

fn take(checkpoint: &Checkpoint, shape: [usize; 2]) -> recant_weights::Result<Stored> {
    checkpoint.open().weights()?.take_matrix(NAME, shape)
}

#[track_caller]
fn refused(parts: &[Spec], quantization: Value, said: &[&str]) {
    let error = checkpoint(parts, quantization).weights_refused();
    says(&error, said);
    says(&error, &["model.safetensors", PATH]);
    assert!(
        matches!(error, Error::Packed { .. } | Error::Quantized { .. }),
        "{error:?}"
    );
}

fn in_blocks(block: Value) -> Value {
    json!({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": block})
}

fn compressed(weights: Value) -> Value {
    let groups = json!({"group_0": {"targets": ["Linear"], "weights": weights}});
    json!({"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups})
}

#[test]
fn codes_and_scales_are_handed_out_as_they_are() {
    for (dtype, width) in [(Dtype::F32, 4), (Dtype::BF16, 2), (Dtype::F16, 2)] {
        let parts = fp8([3, 64], part("weight_scale", dtype, &[3, 1]));
        let checkpoint = checkpoint_of(&parts, json!(null), |spec| match spec.name.ends_with("scale") {
            true => [
                [0x00, 0x00, 0x80, 0x3f],
                [0x00, 0x00, 0x00, 0x40],
                [0x00, 0x00, 0x40, 0x40],
            ]
            .iter()
            .flat_map(|x| &x[4 - width..])
            .copied()
            .collect(),
            false => bytes(spec),
        });
        let found = groups(take(&checkpoint, [3, 64]).unwrap());
        assert_eq!((found.coding, found.group), (Coding::E4m3, 64));
        assert_eq!(
            found.quants.flatten_all().unwrap().to_vec1::<u8>().unwrap(),
            bytes(&parts[0])
        );
        assert_eq!(
            (found.scales.dims(), found.scales.dtype().size_in_bytes()),
            (&[3, 1][..], width)
        );
    }
    for parts in [modelopt(), packed()] {
        let found = groups(take(&checkpoint(&parts, json!(null)), [3, 64]).unwrap());
        assert!(matches!(found.coding, Coding::Table(_)));
        assert_eq!(
            found.quants.flatten_all().unwrap().to_vec1::<u8>().unwrap(),
            bytes(&parts[0])
        );
        // One, halved, since the table is doubled.
        assert_eq!(found.scales.to_vec2::<f32>().unwrap(), vec![vec![0.5; 4]; 3]);
    }
}

#[test]
fn all_parts_of_a_matrix_are_taken_together_or_set_aside_together() {
    for parts in [
        modelopt(),
        packed(),
        fp8([3, 64], part("weight_scale_inv", Dtype::BF16, &[1, 1])),
        [
            fp8([3, 64], part("weight_scale", Dtype::F32, &[])),
            vec![part("input_scale", Dtype::F32, &[])],
        ]
        .concat(),
    ] {
        let size: u64 = parts.iter().map(|spec| bytes(spec).len() as u64).sum();
        let checkpoint = checkpoint(&parts, json!(null));
        let folder = checkpoint.open();
        let mut weights = folder.weights().unwrap();
        assert!(weights.has(NAME));
        // In vain: nothing is taken.
        says(
            &weights.take_matrix(NAME, [3, 96]).unwrap_err(),
            &["expected shape"],
        );
        weights.take(NAME, &[3, 64]).unwrap_err();
        assert_eq!(weights.bytes_taken(), 0);
        weights.take_matrix(NAME, [3, 64]).unwrap();
        assert_eq!(weights.bytes_taken(), size);
        assert!(weights.has(NAME));
        assert!(matches!(
            weights.take_matrix(NAME, [3, 64]),
            Err(Error::TakenTwice { .. })
        ));

        let mut weights = folder.weights().unwrap();
        weights.discard(NAME);
        assert_eq!(weights.bytes_taken(), size);
        assert!(matches!(
            weights.take_matrix(NAME, [3, 64]),
            Err(Error::TakenTwice { .. })
        ));
        let left = weights.finish().unwrap_err().to_string();
        assert!(!left.contains("down_proj"), "{left}");
    }
}

#[test]
fn scales_of_cached_keys_and_values_are_set_aside() {
    let attention = "model.language_model.layers.3.self_attn";
    let scales = ["k_scale", "v_scale", "k_proj.k_scale", "v_proj.v_scale"];
    let parts: Vec<Spec> = scales
        .iter()
        .map(|end| bf16(&format!("{attention}.{end}"), &[1]))
        .collect();
    let checkpoint = checkpoint(&parts, json!(null));
    let left = checkpoint
        .open()
        .weights()
        .unwrap()
        .finish()
        .unwrap_err()
        .to_string();
    assert!(!left.contains("self_attn"), "{left}");
    // Of nothing that is cached.
    let odd = [bf16("model.language_model.layers.3.mlp.k_scale", &[1])];
    let left = self::checkpoint(&odd, json!(null))
        .open()
        .weights()
        .unwrap()
        .finish();
    says(&left.unwrap_err(), &["mlp.k_scale"]);
}

#[test]
fn blocks_that_are_cut_short_have_scales_of_their_own() {
    for (shape, block, scales, group) in [
        ([200, 320], [128, 128], [2, 3], 64),
        ([128, 256], [128, 128], [1, 2], 128),
        ([129, 64], [128, 128], [2, 1], 64),
        ([40, 96], [16, 32], [3, 3], 32),
        ([40, 96], [1, 48], [40, 2], 48),
        ([40, 96], [usize::MAX >> 12, 96], [1, 1], 96),
    ] {
        let parts = fp8(shape, part("weight_scale_inv", Dtype::BF16, &scales));
        let number = |i: usize| half::bf16::from_f32(1.0 + i as f32 / 8.0);
        let checkpoint = checkpoint_of(&parts, in_blocks(json!(block)), |spec| {
            match spec.name.ends_with("scale_inv") {
                true => (0..scales[0] * scales[1])
                    .flat_map(|i| number(i).to_le_bytes())
                    .collect(),
                false => bytes(spec),
            }
        });
        let found = groups(take(&checkpoint, shape).unwrap());
        assert_eq!(
            (found.group, found.scales.dims()),
            (group, &[shape[0], shape[1] / group][..])
        );
        for (row, found) in found
            .scales
            .to_vec2::<half::bf16>()
            .unwrap()
            .into_iter()
            .enumerate()
        {
            for (i, found) in found.into_iter().enumerate() {
                let expected = number(row / block[0] * scales[1] + i * group / block[1]);
                assert_eq!(found, expected, "{shape:?} in {block:?}, row {row}, group {i}");
            }
        }
        // The other way round.
        if scales[0] != scales[1] {
            let turned = fp8(
                shape,
                part("weight_scale_inv", Dtype::BF16, &[scales[1], scales[0]]),
            );
            refused(
                &turned,
                in_blocks(json!(block)),
                &["weight_scale_inv", &format!("expected {scales:?}")],
            );
        }
    }
}

#[test]
fn parts_that_are_missing_or_contradict_one_another_are_refused_before_any_is_read() {
    let without = |parts: Vec<Spec>, end: &str| -> Vec<Spec> {
        parts
            .into_iter()
            .filter(|spec| !spec.name.ends_with(end))
            .collect()
    };
    let with = |parts: Vec<Spec>, other: Spec| -> Vec<Spec> {
        let parts = parts.into_iter().filter(|spec| spec.name != other.name);
        parts.chain([other.clone()]).collect()
    };
    let shape = [130, 256];
    let blocks = || fp8(shape, part("weight_scale_inv", Dtype::BF16, &[2, 2]));
    for (parts, said) in [
        (
            without(blocks(), "scale_inv"),
            "no `weight_scale_inv` or `weight_scale` beside it",
        ),
        (without(blocks(), ".weight"), "no `weight` beside this scale"),
        (
            without(modelopt(), ".weight_scale"),
            "no `weight_scale` beside it",
        ),
        (without(modelopt(), "scale_2"), "no `weight_scale_2` beside it"),
        (without(modelopt(), ".weight"), "no `weight` beside this scale"),
        (without(packed(), ".weight_scale"), "no `weight_scale` beside it"),
        (
            without(packed(), "weight_global_scale"),
            "no `weight_global_scale` beside it",
        ),
        (
            vec![part("input_scale", Dtype::F32, &[])],
            "no `weight` beside this scale",
        ),
        // Of what is not quantized.
        (
            vec![
                part("weight", Dtype::BF16, &shape),
                part("weight_scale_inv", Dtype::BF16, &[2, 2]),
            ],
            "nothing uses it",
        ),
        (
            vec![
                part("weight", Dtype::BF16, &shape),
                part("input_scale", Dtype::F32, &[]),
            ],
            "nothing uses it",
        ),
        // Too many.
        (
            with(blocks(), part("weight_scale", Dtype::BF16, &[130, 1])),
            "nothing uses it",
        ),
        (
            with(blocks(), part("weight_scale_2", Dtype::F32, &[])),
            "nothing uses it",
        ),
        (
            with(modelopt(), part("weight_global_scale", Dtype::F32, &[1])),
            "nothing uses it",
        ),
        (
            with(modelopt(), part("weight_scale_inv", Dtype::BF16, &[1, 1])),
            "nothing uses it",
        ),
        (
            with(packed(), part("weight_scale_2", Dtype::F32, &[])),
            "nothing uses it",
        ),
        (
            with(packed(), part("weight", Dtype::BF16, &[3, 64])),
            "expected one of both",
        ),
        // Of other shapes and types.
        (
            with(blocks(), part("weight_scale_inv", Dtype::BF16, &[2, 1])),
            "found shape [2, 1]",
        ),
        (
            with(blocks(), part("weight_scale_inv", Dtype::BF16, &[1, 130])),
            "found shape [1, 130]",
        ),
        (
            with(blocks(), part("weight_scale_inv", Dtype::BF16, &[131, 1])),
            "found shape [131, 1]",
        ),
        (
            with(blocks(), part("weight_scale_inv", Dtype::I32, &[2, 2])),
            "found I32",
        ),
        (
            with(blocks(), part("weight_scale_inv", Dtype::F8_E4M3, &[2, 2])),
            "found F8_E4M3",
        ),
        (
            with(blocks(), part("weight", Dtype::F8_E4M3, &[2, 130, 256])),
            "found shape [2, 130, 256]",
        ),
        (
            with(blocks(), part("weight", Dtype::F8_E4M3, &[33280])),
            "found shape [33280]",
        ),
        (
            with(blocks(), part("weight", Dtype::F8_E4M3, &[0, 256])),
            "found shape [0, 256]",
        ),
        (
            with(modelopt(), part("weight_scale", Dtype::F8_E4M3, &[4, 3])),
            "found [4, 3] F8_E4M3",
        ),
        (
            with(modelopt(), part("weight_scale", Dtype::F8_E4M3, &[3, 2])),
            "found [3, 2] F8_E4M3",
        ),
        (
            with(modelopt(), part("weight_scale", Dtype::BF16, &[3, 4])),
            "found [3, 4] BF16",
        ),
        (
            with(modelopt(), part("weight_scale_2", Dtype::F32, &[3])),
            "found [3] F32",
        ),
        (
            with(modelopt(), part("weight_scale_2", Dtype::BF16, &[])),
            "found [] BF16",
        ),
        (
            with(packed(), part("weight_global_scale", Dtype::F32, &[2])),
            "found [2] F32",
        ),
        (
            with(packed(), part("weight_packed", Dtype::U8, &[3, 33])),
            "66 numbers in a row",
        ),
    ] {
        refused(&parts, json!(null), &[said]);
    }
}

#[test]
fn what_the_configuration_says_and_the_matrices_are_not_is_refused() {
    let shape = [130, 256];
    let rows = || fp8(shape, part("weight_scale", Dtype::BF16, &[130, 1]));
    let blocks = || fp8(shape, part("weight_scale_inv", Dtype::BF16, &[2, 2]));
    let one = || fp8(shape, part("weight_scale", Dtype::F32, &[]));
    let by_row = json!({"num_bits": 8, "type": "float", "strategy": "channel"});
    let nvfp4 = json!({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16});
    let blocked = json!({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 256]});
    for (parts, said, expected) in [
        (
            rows(),
            in_blocks(json!([128, 128])),
            "expected [2, 2] (FP8 in blocks of 128 x 128)",
        ),
        (
            blocks(),
            in_blocks(json!([64, 128])),
            "expected [3, 2] (FP8 in blocks of 64 x 128)",
        ),
        (
            blocks(),
            in_blocks(json!(null)),
            "expected [130, 1] (by row) or one number",
        ),
        (blocks(), compressed(by_row.clone()), "expected [130, 1] (by row)"),
        (one(), compressed(by_row.clone()), "found shape []"),
        (
            blocks(),
            compressed(blocked),
            "expected [3, 1] (FP8 in blocks of 64 x 256)",
        ),
        (
            packed(),
            compressed(by_row),
            "it is NVFP4, but `quantization_config` in config.json says FP8 by row",
        ),
        (modelopt(), in_blocks(json!([128, 128])), "it is NVFP4, but"),
        (
            rows(),
            compressed(nvfp4),
            "it is FP8, but `quantization_config` in config.json says NVFP4",
        ),
        (
            rows(),
            json!({"quant_method": "modelopt", "quant_algo": "NVFP4"}),
            "it is FP8, but",
        ),
        (
            rows(),
            json!({"quant_method": "modelopt", "quant_algo": "FP8"}),
            "expected one number",
        ),
    ] {
        refused(&parts, said, &[expected]);
    }
    let mixed = json!({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"});
    for parts in [rows(), blocks(), one(), modelopt()] {
        checkpoint(&parts, mixed.clone()).open().weights().unwrap();
    }
}

#[test]
fn configurations_of_other_formats_are_refused_by_what_they_say() {
    let weights = |weights: Value| compressed(weights);
    let with = |key: &str, value: Value| {
        let mut all = compressed(json!({"num_bits": 8, "type": "float", "strategy": "channel"}));
        all[key] = value;
        all
    };
    let modelopt = |more: Value| {
        let mut all = json!({"quant_method": "modelopt"});
        for (key, value) in more.as_object().unwrap() {
            all[key] = value.clone();
        }
        all
    };
    for (said, expected) in [
        (json!({"quant_method": "fp8", "fmt": "e5m2"}), "fmt \"e5m2\""),
        (in_blocks(json!([128])), "weight_block_size [128]"),
        (in_blocks(json!([0, 128])), "weight_block_size [0,128]"),
        (in_blocks(json!([-1, 128])), "weight_block_size [-1,128]"),
        (in_blocks(json!("128")), "weight_block_size \"128\""),
        (
            with("format", json!("pack-quantized")),
            "format \"pack-quantized\"",
        ),
        (with("format", json!("marlin-24")), "format \"marlin-24\""),
        (
            with("format", json!("mxfp4-pack-quantized")),
            "format \"mxfp4-pack-quantized\"",
        ),
        (
            with("transform_config", json!({"config_groups": {"R1": {}}})),
            "transform_config",
        ),
        (
            with("sparsity_config", json!({"format": "sparse-24-bitmask"})),
            "sparsity_config",
        ),
        (with("config_groups", json!({})), "without a config group"),
        (with("config_groups", json!({"group_0": 1})), "a config group 1"),
        (
            with(
                "config_groups",
                json!({"group_0": {"format": "int-quantized", "weights": {}}}),
            ),
            "format \"int-quantized\"",
        ),
        (
            weights(json!({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128})),
            "\"int\"",
        ),
        (
            weights(json!({"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": false})),
            "symmetric",
        ),
        (
            weights(json!({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32})),
            "\"group\"",
        ),
        (
            weights(json!({"num_bits": 8, "type": "float", "strategy": "block"})),
            "\"block\"",
        ),
        (
            modelopt(json!({"quant_algo": "NVFP4_AWQ"})),
            "quant_algo \"NVFP4_AWQ\"",
        ),
        (
            modelopt(json!({"quant_algo": "W4A16_AWQ"})),
            "quant_algo \"W4A16_AWQ\"",
        ),
        (modelopt(json!({})), "quant_algo null"),
        (
            modelopt(json!({"quant_algo": "NVFP4", "group_size": 32})),
            "group_size 32",
        ),
        (
            modelopt(
                json!({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"x": {"quant_algo": "MXFP4"}}}),
            ),
            "quant_algo \"MXFP4\"",
        ),
        (json!({"quant_method": "quark"}), "quant_method quark"),
        (
            json!({"quant_method": "bitsandbytes", "load_in_4bit": true}),
            "quant_method bitsandbytes",
        ),
    ] {
        let error = checkpoint(&[], said.clone()).weights_refused();
        assert!(matches!(error, Error::Quantized { .. }), "{said}: {error:?}");
        says(&error, &["`quantization_config` in config.json", expected]);
    }
}

#[test]
fn tensors_of_other_formats_are_refused_by_name() {
    for (end, dtype, expected) in [
        ("qweight", Dtype::I32, "GPTQ or AWQ"),
        ("qzeros", Dtype::I32, "GPTQ or AWQ"),
        ("g_idx", Dtype::I32, "GPTQ"),
        ("weight_shape", Dtype::I64, "compressed-tensors, whole numbers"),
        ("weight_zero_point", Dtype::I8, "zero points"),
        ("weight_packed", Dtype::I32, "compressed-tensors, whole numbers"),
        ("weight_scale", Dtype::U8, "MXFP4 or MXFP8"),
        ("pre_quant_scale", Dtype::BF16, "AWQ of ModelOpt"),
        ("weight.absmax", Dtype::F32, "bitsandbytes"),
        ("weight.quant_map", Dtype::F32, "bitsandbytes"),
        ("SCB", Dtype::F32, "bitsandbytes of 8 bits"),
        ("weight", Dtype::I8, "I8"),
        ("weight", Dtype::F8_E5M2, "F8_E5M2"),
        ("weight", Dtype::F8_E4M3FNUZ, "F8_E4M3FNUZ"),
        ("weight_scale", Dtype::F8_E8M0, "F8_E8M0"),
    ] {
        let mut parts = vec![part(end, dtype, &[4, 32])];
        if !end.starts_with("weight") && !end.starts_with('q') {
            parts.push(part("weight", Dtype::U8, &[4, 32]));
        }
        let error = checkpoint(&parts, json!(null)).weights_refused();
        assert!(matches!(error, Error::Quantized { .. }), "{end}: {error:?}");
        says(&error, &[expected, &format!("{PATH}.{end}"), "model.safetensors"]);
    }
    let stacks = "model.language_model.layers.0.mlp.experts.gate_up_proj";
    for (name, dtype) in [
        (stacks.to_owned(), Dtype::F8_E4M3),
        (stacks.to_owned(), Dtype::U8),
        (format!("{stacks}_packed"), Dtype::U8),
        (format!("{stacks}_weight_scale"), Dtype::F8_E4M3),
    ] {
        let error = checkpoint(&[tensor(&name, dtype, &[2, 4, 32])], json!(null)).weights_refused();
        says(&error, &[&name, "stored each on its own"]);
    }
}

#[test]
fn numbers_that_are_none_are_refused_with_their_place() {
    let shape = [3, 64];
    let scaled = |dtype| fp8(shape, part("weight_scale", dtype, &[3, 1]));
    let refused = |parts: &[Spec], end: &str, at: usize, found: &[u8], said: &[&str]| {
        let checkpoint = checkpoint_of(parts, json!(null), |spec| {
            let mut bytes = bytes(spec);
            if spec.name == format!("{PATH}.{end}") {
                bytes[at..at + found.len()].copy_from_slice(found);
            }
            bytes
        });
        let error = take(&checkpoint, shape).unwrap_err();
        assert!(matches!(error, Error::Packed { .. }), "{error:?}");
        says(&error, said);
        says(
            &error,
            &[&format!("{PATH}.{end}"), "model.safetensors", "damaged"],
        );
    };
    for code in [0x7f, 0xff] {
        let said = [format!("{code:#04x}"), "row 1, column 6".to_owned()];
        let said: Vec<&str> = said.iter().map(String::as_str).collect();
        refused(&scaled(Dtype::F32), "weight", 70, &[code], &said);
        let said = [format!("{code:#04x}"), "row 1, column 2".to_owned()];
        let said: Vec<&str> = said.iter().map(String::as_str).collect();
        refused(&modelopt(), "weight_scale", 6, &[code], &said);
        refused(&packed(), "weight_scale", 6, &[code], &said);
    }
    for number in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX] {
        refused(
            &scaled(Dtype::F32),
            "weight_scale",
            4,
            &number.to_le_bytes(),
            &["scale 1 is"],
        );
    }
    refused(
        &scaled(Dtype::BF16),
        "weight_scale",
        2,
        &[0x80, 0x7f],
        &["scale 1 is inf"],
    );
    refused(
        &scaled(Dtype::F16),
        "weight_scale",
        2,
        &[0x00, 0x7e],
        &["scale 1 is NaN"],
    );
    for number in [f32::NAN, f32::INFINITY] {
        refused(
            &modelopt(),
            "weight_scale_2",
            0,
            &number.to_le_bytes(),
            &["found"],
        );
        refused(
            &packed(),
            "weight_global_scale",
            0,
            &number.to_le_bytes(),
            &["found"],
        );
    }
    refused(
        &packed(),
        "weight_global_scale",
        0,
        &0.0_f32.to_le_bytes(),
        &["found 0"],
    );
    // So large that the product is no number.
    refused(
        &modelopt(),
        "weight_scale_2",
        0,
        &f32::NAN.to_le_bytes(),
        &["found NaN"],
    );
}

#[test]
fn a_product_that_is_no_number_is_refused_and_a_zero_is_one() {
    for (factor, fine) in [(0.0_f32, true), (1e-30, true), (f32::MAX, false)] {
        let checkpoint = checkpoint_of(&modelopt(), json!(null), |spec| {
            match spec.name.ends_with("scale_2") {
                true => factor.to_le_bytes().to_vec(),
                false => bytes(spec),
            }
        });
        match take(&checkpoint, [3, 64]) {
            Ok(_) => assert!(fine, "{factor}"),
            Err(error) => {
                assert!(!fine, "{factor}");
                says(
                    &error,
                    &["weight_scale", "row 0, column 0 is 0x38", "no finite numbers"],
                );
            }
        }
    }
}

#[test]
fn a_stack_in_fp8_is_refused_where_it_is_asked_for() {
    let parts = fp8([3, 64], part("weight_scale", Dtype::BF16, &[3, 1]));
    let checkpoint = checkpoint(&parts, json!(null));
    let folder = checkpoint.open();
    let mut weights = folder.weights().unwrap();
    let error = weights.take(NAME, &[3, 64]).unwrap_err();
    says(&error, &[NAME, "found F8_E4M3"]);
}

#[test]
fn a_prediction_head_has_a_form_of_its_own() {
    let parts: Vec<Spec> = packed()
        .into_iter()
        .map(|spec| Spec {
            name: spec.name.replace(PATH, "mtp.layers.0.mlp.down_proj"),
            ..spec
        })
        .chain([bf16("mtp.fc.weight", &[4, 8])])
        .collect();
    let own = checkpoint(&parts, json!(null));
    let folder = own.open();
    folder.weights().unwrap();
    let mut head = folder.mtp().unwrap().unwrap();
    assert!(head.has(NAME));
    groups(head.take_matrix(NAME, [3, 64]).unwrap());
    head.take("fc.weight", &[4, 8]).unwrap();
    head.finish().unwrap();
    // What is damaged in it does not matter to the model.
    let folder = checkpoint(&parts[..2], json!(null));
    folder.open().weights().unwrap();
    says(
        &folder.open().mtp().unwrap_err(),
        &["mtp.layers.0.mlp.down_proj.weight_packed", "weight_global_scale"],
    );
}
