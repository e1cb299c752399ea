//! Malformed safetensors files, each refused with the file's name and never read past its end.

mod common;

use common::{raw, says, write, Checkpoint};
use proptest::prelude::*;
use recant_weights::{Error, Folder};

/// A file with this header and so many bytes of data.
fn file(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

#[track_caller]
fn refused(bytes: &[u8], parts: &[&str]) {
    let folder = Checkpoint::empty();
    std::fs::write(folder.file("model.safetensors"), bytes).unwrap();
    let error = folder.refused();
    assert!(matches!(error, Error::Header { .. }), "{error:?}");
    says(&error, &["model.safetensors", "valid safetensors"]);
    says(&error, parts);
}

#[test]
fn an_empty_file_is_refused() {
    refused(&[], &["at least 8 bytes, found 0"]);
}

#[test]
fn a_file_shorter_than_its_length_field_is_refused() {
    refused(&[1, 0, 0], &["at least 8 bytes, found 3"]);
}

#[test]
fn a_header_longer_than_the_file_is_refused() {
    let mut bytes = 1000u64.to_le_bytes().to_vec();
    bytes.extend_from_slice(b"{}");
    refused(&bytes, &["1000 bytes, but only 2 follow"]);
}

#[test]
fn an_absurd_header_length_is_refused_before_anything_is_allocated() {
    for length in [100_000_001, u64::MAX / 2, u64::MAX] {
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.extend_from_slice(b"{}");
        refused(&bytes, &[&length.to_string(), "at most 100000000"]);
    }
}

#[test]
fn a_header_that_is_no_json_is_refused() {
    refused(&file("not json", 0), &["expected"]);
    refused(&file("[]", 0), &["expected a JSON object"]);
    refused(&file("", 0), &["EOF"]);
}

#[test]
fn a_header_that_is_no_utf8_is_refused() {
    let mut bytes = file(r#"{"aa":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#, 1);
    bytes[10] = 0xff;
    refused(&bytes, &[]);
}

#[test]
fn a_file_that_was_cut_short_is_refused() {
    let folder = Checkpoint::single(&raw());
    let bytes = std::fs::read(folder.file("model.safetensors")).unwrap();
    for cut in [1, 17, 100] {
        refused(&bytes[..bytes.len() - cut], &["cut short"]);
    }
}

#[test]
fn a_file_with_bytes_to_spare_is_refused() {
    let folder = Checkpoint::single(&raw());
    let mut bytes = std::fs::read(folder.file("model.safetensors")).unwrap();
    bytes.push(0);
    refused(&bytes, &["too long"]);
}

#[test]
fn a_shape_larger_than_its_data_is_refused() {
    // mlx#3363
    let header = r#"{"a":{"dtype":"F32","shape":[1000,1000],"data_offsets":[0,4]}}"#;
    refused(&file(header, 4), &["shape"]);
}

#[test]
fn overlapping_offsets_are_refused() {
    let header = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},
                     "b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}"#;
    refused(&file(header, 6), &["offset", "b"]);
}

#[test]
fn a_gap_between_tensors_is_refused() {
    let header = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},
                     "b":{"dtype":"U8","shape":[4],"data_offsets":[5,9]}}"#;
    refused(&file(header, 9), &["offset", "b"]);
}

#[test]
fn reversed_offsets_are_refused() {
    let header = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[4,0]}}"#;
    refused(&file(header, 4), &["offset", "a"]);
}

