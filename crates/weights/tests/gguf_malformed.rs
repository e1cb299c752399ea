//! GGUF files that are malformed: each is refused in words that name what is wrong.

#[path = "common/gguf.rs"]
mod common;

use common::file::{File, Value};
use common::{changed, refused, Dir};
use proptest::prelude::*;
use recant_weights::Folder;

/// The bytes of a header that promises so many tensors and metadata entries.
fn header(version: u32, tensors: u64, entries: u64) -> Vec<u8> {
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(version.to_le_bytes());
    bytes.extend(tensors.to_le_bytes());
    bytes.extend(entries.to_le_bytes());
    bytes
}

#[test]
fn a_file_that_is_none_is_refused() {
    refused(b"", &["model.gguf", "cut short"]);
    refused(b"GGU", &["cut short"]);
    refused(b"GGML0000", &["expected \"GGUF\""]);
    refused(&header(1, 0, 0), &["version 1", "2 or 3"]);
    refused(&header(3_u32.swap_bytes(), 0, 0), &["big-endian"]);
    refused(&header(3, 0, 0), &["general.architecture"]);
}

#[test]
fn counts_that_no_file_could_hold_allocate_nothing() {
    for count in [1 << 30, 30 << 30, u64::MAX / 2, u64::MAX] {
        let mut bytes = header(3, count, 0);
        bytes.resize(1000, 0);
        refused(&bytes, &["promises", "tensors", "976 bytes"]);
        let mut bytes = header(3, 0, count);
        bytes.resize(1000, 0);
        refused(&bytes, &["promises", "metadata entries"]);
        // An array, of a text, of numbers, of arrays.
        for kind in [8_u32, 4, 9, 7] {
            let mut bytes = header(3, 0, 1);
            bytes.extend(1_u64.to_le_bytes());
            bytes.push(b'k');
            bytes.extend(9_u32.to_le_bytes());
            bytes.extend(kind.to_le_bytes());
            bytes.extend(count.to_le_bytes());
            bytes.resize(1000, 0);
            refused(&bytes, &["metadata key k", "elements of an array"]);
        }
        // A text.
        let mut bytes = header(3, 0, 1);
        bytes.extend(count.to_le_bytes());
        bytes.resize(1000, 0);
        refused(&bytes, &["a text should have"]);
    }
}

#[test]
fn arrays_within_arrays_end_somewhere() {
    let mut bytes = header(3, 0, 1);
    bytes.extend(1_u64.to_le_bytes());
    bytes.push(b'k');
    bytes.extend(9_u32.to_le_bytes());
    for _ in 0..100_000 {
        bytes.extend(9_u32.to_le_bytes());
        bytes.extend(1_u64.to_le_bytes());
    }
    refused(&bytes, &["metadata key k", "deeper than 4"]);
}

#[test]
fn a_file_that_is_cut_short_anywhere_is_refused() {
    let bytes = File::model().bytes();
    for at in (0..bytes.len()).step_by(61).chain([bytes.len() - 1]) {
        refused(&bytes[..at], &["model.gguf"]);
    }
}

#[test]
fn tensors_of_impossible_shapes_types_and_places_are_refused_by_name() {
    let name = "blk.0.ffn_up.weight";
    changed(
        |file| file.tensor(name).shape = vec![12; 5],
        &[name, "5 dimensions"],
    );
    changed(|file| file.tensor(name).shape = vec![], &[name, "0 dimensions"]);
    changed(
        |file| file.tensor(name).shape = vec![12, 0],
        &[name, "no elements"],
    );
    changed(
        |file| file.tensor(name).shape = vec![1 << 40, 1 << 40],
        &[name, "more than 2^64"],
    );
    changed(
        |file| file.tensor(name).shape = vec![1 << 30, 1 << 30],
        &[name, "cut short"],
    );
    changed(
        |file| file.tensor(name).shape = vec![1 << 62, 2],
        &[name, "2^64 bytes"],
    );
    changed(|file| file.tensor(name).kind = 77, &[name, "type 77"]);
    changed(
        |file| file.tensor(name).kind = 8,
        &[name, "8 elements", "a multiple of 32 for Q8_0"],
    );
    changed(
        |file| file.tensor(name).shape = vec![12_000, 8],
        &[name, "cut short"],
    );
    changed(|file| file.tensor(name).shape = vec![24, 8], &["overlap"]);
    changed(
        |file| file.tensor(name).name = "blk.0.ffn_gate.weight".to_owned(),
        &["blk.0.ffn_gate.weight occurs twice"],
    );
    changed(
        |file| {
            file.metadata
                .push(("qwen35.block_count".to_owned(), Value::U32(1)))
        },
        &["qwen35.block_count occurs twice"],
    );
}

#[test]
fn a_tensor_that_does_not_begin_where_data_may_is_refused() {
    let mut file = File::model();
    file.tensors.truncate(1);
    let bytes = file.bytes();
    // The offset is the last number before the padding and the data.
    let data = 6 * 8 * 4;
    let before = &bytes[..bytes.len() - data];
    let offset = before.iter().rposition(|byte| *byte != 0).unwrap() / 4 * 4;
    let mut found = 0;
    for at in offset..before.len() - 7 {
        let mut bytes = bytes.clone();
        bytes[at..at + 8].copy_from_slice(&7_u64.to_le_bytes());
        let dir = Dir::new();
        let error = Folder::open(dir.write("model.gguf", &bytes))
            .map(|_| ())
            .err()
            .map(|e| e.to_string());
        found += usize::from(error.is_some_and(|e| e.contains("no multiple of 32")));
    }
    assert!(found > 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400), magic in any::<bool>()) {
        let bytes = if magic { [&header(3, 1, 1)[..], &bytes].concat() } else { bytes };
        try_all(&bytes);
    }

    #[test]
    fn no_change_of_a_model_makes_it_panic(changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6), cut in any::<Option<prop::sample::Index>>()) {
        let file = File::model();
        let mut bytes = file.bytes();
        let data: usize = file.tensors.iter().map(|tensor| tensor.data.len().next_multiple_of(32)).sum();
        let header = bytes.len() - data;
        for (at, byte) in changes {
            bytes[at.index(header)] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        try_all(&bytes);
    }
}

/// Opens a file and takes what there is, whatever it holds.
fn try_all(bytes: &[u8]) {
    let dir = Dir::new();
    let Ok(folder) = Folder::open(dir.write("model.gguf", bytes)) else {
        return;
    };
    let _ = folder.vocabulary();
    let _ = folder.mtp();
    let shapes: Vec<(String, Vec<usize>)> = folder
        .tensors()
        .map(|t| (t.name.clone(), t.shape.clone()))
        .collect();
    let Ok(mut weights) = folder.weights() else { return };
    for layer in 0..3 {
        let mixer = format!("layers.{layer}.linear_attn");
        for name in ["in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj"] {
            for (_, shape) in &shapes {
                if let [rows, width] = shape[..] {
                    let _ = weights.take_matrix(&format!("{mixer}.{name}.weight"), [rows, width]);
                }
            }
        }
        for (_, shape) in &shapes {
            for name in ["A_log", "dt_bias", "conv1d.weight", "norm.weight"] {
                let _ = weights.take(&format!("{mixer}.{name}"), shape);
            }
        }
    }
}
