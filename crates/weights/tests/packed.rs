//! Matrices that MLX quantized: how their parts, their shapes and the configuration fit together. What the numbers are is
//! tested against mlx itself, across crates.

mod common;

use common::{bf16, groups, raw, says, tensor, Checkpoint, Spec};
use recant_weights::{Coding, Error, Stored};
use safetensors::Dtype;
use serde_json::{json, Value};

const PATH: &str = "model.language_model.layers.0.mlp.down_proj";
const NAME: &str = "layers.0.mlp.down_proj.weight";
/// Rows and columns of the matrix.
const SHAPE: [usize; 2] = [3, 128];

/// A part of the matrix.
fn part(end: &str, dtype: Dtype, shape: &[usize]) -> Spec {
    tensor(&format!("{PATH}.{end}"), dtype, shape)
}

/// The matrix in affine, its scales in bf16.
fn affine(bits: usize, group: usize) -> Vec<Spec> {
    vec![
        part("weight", Dtype::U32, &[3, 128 * bits / 32]),
        part("scales", Dtype::BF16, &[3, 128 / group]),
        part("biases", Dtype::BF16, &[3, 128 / group]),
    ]
}

/// The matrix with scales in a byte.
fn small_floats(bits: usize, group: usize) -> Vec<Spec> {
    vec![
        part("weight", Dtype::U32, &[3, 128 * bits / 32]),
        part("scales", Dtype::U8, &[3, 128 / group]),
    ]
}

/// A small model with the matrix in it, and what its configuration says.
fn checkpoint(parts: &[Spec], quantization: Value) -> Checkpoint {
    let checkpoint = Checkpoint::single(&[&raw(), parts].concat());
    checkpoint.json(
        "config.json",
        &json!({"model_type": "qwen3_5", "quantization": quantization}),
    );
    checkpoint
}

fn take(checkpoint: &Checkpoint) -> recant_weights::Result<Stored> {
    checkpoint.open().weights()?.take_matrix(NAME, SHAPE)
}

#[track_caller]
fn refused(parts: &[Spec], quantization: Value, said: &[&str]) {
    let error = take(&checkpoint(parts, quantization)).expect_err("a matrix was given");
    says(&error, said);
    assert!(
        matches!(
            error,
            Error::Packed { .. } | Error::Quantized { .. } | Error::Shape { .. }
        ),
        "{error:?}"
    );
}

fn global() -> Value {
    json!({"group_size": 64, "bits": 4, "mode": "affine"})
}

/// The same with an entry of the matrix' own.
fn with_entry(entry: Value) -> Value {
    let mut all = global();
    all[PATH] = entry;
    all
}

#[test]
fn four_and_eight_bits_are_handed_out_as_they_are() {
    for bits in [4, 8] {
        let parts = affine(bits, 64);
        let checkpoint = checkpoint(&parts, json!({"group_size": 64, "bits": bits}));
        let found = groups(take(&checkpoint).unwrap());
        assert_eq!((found.coding, found.group), (Coding::Whole { bits, zero: 0 }, 64));
        let tensors = [&found.quants, &found.scales, found.biases.as_ref().unwrap()];
        for (tensor, spec) in tensors.into_iter().zip(&parts) {
            let mut bytes = Vec::new();
            tensor.flatten_all().unwrap().write_bytes(&mut bytes).unwrap();
            assert_eq!(bytes, spec.bytes(), "{}", spec.name);
        }
    }
}

#[test]
fn all_parts_of_a_matrix_are_taken_together_or_set_aside_together() {
    let checkpoint = checkpoint(&affine(4, 64), global());
    let folder = checkpoint.open();
    let mut weights = folder.weights().unwrap();
    // In vain: nothing is taken.
    weights.take_matrix(NAME, [3, 96]).unwrap_err();
    weights.take(NAME, &SHAPE).unwrap_err();
    assert_eq!(weights.bytes_taken(), 0);
    weights.take_matrix(NAME, SHAPE).unwrap();
    assert_eq!(weights.bytes_taken(), 3 * 64 + 2 * 12);
    assert!(matches!(
        weights.take_matrix(NAME, SHAPE),
        Err(Error::TakenTwice { .. })
    ));

    let mut weights = folder.weights().unwrap();
    weights.discard(NAME);
    assert_eq!(weights.bytes_taken(), 3 * 64 + 2 * 12);
    let left = weights.finish().unwrap_err().to_string();
    assert!(!left.contains("down_proj"), "{left}");
}

#[test]
fn shapes_say_how_a_matrix_is_packed_that_the_configuration_does_not_name() {
    // ollama#15744, rMLX#188: routers in 8 bits under another mode, one tensor with another group.
    for quantization in [
        global(),
        json!({"group_size": 16, "bits": 4, "mode": "nvfp4"}),
        json!({"group_size": 128, "bits": 3}),
        json!(null),
    ] {
        for bits in [4, 8] {
            for group in [32, 64, 128] {
                let checkpoint = checkpoint(&affine(bits, group), quantization.clone());
                let found = groups(take(&checkpoint).unwrap());
                assert_eq!(
                    (found.coding.bits(), found.group),
                    (bits, group),
                    "{quantization}"
                );
            }
        }
    }
}

