//! Files with a right digest and wrong contents: what the digest does not guard against.

use std::sync::Arc;

use super::*;
use crate::{AttentionLayout, CacheOptions, LayerLayout, StackLayout};

fn stack() -> Result<CacheStack> {
    let layout = StackLayout {
        fingerprint: String::from("a model"),
        layers: vec![LayerLayout::Attention(AttentionLayout {
            kv_heads: 1,
            head_dim: 2,
            dtype: DType::F32,
        })],
        device: Device::Cpu,
    };
    let mut stack = CacheStack::standard(Arc::new(layout), &CacheOptions::default())?;
    let rows = Tensor::ones((3, 1, 2), DType::F32, &Device::Cpu)?;
    stack.attention(0)?.append(&rows, &rows)?;
    Ok(stack)
}

/// A saved file taken apart, to be put together again with a right digest.
struct Forged {
    meta: BTreeMap<String, String>,
    tensors: BTreeMap<String, (safetensors::Dtype, Vec<usize>, Vec<u8>)>,
}

impl Forged {
    fn of(stack: &CacheStack) -> Result<Self> {
        let folder = tempfile::tempdir().map_err(Error::other)?;
        let path = folder.path().join("cache");
        save(&path, stack, &[1, 2, 3])?;
        let bytes = std::fs::read(&path).map_err(Error::other)?;
        let (_, header) = SafeTensors::read_metadata(&bytes).map_err(Error::other)?;
        let mut meta: BTreeMap<_, _> = header
            .metadata()
            .clone()
            .unwrap_or_default()
            .into_iter()
            .collect();
        meta.remove(DIGEST);
        let file = SafeTensors::deserialize(&bytes).map_err(Error::other)?;
        let tensors = file
            .iter()
            .map(|(name, view)| {
                (
                    name.to_owned(),
                    (view.dtype(), view.shape().to_vec(), view.data().to_vec()),
                )
            })
            .collect();
        Ok(Self { meta, tensors })
    }

    fn set(mut self, field: &str, value: &str) -> Self {
        self.meta.insert(field.to_owned(), value.to_owned());
        self
    }

    fn refusal(mut self, stack: &mut CacheStack) -> Result<String> {
        let mut digest = Digest::of_metadata(&self.meta);
        for (name, (dtype, shape, data)) in &self.tensors {
            if let Ok(dtype) = DType::try_from(*dtype) {
                digest.tensor(name, dtype, shape, data);
            }
        }
        self.meta.insert(DIGEST.into(), digest.hex());
        let views = self.tensors.iter().map(|(name, (dtype, shape, data))| {
            let view = safetensors::tensor::TensorView::new(*dtype, shape.clone(), data);
            view.map(|view| (name, view)).map_err(Error::other)
        });
        let views = views.collect::<Result<Vec<_>>>()?;
        let bytes =
            safetensors::serialize(views, Some(self.meta.into_iter().collect())).map_err(Error::other)?;
        let folder = tempfile::tempdir().map_err(Error::other)?;
        let path = folder.path().join("cache");
        std::fs::write(&path, bytes).map_err(Error::other)?;
        let before = stack.snapshot()?;
        let result = load(&path, stack);
        assert_eq!(stack.snapshot()?.difference(&before), None);
        match result {
            Err(Error::File { reason, .. }) => Ok(reason),
            other => Ok(format!("{other:?}")),
        }
    }
}

