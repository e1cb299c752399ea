//! Canonical names, formats that are refused, and tensors handed out once.

mod common;

use common::{bf16, model, parts, raw, says, tensor, Checkpoint, Spec};
use recant_weights::{Error, Norms};
use safetensors::Dtype;
use serde_json::json;

/// Takes every tensor of the small model.
#[track_caller]
fn take_all(tensors: &[Spec]) -> recant_weights::Inventory {
    let checkpoint = Checkpoint::single(tensors);
    let folder = checkpoint.open();
    let mut weights = folder
        .weights()
        .unwrap_or_else(|error| panic!("refused: {error}"));
    for (name, shape) in parts() {
        assert!(weights.has(&name));
        weights.take(&name, &shape).unwrap();
    }
    weights.finish().unwrap()
}

// Names: imp#647, prime-rl#2640

#[test]
fn each_known_prefix_gives_the_same_canonical_names() {
    for prefix in ["model.", "model.language_model.", "language_model.model."] {
        for head in ["lm_head.weight", "language_model.lm_head.weight"] {
            assert_eq!(
                take_all(&model(prefix, head)).taken,
                parts().len(),
                "{prefix} {head}"
            );
        }
    }
}

#[test]
fn vision_and_prediction_head_are_counted_and_left_alone() {
    let mut tensors = raw();
    for name in [
        "model.visual.blocks.0.attn.qkv.weight",
        "visual.patch_embed.weight",
    ] {
        tensors.push(bf16(name, &[2]));
    }
    for name in [
        "mtp.fc.weight",
        "model.mtp.norm.weight",
        "language_model.mtp.layers.0.mlp.up_proj.weight",
        "model.language_model.mtp.pre_fc_norm_hidden.weight",
    ] {
        tensors.push(bf16(name, &[2]));
    }
    let all = take_all(&tensors);
    assert_eq!(
        (all.taken, all.vision, all.mtp, all.discarded),
        (parts().len(), 2, 4, 0)
    );
}

#[test]
fn tensors_left_alone_count_for_no_progress_and_cannot_be_taken() {
    let bytes = |tensors: &[Spec]| {
        Checkpoint::single(tensors)
            .open()
            .weights()
            .unwrap()
            .bytes_total()
    };
    let mut tensors = raw();
    tensors.push(bf16("mtp.norm.weight", &[100]));
    assert_eq!(bytes(&tensors), bytes(&raw()));
    let checkpoint = Checkpoint::single(&tensors);
    let folder = checkpoint.open();
    assert!(!folder.weights().unwrap().has("mtp.norm.weight"));
}

#[test]
fn a_prediction_head_changes_nothing_about_the_text_tensors() {
    // mlx-lm#1292, omlx#1147: with the head and without it, the model is the same.
    let mut with = raw();
    with.push(bf16("mtp.fc.weight", &[4, 8]));
    assert_eq!(take_all(&with).taken, take_all(&raw()).taken);
}

#[test]
fn deeper_nesting_is_refused_with_the_names() {
    let tensors = model(
        "model.language_model.language_model.language_model.",
        "lm_head.weight",
    );
    let error = Checkpoint::single(&tensors).weights_refused();
    assert!(matches!(error, Error::Names { .. }));
    says(
        &error,
        &[
            "8 tensors in no known naming",
            "model.language_model.language_model.language_model.embed_tokens.weight",
            "expected names that start with",
        ],
    );
}

#[test]
fn names_in_no_known_scheme_are_refused_with_the_names() {
    for name in [
        "layers.0.mlp.up_proj.weight",
        "transformer.h.0.weight",
        "model.language_model.lm_head.weight",
        "language_model.norm.weight",
        "model.",
        "",
    ] {
        let mut tensors = raw();
        tensors.push(bf16(name, &[1]));
        says(
            &Checkpoint::single(&tensors).weights_refused(),
            &["1 tensor in no known naming", name],
        );
    }
}

#[test]
fn many_names_are_counted_and_only_some_are_shown() {
    let tensors: Vec<Spec> = (0..20).map(|i| bf16(&format!("odd.{i:02}"), &[1])).collect();
    let message = Checkpoint::single(&tensors).weights_refused().to_string();
    assert!(
        message.contains("20 tensors") && message.contains("odd.07 and 12 more"),
        "{message}"
    );
    assert!(!message.contains("odd.08"), "{message}");
}

#[test]
fn mixed_prefixes_are_refused() {
    let mut tensors = raw();
    tensors.push(bf16("model.layers.7.mlp.up_proj.weight", &[3, 4]));
    says(
        &Checkpoint::single(&tensors).weights_refused(),
        &[
            "2 different prefixes",
            "model. (model.layers.7",
            "model.language_model. (",
        ],
    );
}