#[test]
fn offsets_that_are_no_whole_numbers_are_refused() {
    for offsets in [
        "[-1,3]",
        "[0.0,4.0]",
        "[0]",
        "[0,4,8]",
        "null",
        "[0,99999999999999999999]",
    ] {
        let header = format!(r#"{{"a":{{"dtype":"U8","shape":[4],"data_offsets":{offsets}}}}}"#);
        refused(&file(&header, 4), &[]);
    }
}

#[test]
fn a_shape_whose_product_overflows_is_refused() {
    let header = r#"{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}"#;
    refused(&file(header, 0), &["overflow"]);
}

#[test]
fn tensors_that_promise_all_of_the_address_space_are_refused() {
    // The largest end that can be written. Adding the header's length to it overflows.
    let most = (1u64 << 61) - 1;
    let mut entries = serde_json::Map::new();
    let mut start = 0;
    for size in [most, most, most, most, most, most, most, most, 7] {
        let name = format!("t{}", entries.len());
        entries.insert(
            name,
            serde_json::json!({"dtype": "U8", "shape": [size], "data_offsets": [start, start + size]}),
        );
        start += size;
    }
    assert_eq!(start, u64::MAX);
    let header = serde_json::Value::from(entries).to_string();
    refused(
        &file(&header, 4),
        &[&u64::MAX.to_string(), "found 4", "cut short"],
    );
}

#[test]
fn a_name_that_occurs_twice_is_refused() {
    // Both entries lie over the same bytes, so that no offset check sees it.
    let header = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},
                     "a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
    refused(&file(header, 4), &["a occurs twice"]);
}

#[test]
fn an_unknown_dtype_is_refused() {
    let header = r#"{"a":{"dtype":"Q4_K","shape":[4],"data_offsets":[0,4]}}"#;
    refused(&file(header, 4), &["Q4_K"]);
}

#[test]
fn a_deeply_nested_header_does_not_exhaust_the_stack() {
    let header = format!(r#"{{"a":{}{}}}"#, "[".repeat(1_000_000), "]".repeat(1_000_000));
    refused(&file(&header, 0), &["recursion"]);
}

#[test]
fn a_foreign_name_is_cut_and_made_printable_in_messages() {
    let name = format!("\\u001b[2J{}", "x".repeat(100_000));
    let entry = r#"{"dtype":"U8","shape":[4],"data_offsets":[4,0]}"#;
    let folder = Checkpoint::empty();
    std::fs::write(
        folder.file("model.safetensors"),
        file(&format!(r#"{{"{name}":{entry}}}"#), 4),
    )
    .unwrap();
    let message = folder.refused().to_string();
    assert!(message.len() < 1000 && !message.contains('\u{1b}'));
}

#[test]
fn a_folder_in_the_place_of_a_weight_file_is_refused() {
    let folder = Checkpoint::empty();
    std::fs::create_dir(folder.file("model.safetensors")).unwrap();
    says(&folder.refused(), &["model.safetensors", "it is a folder"]);
}

/// Opens a folder with this weight file and, if that works, reads all there is to read.
fn open_and_read(bytes: &[u8]) {
    let folder = Checkpoint::empty();
    std::fs::write(folder.file("model.safetensors"), bytes).unwrap();
    let Ok(folder) = Folder::open(folder.0.path()) else {
        return;
    };
    folder.fingerprint();
    let infos: Vec<_> = folder.tensors().cloned().collect();
    if let Ok(mut weights) = folder.weights() {
        for info in infos {
            let name = info.name.trim_start_matches("model.language_model.");
            let _ = weights.take(name, &info.shape);
        }
        let _ = weights.finish();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn no_file_makes_reading_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        open_and_read(&bytes);
        // The same bytes behind a length field that fits.
        let mut framed = (bytes.len() as u64).to_le_bytes().to_vec();
        framed.extend_from_slice(&bytes);
        open_and_read(&framed);
    }

    #[test]
    fn no_change_to_a_valid_file_makes_reading_it_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        write(&path, &raw()[..3]);
        let mut bytes = std::fs::read(path).unwrap();
        for (place, byte) in changes {
            let place = place.index(bytes.len());
            bytes[place] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        open_and_read(&bytes);
    }

    #[test]
    fn no_digits_in_a_header_make_reading_it_panic(
        shape in prop::collection::vec(prop_oneof![0..9u64, any::<u64>()], 0..4),
        offsets in prop::array::uniform2(prop_oneof![0..40u64, any::<u64>()]),
        dtype in prop::sample::select(vec!["F32", "BF16", "F16", "U8", "F4", "F8_E4M3", "BOOL", "C64"]),
        data in 0..40usize,
    ) {
        let header = serde_json::json!({
            "model.language_model.norm.weight": {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        });
        open_and_read(&file(&header.to_string(), data));
    }
}