#[test]
fn an_entry_of_its_own_without_a_mode_is_affine() {
    let checkpoint = checkpoint(&affine(8, 64), {
        let mut all = json!({"group_size": 16, "bits": 4, "mode": "nvfp4"});
        all[PATH] = json!({"group_size": 64, "bits": 8});
        all
    });
    assert_eq!(groups(take(&checkpoint).unwrap()).coding.bits(), 8);
}

#[test]
fn an_entry_of_its_own_that_the_shapes_contradict_is_refused() {
    for (parts, entry, said) in [
        // As many words and scales, but not of so many numbers.
        (
            affine(4, 32),
            json!({"group_size": 64, "bits": 2}),
            "affine of 2 bits in groups of 64, but its shapes are those of affine of 4 bits in groups of 32",
        ),
        (
            affine(4, 64),
            json!({"group_size": 64, "bits": 8}),
            "affine of 8 bits in groups of 64, which the shapes",
        ),
        (
            affine(4, 32),
            json!({"group_size": 32, "bits": 4, "mode": "mxfp4"}),
            "mxfp4 of 4 bits in groups of 32, which the shapes",
        ),
        (
            small_floats(4, 32),
            json!({"group_size": 32, "bits": 4}),
            "affine of 4 bits in groups of 32, which the shapes",
        ),
        (
            affine(4, 64),
            json!(false),
            "is not quantized, but here are its scales",
        ),
    ] {
        refused(&parts, with_entry(entry.clone()), &[PATH, said]);
        if !said.contains("but its shapes") {
            // The length of a row need not be known for it.
            let error = checkpoint(&parts, with_entry(entry)).weights_refused();
            says(&error, &[said]);
        }
    }
}

#[test]
fn an_entry_of_its_own_for_a_matrix_without_scales_is_refused_unless_it_says_so() {
    let parts = [part("weight", Dtype::BF16, &SHAPE)];
    refused(
        &parts,
        with_entry(json!({"group_size": 64, "bits": 4})),
        &[PATH, "it is BF16 and has no scales"],
    );
    for fine in [with_entry(json!(false)), global()] {
        let found = take(&checkpoint(&parts, fine)).unwrap();
        assert!(matches!(found, Stored::Float(_)), "{found:?}");
    }
}

#[test]
fn quantization_wins_over_quantization_config() {
    let checkpoint = checkpoint(&affine(4, 64), with_entry(json!({"group_size": 64, "bits": 4})));
    let mut config = json!({"quantization": with_entry(json!({"group_size": 64, "bits": 4}))});
    config["quantization_config"] = with_entry(json!({"group_size": 64, "bits": 8}));
    checkpoint.json("config.json", &config);
    take(&checkpoint).unwrap();
    let other = config["quantization_config"].clone();
    checkpoint.json("config.json", &json!({"quantization_config": other}));
    says(&take(&checkpoint).unwrap_err(), &["affine of 8 bits"]);
}

#[test]
fn parts_that_are_missing_or_contradict_one_another_are_refused_before_any_is_read() {
    let words = || part("weight", Dtype::U32, &[3, 16]);
    let scales = || part("scales", Dtype::BF16, &[3, 2]);
    let biases = || part("biases", Dtype::BF16, &[3, 2]);
    let bytes = |shape: &[usize]| part("scales", Dtype::U8, shape);
    for (parts, said) in [
        (vec![words(), scales()], "there are none"),
        (vec![words()], "no `scales` beside it"),
        (vec![words(), biases()], "no `scales` beside it"),
        (vec![scales(), biases()], "no `weight` beside"),
        (
            vec![words(), bytes(&[3, 4]), part("biases", Dtype::U8, &[3, 4])],
            "only affine",
        ),
        (
            vec![words(), bytes(&[3, 1])],
            "16 words and 1 U8 scales a row are packed in no way",
        ),
        (
            vec![words(), part("scales", Dtype::I32, &[3, 2]), biases()],
            "found I32",
        ),
        (
            vec![words(), scales(), part("biases", Dtype::F16, &[3, 2])],
            "found [3, 2] F16",
        ),
        (
            vec![words(), scales(), part("biases", Dtype::BF16, &[3, 1])],
            "found [3, 1] BF16",
        ),
        (
            vec![
                words(),
                part("scales", Dtype::BF16, &[2, 2]),
                part("biases", Dtype::BF16, &[2, 2]),
            ],
            "found shape [2, 2]",
        ),
        (
            vec![words(), part("scales", Dtype::BF16, &[2]), biases()],
            "found shape [2]",
        ),
        (
            vec![part("weight", Dtype::BF16, &[3, 16]), scales(), biases()],
            "expected dtype U32, found BF16",
        ),
        (
            vec![words(), scales(), biases(), part("global_scale", Dtype::F32, &[])],
            "only nvfp4 has",
        ),
        (
            vec![words(), bytes(&[3, 8]), part("global_scale", Dtype::F32, &[3])],
            "expected one F32 number a matrix, 1 in all, found [3] F32",
        ),
        // 48 numbers of nvfp4.
        (
            vec![part("weight", Dtype::U32, &[3, 6]), bytes(&[3, 3])],
            "rows of 48 numbers",
        ),
    ] {
        let error = checkpoint(&parts, json!(null)).weights_refused();
        assert!(matches!(error, Error::Packed { .. }), "{error:?}");
        says(&error, &[PATH, said]);
    }
}

