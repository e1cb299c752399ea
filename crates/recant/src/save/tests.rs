//! Shards of any size hold the same tensors.

use std::collections::BTreeMap;

use super::*;

/// Type, shape and file by name.
type Tensors = BTreeMap<String, (String, Vec<usize>, String)>;

fn tensors(folder: &Path) -> Tensors {
    let folder = Folder::open(folder).expect("a folder");
    let all = folder.tensors().map(|tensor| {
        let file = tensor.file.file_name().expect("a name").to_string_lossy();
        (
            tensor.name.clone(),
            (tensor.dtype.to_string(), tensor.shape.clone(), file.into_owned()),
        )
    });
    all.collect()
}

#[test]
fn a_checkpoint_in_many_shards_is_the_one_in_a_single_file() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/models/demo-target");
    let dir = tempfile::tempdir().expect("a folder");
    let format = GroupFormat {
        bits: 4,
        group: 32,
        affine: true,
        scales: DType::BF16,
    };
    let (one, many) = (dir.path().join("one"), dir.path().join("many"));
    save_in_shards(&source, &one, format, SHARD, &mut |_, _| {}).expect("one file");
    save_in_shards(&source, &many, format, 600_000, &mut |_, _| {}).expect("shards");
    let (one_tensors, many_tensors) = (tensors(&one), tensors(&many));
    let files: std::collections::BTreeSet<_> = many_tensors.values().map(|(.., file)| file).collect();
    assert!(files.len() > 5, "{files:?}");
    for file in files {
        let size = std::fs::metadata(many.join(file)).expect("a file").len();
        // The embedding is larger than a shard may be, and alone.
        assert!(!(640_000..=1_000_000).contains(&size), "{file}: {size}");
    }
    let bare = |all: &Tensors| -> Vec<_> {
        all.iter()
            .map(|(name, (dtype, shape, _))| (name.clone(), dtype.clone(), shape.clone()))
            .collect()
    };
    assert_eq!(bare(&one_tensors), bare(&many_tensors));
    let fingerprint = |path| Folder::open(path).expect("a folder").fingerprint().to_owned();
    assert_eq!(fingerprint(&one), fingerprint(&many));
}