#[test]
fn wrong_fields_are_refused_by_name() -> Result<()> {
    let mut stack = stack()?;
    for (field, value, says) in [
        ("format", "other", "has format `other`"),
        ("version", "2", "has version `2`"),
        ("model", "another model", "has model `another model`"),
        (
            "layers",
            "1000000000000",
            "lacks the metadata field `layers.1.len`",
        ),
        (
            "layers",
            "18446744073709551615",
            "lacks the metadata field `layers.1.len`",
        ),
        ("layers", "18446744073709551616", "where a number is expected"),
        ("layers", "-1", "where a number is expected"),
        ("layers", "0", "layers of a snapshot: expected 1, found 0"),
        ("layers.0.len", "4", "has 3 token ids, but layer 0 holds 4 tokens"),
        ("layers.0.len", "18446744073709551615", "has 3 token ids"),
        (
            "layers.0.kind",
            "arrays",
            "kind of snapshot: expected kv, found arrays",
        ),
        ("layers.0.setting.window", "many", "where a number is expected"),
    ] {
        let refusal = Forged::of(&stack)?.set(field, value).refusal(&mut stack)?;
        assert!(refusal.contains(says), "{field} = {value}: {refusal}");
    }
    for field in [
        "format",
        "version",
        "model",
        "layers",
        "layers.0.len",
        "layers.0.kind",
    ] {
        let mut forged = Forged::of(&stack)?;
        forged.meta.remove(field);
        let refusal = forged.refusal(&mut stack)?;
        assert!(
            refusal.contains(&format!("lacks the metadata field `{field}`")),
            "{refusal}"
        );
    }
    Ok(())
}

#[test]
fn wrong_tensors_are_refused_by_name() -> Result<()> {
    use safetensors::Dtype;
    let mut stack = stack()?;
    for name in [TOKENS, "layers.0.keys", "layers.0.values"] {
        let mut forged = Forged::of(&stack)?;
        forged.tensors.remove(name);
        let refusal = forged.refusal(&mut stack)?;
        assert!(
            refusal.contains(name.rsplit('.').next().unwrap_or(name)),
            "{refusal}"
        );
    }
    let wide = vec![0, 1 << 62, 1 << 62];
    for (name, dtype, shape, bytes, says) in [
        (
            TOKENS,
            Dtype::F32,
            vec![3],
            12,
            "lacks the one-dimensional U32 tensor",
        ),
        (
            TOKENS,
            Dtype::U32,
            vec![3, 1],
            12,
            "lacks the one-dimensional U32 tensor",
        ),
        (
            TOKENS,
            Dtype::U32,
            vec![2],
            8,
            "has 2 token ids, but layer 0 holds 3 tokens",
        ),
        (
            "layers.0.keys",
            Dtype::F64,
            vec![3, 1, 2],
            48,
            "expected F32 of [3, 1, 2], found F64 of [3, 1, 2]",
        ),
        (
            "layers.0.keys",
            Dtype::F32,
            vec![3, 2, 1],
            24,
            "expected F32 of [3, 1, 2], found F32 of [3, 2, 1]",
        ),
        (
            "layers.0.keys",
            Dtype::F32,
            vec![],
            4,
            "has Some([]) in `layers.0.keys`, where a row for each of 3 tokens is expected",
        ),
        (
            "layers.0.keys",
            Dtype::F32,
            vec![2, 1, 2],
            16,
            "has Some([2, 1, 2]) in `layers.0.keys`, where a row for each of 3 tokens is expected",
        ),
        (
            "layers.0.keys",
            Dtype::C64,
            vec![3, 1, 2],
            48,
            "has an unknown type in `layers.0.keys`",
        ),
        ("layers.0.keys", Dtype::F4, vec![3, 1, 2], 3, "keys`"),
        ("layers.0.keys", Dtype::F8_E8M0, vec![3, 1, 2], 6, "keys`"),
        ("layers.0.keys", Dtype::F32, wide, 0, "has an absurd shape"),
    ] {
        let mut forged = Forged::of(&stack)?;
        forged
            .tensors
            .insert(name.to_owned(), (dtype, shape, vec![0; bytes]));
        let refusal = forged.refusal(&mut stack)?;
        assert!(refusal.contains(says), "{name} as {dtype:?}: {refusal}");
    }
    Ok(())
}