#[test]
fn two_names_for_one_weight_are_refused() {
    let mut tensors = raw();
    tensors.push(bf16("language_model.lm_head.weight", &[8, 4]));
    says(
        &Checkpoint::single(&tensors).weights_refused(),
        &["1 pair", "language_model.lm_head.weight and lm_head.weight"],
    );
    let mut tensors = raw();
    tensors.push(bf16("model.norm.weight", &[4]));
    says(
        &Checkpoint::single(&tensors).weights_refused(),
        &["same weight", "model.norm.weight"],
    );
}

// Formats

#[test]
fn a_quantization_entry_in_the_configuration_is_refused_with_its_format() {
    for (config, parts) in [
        (
            json!({"quantization": {"bits": 7, "group_size": 64}}),
            ["`quantization`", "affine of 7 bits in groups of 64"],
        ),
        (
            json!({"quantization": {"bits": 4, "group_size": 64, "mode": "hqq"}}),
            ["`quantization`", "mode \"hqq\""],
        ),
        (
            json!({"quantization": {"bits": 4, "group_size": -1}}),
            ["`quantization`", "group_size -1"],
        ),
        (
            json!({"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 64}}),
            ["`quantization_config`", "quant_method awq, bits 4, group_size 64"],
        ),
        (
            json!({"quantization_config": {"quant_method": "fbgemm_fp8", "fmt": "e4m3"}}),
            ["`quantization_config`", "quant_method fbgemm_fp8, fmt e4m3"],
        ),
        (
            json!({"text_config": {"quantization_config": {"quant_method": "gptq"}}}),
            ["`text_config.quantization_config`", "gptq"],
        ),
        (
            json!({"quantization": true}),
            ["`quantization`", "format not named"],
        ),
    ] {
        let folder = Checkpoint::single(&raw());
        folder.json("config.json", &config);
        let error = folder.weights_refused();
        assert!(matches!(error, Error::Quantized { .. }));
        says(&error, &parts);
    }
}

#[test]
fn a_null_quantization_entry_is_none() {
    let folder = Checkpoint::single(&raw());
    folder.json(
        "config.json",
        &json!({"quantization": null, "quantization_config": null, "text_config": null}),
    );
    folder.open().weights().unwrap();
}

#[test]
fn a_quantized_prediction_head_or_vision_tower_does_not_matter() {
    let mut tensors = raw();
    tensors.push(tensor("mtp.fc.weight", Dtype::F8_E4M3, &[4, 8]));
    tensors.push(bf16("model.visual.fc.weight_scale_inv", &[1]));
    take_all(&tensors);
}

/// The small model with its convolutions in another shape.
fn with_taps(shape: &[usize]) -> Vec<Spec> {
    let mut tensors = raw();
    for spec in &mut tensors {
        if spec.name.ends_with("conv1d.weight") {
            spec.shape = shape.to_vec();
        }
    }
    tensors
}

#[test]
fn the_layout_of_the_convolutions_tells_how_norms_are_stored_with_and_without_a_prediction_head() {
    // mlx-swift-lm#598: the presence of `mtp.*` proves nothing either way.
    for head in [false, true] {
        for (shape, expected) in [([6, 4, 1], Norms::OnePlus), ([6, 1, 4], Norms::ZeroCentred)] {
            let mut tensors = with_taps(&shape);
            if head {
                tensors.push(bf16("mtp.norm.weight", &[4]));
            }
            let checkpoint = Checkpoint::single(&tensors);
            let folder = checkpoint.open();
            let mut weights = folder.weights().unwrap();
            assert_eq!(weights.norms(), expected);
            // Its numbers are in the same order.
            let name = "layers.1.linear_attn.conv1d.weight";
            let taps = weights.take(name, &[6, 1, 4]).unwrap();
            let mut bytes = Vec::new();
            taps.flatten_all().unwrap().write_bytes(&mut bytes).unwrap();
            assert_eq!(
                bytes,
                bf16(&format!("model.language_model.{name}"), &shape).bytes()
            );
            if let Some(head) = folder.mtp().unwrap() {
                // mlx-lm#1456: a head in the same checkpoint was converted with it.
                assert_eq!(head.norms(), expected);
            }
        }
    }
}

#[test]
fn a_head_alone_is_converted_unless_its_names_are_those_of_the_original() {
    for (prefix, expected) in [("", Norms::OnePlus), ("mtp.", Norms::ZeroCentred)] {
        let checkpoint = Checkpoint::single(&[bf16(&format!("{prefix}norm.weight"), &[4])]);
        checkpoint.json("config.json", &json!({"model_type": "qwen3_5_mtp"}));
        let folder = checkpoint.open();
        let mut head = folder.mtp().unwrap().unwrap();
        assert_eq!(head.norms(), expected, "{prefix}");
        head.take("norm.weight", &[4]).unwrap();
    }
}

#[test]
fn convolutions_in_two_layouts_are_refused() {
    let mut tensors = raw();
    tensors
        .iter_mut()
        .find(|spec| spec.name.ends_with("layers.1.linear_attn.conv1d.weight"))
        .unwrap()
        .shape = vec![6, 4, 1];
    let error = Checkpoint::single(&tensors).weights_refused();
    assert!(matches!(error, Error::Layout { .. }));
    says(
        &error,
        &[
            "layers.1.linear_attn.conv1d",
            "[6, 4, 1]",
            "layers.0.linear_attn.conv1d.weight has [6, 1, 4]",
        ],
    );
}

#[test]
fn an_mlx_conversion_is_read_whatever_its_prefix() {
    for (prefix, head) in [
        ("language_model.model.", "language_model.lm_head.weight"),
        ("model.", "lm_head.weight"),
    ] {
        let mut tensors = model(prefix, head);
        for spec in &mut tensors {
            if spec.name.ends_with("conv1d.weight") {
                spec.shape = vec![6, 4, 1];
            }
        }
        tensors.push(bf16("vision_tower.blocks.0.weight", &[1]));
        let all = take_all(&tensors);
        assert_eq!((all.taken, all.vision), (parts().len(), 1), "{prefix}");
    }
}

#[test]
fn a_convolution_with_one_tap_is_refused_as_ambiguous() {
    let error = Checkpoint::single(&with_taps(&[6, 1, 1])).weights_refused();
    assert!(matches!(error, Error::Layout { .. }));
    says(&error, &["[6, 1, 1]", "single tap"]);
}

#[test]
fn a_convolution_without_its_middle_dimension_is_a_wrong_shape() {
    let checkpoint = Checkpoint::single(&with_taps(&[6, 4]));
    let folder = checkpoint.open();
    let mut weights = folder.weights().unwrap();
    let error = weights
        .take("layers.0.linear_attn.conv1d.weight", &[6, 1, 4])
        .unwrap_err();
    says(&error, &["expected shape [6, 1, 4], found [6, 4]"]);
}

// Taking

#[test]
fn a_tensor_comes_with_its_stored_dtype_and_its_bytes() {
    let checkpoint = Checkpoint::single(&raw());
    let folder = checkpoint.open();
    let mut weights = folder.weights().unwrap();
    for spec in raw() {
        let name = spec.name.trim_start_matches("model.language_model.");
        let tensor = weights.take(name, &spec.shape).unwrap();
        assert_eq!(tensor.dims(), spec.shape);
        assert_eq!(tensor.dtype().as_str(), spec.dtype.to_string().to_lowercase());
        let mut bytes = Vec::new();
        tensor.flatten_all().unwrap().write_bytes(&mut bytes).unwrap();
        assert_eq!(bytes, spec.bytes(), "{name}");
    }
}

#[test]
fn a_tensor_outlives_its_folder() {
    let checkpoint = Checkpoint::single(&raw());
    let tensor = {
        let folder = checkpoint.open();
        let mut weights = folder.weights().unwrap();
        weights.take("norm.weight", &[4]).unwrap()
    };
    drop(checkpoint);
    let mut bytes = Vec::new();
    tensor.write_bytes(&mut bytes).unwrap();
    assert_eq!(bytes, bf16("model.language_model.norm.weight", &[4]).bytes());
}

#[test]
fn data_at_an_odd_place_in_the_file_is_read_whole() {
    // A header of odd length, as other writers produce, puts every tensor at an odd address.
    let spec = tensor("model.norm.weight", Dtype::F32, &[5]);
    let header = r#"{"model.norm.weight":{"dtype":"F32","shape":[5],"data_offsets":[0,20]}}"#;
    for spaces in 0..4 {
        let header = format!("{header}{}", " ".repeat(spaces));
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.extend_from_slice(&spec.bytes());
        let folder = Checkpoint::empty();
        std::fs::write(folder.file("model.safetensors"), bytes).unwrap();
        let folder = folder.open();
        let tensor = folder.weights().unwrap().take("norm.weight", &[5]).unwrap();
        let mut read = Vec::new();
        tensor.write_bytes(&mut read).unwrap();
        assert_eq!(read, spec.bytes());
    }
}

#[test]
fn infinities_in_a_log_are_handed_out_as_they_are() {
    // transformers#47842: a head whose decay was rounded away. Whether that is acceptable is the model's to say.
    let header = r#"{"model.layers.0.linear_attn.A_log":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(&f32::NEG_INFINITY.to_le_bytes());
    let folder = Checkpoint::empty();
    std::fs::write(folder.file("model.safetensors"), bytes).unwrap();
    let folder = folder.open();
    let tensor = folder
        .weights()
        .unwrap()
        .take("layers.0.linear_attn.A_log", &[1])
        .unwrap();
    assert_eq!(tensor.to_vec1::<f32>().unwrap(), [f32::NEG_INFINITY]);
}

#[test]
fn a_missing_tensor_is_refused_by_name_and_shape() {
    let checkpoint = Checkpoint::single(&raw()[..2]);
    let folder = checkpoint.open();
    let mut weights = folder.weights().unwrap();
    assert!(!weights.has("lm_head.weight"));
    let error = weights.take("lm_head.weight", &[8, 4]).unwrap_err();
    assert!(matches!(error, Error::MissingTensor { .. }));
    says(&error, &["no tensor lm_head.weight", "[8, 4]"]);
}

#[test]
fn a_tensor_of_another_shape_is_refused_and_can_still_be_taken() {
    let checkpoint = Checkpoint::single(&raw());
    let folder = checkpoint.open();
    let mut weights = folder.weights().unwrap();
    for shape in [&[4, 8][..], &[32], &[8, 4, 1], &[]] {
        let error = weights.take("embed_tokens.weight", shape).unwrap_err();
        assert!(matches!(error, Error::Shape { .. }));
        says(
            &error,
            &[
                "model.language_model.embed_tokens.weight",
                "model.safetensors",
                &format!("expected shape {shape:?}, found [8, 4]"),
            ],
        );
    }
    assert_eq!(weights.bytes_taken(), 0);
    weights.take("embed_tokens.weight", &[8, 4]).unwrap();
    assert_eq!(weights.bytes_taken(), 64);
}

#[test]
fn a_tensor_of_another_dtype_is_refused_by_name() {
    // Of U32 and U8, which are what quantized matrices are in, other tests say what is missing.
    for dtype in [Dtype::F64, Dtype::I64, Dtype::BOOL] {
        let checkpoint = Checkpoint::single(&[tensor("model.norm.weight", dtype, &[8])]);
        let folder = checkpoint.open();
        let error = folder.weights().unwrap().take("norm.weight", &[8]).unwrap_err();
        assert!(matches!(error, Error::Dtype { .. }));
        says(
            &error,
            &["model.norm.weight", "F32, BF16 or F16", &format!("found {dtype}")],
        );
    }
}

#[test]
fn a_tensor_is_taken_once() {
    let checkpoint = Checkpoint::single(&raw());
    let folder = checkpoint.open();
    let mut weights = folder.weights().unwrap();
    weights.take("norm.weight", &[4]).unwrap();
    let error = weights.take("norm.weight", &[4]).unwrap_err();
    assert!(matches!(error, Error::TakenTwice { .. }));
    says(&error, &["norm.weight", "already taken"]);
    assert!(weights.has("norm.weight"));
}

#[test]
fn tensors_that_nobody_took_are_refused_by_name() {
    let checkpoint = Checkpoint::single(&raw());
    let folder = checkpoint.open();
    let mut weights = folder.weights().unwrap();
    for (name, shape) in &parts()[1..] {
        weights.take(name, shape).unwrap();
    }
    let error = weights.finish().unwrap_err();
    assert!(matches!(error, Error::Unused { .. }));
    says(
        &error,
        &["1 text tensor ", "model.language_model.embed_tokens.weight"],
    );

    let error = folder.weights().unwrap().finish().unwrap_err();
    says(&error, &["9 text tensors", "and 1 more"]);
}

#[test]
fn a_copy_of_the_embedding_can_be_set_aside() {
    let checkpoint = Checkpoint::single(&raw());
    let folder = checkpoint.open();
    let mut weights = folder.weights().unwrap();
    weights.discard("lm_head.weight");
    weights.discard("lm_head.weight");
    weights.discard("no.such.tensor");
    assert_eq!(weights.bytes_taken(), 64);
    assert!(weights.take("lm_head.weight", &[8, 4]).is_err());
    for (name, shape) in parts() {
        if name != "lm_head.weight" {
            weights.take(&name, &shape).unwrap();
        }
    }
    weights.discard("norm.weight");
    assert_eq!(weights.bytes_taken(), weights.bytes_total());
    let all = weights.finish().unwrap();
    assert_eq!((all.taken, all.discarded), (parts().len() - 1, 1));
}