#[test]
fn numbers_of_other_widths_are_refused_by_name() {
    // rMLX#188: 1 and 7 bits.
    // Words and scales of one bit in groups of 128 are as many as of two in groups of 64, until a row is known to be 128 long.
    for (bits, said) in [(1, "not 128 numbers in any way"), (7, "packed in no way")] {
        let parts = [
            part("weight", Dtype::U32, &[3, 4 * bits]),
            part("scales", Dtype::BF16, &[3, 1]),
            part("biases", Dtype::BF16, &[3, 1]),
        ];
        refused(&parts, json!(null), &[PATH, said]);
        let named = with_entry(json!({"group_size": 128, "bits": bits}));
        let error = take(&checkpoint(&parts, named)).unwrap_err();
        says(&error, &[PATH]);
    }
    let named = with_entry(json!({"group_size": 128, "bits": 1}));
    refused(
        &affine(4, 64),
        named,
        &["affine of 1 bits in groups of 128", PATH],
    );
}

#[test]
fn a_row_of_another_length_than_asked_for_is_refused() {
    let checkpoint = checkpoint(&affine(4, 64), global());
    let folder = checkpoint.open();
    for (shape, said) in [
        ([3, 96], "not 96 numbers"),
        ([3, 0], "not 0 numbers"),
        ([4, 128], "expected shape [4, 128]"),
    ] {
        let error = folder.weights().unwrap().take_matrix(NAME, shape).unwrap_err();
        says(&error, &[PATH, said]);
    }
    let error = folder
        .weights()
        .unwrap()
        .take_stacked(NAME, [1, 3, 128], 0)
        .unwrap_err();
    says(&error, &["expected shape [1, 3, 128]"]);
}

#[test]
fn a_quantized_model_without_a_convolution_does_not_tell_how_its_norms_are_stored() {
    let parts: Vec<Spec> = [&raw(), &affine(4, 64)[..]]
        .concat()
        .into_iter()
        .filter(|spec| !spec.name.ends_with("conv1d.weight"))
        .collect();
    let error = Checkpoint::single(&parts).weights_refused();
    assert!(matches!(error, Error::Layout { .. }));
    says(&error, &["scales", "no convolution tells"]);
}

#[test]
fn a_stack_is_handed_out_matrix_by_matrix() {
    let mut parts = affine(4, 64);
    for spec in &mut parts {
        spec.shape.insert(0, 2);
    }
    let checkpoint = checkpoint(&parts, global());
    let folder = checkpoint.open();
    let mut weights = folder.weights().unwrap();
    // Not the second before the first.
    weights.take_stacked(NAME, [2, 3, 128], 1).unwrap_err();
    for i in 0..2 {
        let found = groups(weights.take_stacked(NAME, [2, 3, 128], i).unwrap());
        // Nor one again, nor the stack once it is begun.
        weights.take_stacked(NAME, [2, 3, 128], i).unwrap_err();
        weights.take_matrix(NAME, [6, 128]).unwrap_err();
        let bytes = found.quants.flatten_all().unwrap().to_vec1::<u8>().unwrap();
        assert_eq!(bytes, parts[0].bytes()[i * 192..(i + 1) * 192]);
        assert_eq!(found.scales.dims(), [3, 2]);
    }
}

#[test]
fn a_prediction_head_is_quantized_in_its_own_way() {
    let parts = [
        tensor("mtp.fc.weight", Dtype::U32, &[4, 32]),
        bf16("mtp.fc.scales", &[4, 2]),
        bf16("mtp.fc.biases", &[4, 2]),
    ];
    let checkpoint = checkpoint(&parts, json!({"group_size": 64, "bits": 4}));
    let folder = checkpoint.open();
    let mut head = folder.mtp().unwrap().unwrap();
    let found = groups(head.take_matrix("fc.weight", [4, 128]).unwrap());
    assert_eq!((found.coding.bits(), found.group), (8, 64));
    head.finish().unwrap();
    let checkpoint = self::checkpoint(&parts[..2], json!(null));
    says(
        &checkpoint.open().mtp().unwrap_err(),
        &["mtp.fc.scales", "there are none"],
    );
}