#[test]
fn the_format_of_version_1_stays_readable() -> Result<()> {
    let mut stack = stack()?;
    let mut forged = Forged::of(&stack)?;
    // What came later: which arrays hold rows of tokens.
    for array in ["keys", "values"] {
        let field = format!("layers.0.rows.{array}");
        assert_eq!(forged.meta.remove(&field).as_deref(), Some(BY_TOKEN));
    }
    let fields: Vec<&str> = forged.meta.keys().map(String::as_str).collect();
    assert_eq!(
        fields,
        [
            "format",
            "layers",
            "layers.0.kind",
            "layers.0.len",
            "model",
            "version"
        ]
    );
    let names: Vec<&str> = forged.tensors.keys().map(String::as_str).collect();
    assert_eq!(names, ["layers.0.keys", "layers.0.values", "token_ids"]);
    // The digest is part of the format: another way of computing it makes all files of today unreadable.
    let mut digest = Digest::of_metadata(&forged.meta);
    for (name, (dtype, shape, data)) in &forged.tensors {
        let dtype = DType::try_from(*dtype).map_err(Error::other)?;
        digest.tensor(name, dtype, shape, data);
    }
    assert_eq!(digest.hex(), "18d592862da1c8f78ab32cfd6a648809");
    assert_eq!(forged.refusal(&mut stack)?, "Ok([1, 2, 3])");
    Ok(())
}

/// A file of a piece of the stack's snapshot, with something beside it.
fn piece(stack: &CacheStack, beside: Snapshot) -> Result<CacheFile> {
    Ok(CacheFile {
        model: String::from("a model"),
        tokens: vec![1, 2, 3],
        caches: stack.snapshot()?.rows(1..3)?,
        beside: Some(beside),
        notes: [(String::from("for"), String::from("a test"))].into(),
    })
}

fn nested(depth: usize) -> Result<Snapshot> {
    let array = Tensor::new(&[depth as f32, 7.0], &Device::Cpu)?;
    let snapshot = Snapshot::new(format!("level {depth}"), 2)
        .with_setting("depth", depth)
        .with_rows("by.token", array.clone())
        .with_array("parts", array);
    Ok(match depth {
        1 => snapshot,
        _ => snapshot.with_parts(vec![nested(depth - 1)?, Snapshot::new("leaf", 0), nested(1)?]),
    })
}

/// Reads what was written, with other metadata.
fn rewritten(file: &CacheFile, edit: impl FnOnce(&mut Fields)) -> Result<CacheFile> {
    let folder = tempfile::tempdir().map_err(Error::other)?;
    let path = folder.path().join("piece");
    let (mut meta, tensors) = file.encode()?;
    edit(&mut meta);
    let mut digest = Digest::of_metadata(&meta);
    for (name, tensor) in &tensors {
        digest.tensor(name, tensor.dtype(), tensor.dims(), &bytes_of(tensor));
    }
    meta.insert(DIGEST.into(), digest.hex());
    safetensors::serialize_to_file(tensors.iter(), Some(meta.into_iter().collect()), &path)
        .map_err(Error::other)?;
    CacheFile::read(path)
}

#[test]
fn a_piece_of_a_snapshot_and_what_is_beside_it_come_back_as_they_were() -> Result<()> {
    let stack = stack()?;
    let file = piece(&stack, nested(MAX_DEPTH)?)?;
    let folder = tempfile::tempdir().map_err(Error::other)?;
    let path = folder.path().join("piece");
    file.write(&path)?;
    let read = CacheFile::read(&path)?;
    assert_eq!(read.caches.difference(&file.caches), None);
    assert_eq!((read.caches.start(), read.caches.len()), (1, 3));
    assert_eq!(
        read.caches.parts()[0].row_names(),
        file.caches.parts()[0].row_names()
    );
    let (beside, expected) = (read.beside.clone().expect("beside"), nested(MAX_DEPTH)?);
    assert_eq!(beside.difference(&expected), None);
    assert_eq!(beside.row_names(), expected.row_names());
    assert_eq!(
        (&read.model, &read.tokens, &read.notes),
        (&file.model, &file.tokens, &file.notes)
    );
    assert_eq!(read.name()?, file.name()?);
    let bare = CacheFile {
        caches: Snapshot::new(STACK, 3).rows(2..3)?,
        ..file.clone()
    };
    bare.write(&path)?;
    assert_eq!(CacheFile::read(&path)?.caches.start(), 2);
    // It lacks rows, so no cache takes it.
    let mut whole = self::stack()?;
    let refused = load(&path, &mut whole);
    assert!(matches!(refused, Err(Error::File { .. })), "{refused:?}");
    assert_eq!(whole.snapshot()?.difference(&stack.snapshot()?), None);
    Ok(())
}

#[test]
fn a_name_tells_apart_whatever_a_file_says_but_the_bytes_of_arrays() -> Result<()> {
    let stack = stack()?;
    let file = piece(&stack, nested(1)?)?;
    let whole = stack.snapshot()?;
    let mut others = vec![file.clone(); 7];
    others[0].model = String::from("another model");
    others[1].tokens = vec![1, 2, 4];
    others[2].caches = whole.rows(2..3)?;
    others[3].caches = whole.after(3)?;
    others[4].beside = None;
    others[5].beside = Some(nested(2)?);
    others[6].notes.clear();
    let mut names = vec![file.name()?];
    for other in &others {
        let name = other.name()?;
        assert!(!names.contains(&name), "{other:?}");
        names.push(name);
    }
    Ok(())
}

#[test]
fn wrong_fields_of_pieces_and_of_what_is_beside_are_refused_by_name() -> Result<()> {
    let file = piece(&stack()?, nested(3)?)?;
    for (field, value, says) in [
        ("layers.0.start", "2", "a row for each of 1 tokens is expected"),
        ("layers.0.start", "4", "has rows from token 4 on"),
        ("start", "4", "has rows from token 4 on in `start`, but 3 tokens"),
        (
            "start",
            "2",
            "has rows from token 1 on in layer 0, where they begin at token 2",
        ),
        (
            "layers.0.start",
            "18446744073709551616",
            "where a number is expected",
        ),
        (
            "layers.0.rows.keys",
            "heads",
            "has rows of `layers.0.keys` by `heads`",
        ),
        (
            "layers.0.rows.nothing",
            "tokens",
            "has None in `layers.0.nothing`",
        ),
        ("beside", "0", "has not one snapshot in `beside`"),
        ("beside", "6", "lacks parts of `beside`"),
        ("beside", "8", "lacks the metadata field `beside.7.parts`"),
        (
            "beside",
            "18446744073709551615",
            "lacks the metadata field `beside.7.parts`",
        ),
        ("beside", "all", "where a number is expected"),
        ("beside.0.parts", "2", "has not one snapshot in `beside`"),
        (
            "beside.0.parts",
            "18446744073709551615",
            "lacks parts of `beside`",
        ),
        ("beside.1.parts", "-3", "where a number is expected"),
        (
            "beside.3.rows.by.token",
            "",
            "has rows of `beside.3.by.token` by ``",
        ),
    ] {
        let read = rewritten(&file, |meta| {
            meta.insert(field.to_owned(), value.to_owned());
        });
        let Err(Error::File { reason, .. }) = read else {
            panic!("{field} = {value}: {read:?}");
        };
        assert!(reason.contains(says), "{field} = {value}: {reason}");
    }
    let deeper = piece(&stack()?, nested(MAX_DEPTH + 1)?)?;
    let folder = tempfile::tempdir().map_err(Error::other)?;
    assert!(matches!(
        deeper.write(folder.path().join("piece")),
        Err(Error::Mismatch { .. })
    ));
    let short = Snapshot::new("short", 3).with_rows("rows", Tensor::new(&[1f32, 2.0], &Device::Cpu)?);
    assert!(piece(&stack()?, short)?
        .write(folder.path().join("piece"))
        .is_err());
    // A chain of parts, each of which is the only one of that before it.
    let read = rewritten(&piece(&stack()?, Snapshot::new("top", 0))?, |meta| {
        meta.insert(BESIDE.into(), String::from("100000"));
        for index in 0..100_000 {
            meta.insert(format!("beside.{index}.kind"), String::from("link"));
            meta.insert(format!("beside.{index}.len"), String::from("0"));
            meta.insert(
                format!("beside.{index}.parts"),
                usize::from(index < 99_999).to_string(),
            );
        }
    });
    let Err(Error::File { reason, .. }) = read else {
        panic!("{read:?}");
    };
    assert!(reason.contains("parts more than 8 deep"), "{reason}");
    Ok(())
}
