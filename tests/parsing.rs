//! Files that are damaged or made to do harm: reading them panics nowhere, and asks for no more memory than a small multiple of
//! their size, whatever they promise.

mod common;
#[path = "common/gguf.rs"]
mod gguf;
#[path = "common/sealed.rs"]
mod sealed;

use std::cell::Cell;
use std::path::Path;

use common::counting::Counting;
use common::{tiny, Result};
use proptest::prelude::*;
use recant::candle::{DType, Device, Tensor};
use recant::core::persist::{self, CacheFile};
use recant::core::{CacheOptions, Rows, Segment};
use sealed::sealed;
use serde_json::json;
use tempfile::TempDir;

/// Most bytes asked for at a time, for each byte of a file. A number in JSON takes two bytes in a file and dozens in memory,
/// more while a list of them grows.
const FACTOR: usize = 100;
/// What takes memory whatever is read: names of folders, messages, a few tables.
const BASE: usize = 256 << 10;

thread_local!(static LIVE: Cell<[isize; 2]> = const { Cell::new([0; 2]) });

/// Counts the bytes that are in use on each thread, and the most that were. What is moved can be there twice for a while.
fn count(asked: usize, freed: usize) {
    let [live, most] = LIVE.get();
    let peak = live + asked as isize;
    LIVE.set([peak - freed as isize, most.max(peak)]);
}

#[global_allocator]
static COUNTING: Counting = Counting(count);

/// The most bytes in use while `task` ran, above those before it.
fn most(task: impl FnOnce()) -> usize {
    LIVE.set([0; 2]);
    task();
    LIVE.get()[1] as usize
}

#[track_caller]
fn bounded(what: &str, size: usize, task: impl FnOnce()) {
    let most = most(task);
    let bound = BASE + FACTOR * size;
    assert!(
        most <= bound,
        "{what}: {most} bytes in use for {size} in files, {} expected at most",
        bound
    );
}

/// The files that are read of a checkpoint, all small and right.
fn files() -> Vec<(&'static str, Vec<u8>)> {
    let config = common::seeded::dense(|_| {}).to_string().into_bytes();
    let tensors = [
        ("model.language_model.norm.weight", vec![4]),
        (
            "model.language_model.layers.0.linear_attn.conv1d.weight",
            vec![6, 1, 4],
        ),
        ("mtp.fc.weight", vec![2, 4]),
    ];
    let tensors = tensors.map(|(name, shape)| {
        let zeros = Tensor::zeros(shape, DType::BF16, &Device::Cpu).expect("zeros");
        (name, zeros)
    });
    let weights = safetensors::serialize(tensors.iter().map(|(name, tensor)| (*name, tensor)), None);
    let map = tensors
        .iter()
        .map(|(name, _)| ((*name).to_owned(), json!("weights.safetensors")));
    let index = json!({"weight_map": map.collect::<serde_json::Map<_, _>>()});
    vec![
        ("config.json", config),
        ("generation_config.json", b"{\"eos_token_id\": [1, 2]}".to_vec()),
        ("model.safetensors.index.json", index.to_string().into_bytes()),
        ("weights.safetensors", weights.expect("a file")),
    ]
}

fn write(dir: &Path, files: &[(&str, Vec<u8>)]) -> usize {
    let write = |(name, bytes): &(&str, Vec<u8>)| {
        std::fs::write(dir.join(name), bytes).expect("written");
        bytes.len()
    };
    files.iter().map(write).sum()
}

/// Reads whatever there is to read in a folder.
fn read(what: &str, files: &[(&str, Vec<u8>)]) {
    let dir = TempDir::new().expect("a folder");
    let size = write(dir.path(), files);
    bounded(what, size, || {
        recant::inspect(dir.path());
    });
}

/// A cache of a few tokens, saved.
fn cache_file() -> Result<Vec<u8>> {
    let model = tiny(|_| {})?;
    let mut caches = model.new_caches(&CacheOptions::default())?;
    let tokens = [3, 1, 4];
    model.forward(&mut [Segment::new(&tokens, &mut caches, Rows::None)])?;
    let dir = TempDir::new()?;
    let path = dir.path().join("cache");
    persist::save(&path, &caches, &tokens)?;
    Ok(std::fs::read(path)?)
}

/// Reads a cache file as it is and with a digest that is right; says what was wrong with that.
fn read_cache(what: &str, bytes: &[u8]) -> String {
    let dir = TempDir::new().expect("a folder");
    let path = dir.path().join("cache");
    let mut reason = String::new();
    for bytes in [Some(bytes.to_vec()), sealed(bytes)].into_iter().flatten() {
        std::fs::write(&path, &bytes).expect("written");
        bounded(what, bytes.len(), || {
            reason = CacheFile::read(&path).map_or_else(|error| error.to_string(), |_| String::new());
        });
    }
    reason
}

/// A safetensors file of a header that may promise anything.
fn safetensors_of(length: u64, header: &str) -> Vec<u8> {
    [&length.to_le_bytes(), header.as_bytes()].concat()
}

#[test]
fn what_is_right_is_read() -> Result<()> {
    let dir = TempDir::new()?;
    write(dir.path(), &files());
    let report = recant::inspect(dir.path());
    assert_eq!(report.parameters, 4 + 24, "{:?}", report.refusals);
    assert_eq!(report.family.as_deref(), Some("qwen3_5"));
    let path = dir.path().join("cache");
    std::fs::write(&path, cache_file()?)?;
    assert_eq!(CacheFile::read(&path)?.tokens, [3, 1, 4]);
    Ok(())
}

#[test]
fn a_promise_of_gigabytes_in_a_small_file_asks_for_none() -> Result<()> {
    let tera = 1_u64 << 40;
    let header = json!({"a": {"dtype": "F32", "shape": [tera], "data_offsets": [0, 4 * tera]}}).to_string();
    let config = files().remove(0);
    for (what, weights) in [
        (
            "a header of 30 GB",
            safetensors_of(30_000_000_000, &" ".repeat(1000)),
        ),
        ("a header of 99 MB", safetensors_of(99_000_000, &" ".repeat(1000))),
        ("a tensor of 4 TB", safetensors_of(header.len() as u64, &header)),
    ] {
        read(what, &[config.clone(), ("model.safetensors", weights.clone())]);
        read_cache(what, &weights);
    }
    // Tensors, fields, and elements of a list, by the billion.
    for (what, tensors, fields) in [("tensors", tera, 0), ("fields", 0, tera)] {
        let mut gguf = b"GGUF\x03\0\0\0".to_vec();
        gguf.extend(tensors.to_le_bytes());
        gguf.extend(fields.to_le_bytes());
        gguf.resize(1000, 0);
        read(what, &[("model.gguf", gguf)]);
    }
    let mut list = b"GGUF\x03\0\0\0".to_vec();
    list.extend(0_u64.to_le_bytes());
    list.extend(1_u64.to_le_bytes());
    list.extend(1_u64.to_le_bytes());
    list.extend(b"k");
    // A list of bytes.
    list.extend(9_u32.to_le_bytes());
    list.extend(0_u32.to_le_bytes());
    list.extend(tera.to_le_bytes());
    read("a list", &[("model.gguf", list)]);

    // A cache file that claims billions of layers, and of tokens.
    for (from, to, reason) in [
        ("\"layers\":\"4\"", "\"layers\":\"9999999999\"", "layers.4.len"),
        (".len\":\"3\"", ".len\":\"9999999999\"", "holds 9999999999 tokens"),
    ] {
        let said = read_cache(from, &altered(cache_file()?, from, to)?);
        assert!(said.contains(reason), "{said}");
    }
    Ok(())
}

/// A safetensors file with a text in the place of another in its header.
fn altered(mut file: Vec<u8>, from: &str, to: &str) -> Result<Vec<u8>> {
    let place = file.windows(from.len()).position(|part| part == from.as_bytes());
    let place = place.ok_or(from)?;
    file.splice(place..place + from.len(), to.bytes());
    let length = u64::from_le_bytes(file[..8].try_into()?) + to.len() as u64 - from.len() as u64;
    file[..8].copy_from_slice(&length.to_le_bytes());
    Ok(file)
}

#[test]
fn what_is_short_in_a_file_and_long_in_memory_stays_a_small_multiple() {
    let size = 300_000;
    let filled = |open: &str, item: &str, close: &str| {
        let items = vec![item; size / (item.len() + 1)].join(",");
        format!("{open}{items}{close}")
    };
    let distinct: Vec<String> = (0..size / 12).map(|i| format!("\"{i:x}\":0")).collect();
    let shards: Vec<String> = (0..size / 24)
        .map(|i| format!("\"{i:x}\":\"{i:x}.st\""))
        .collect();
    let empty: Vec<String> = (0..size / 60)
        .map(|i| format!("\"{i:x}\":{{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}}"))
        .collect();
    let texts = [
        filled("{\"layer_types\":[", "0", "]}"),
        filled("{\"layer_types\":[", "[]", "]}"),
        filled("{\"layer_types\":[", "{}", "]}"),
        filled("{\"eos_token_id\":[", "1", "]}"),
        filled("{\"a\":[", "\"\"", "]}"),
        format!("{{{}}}", distinct.join(",")),
        format!("{{\"weight_map\":{{{}}}}}", shards.join(",")),
        format!("{{{}}}", empty.join(",")),
        format!("{{\"a\":{}{}}}", "[".repeat(size / 2), "]".repeat(size / 2)),
        format!("{{\"a\":\"{}\"}}", "\\u0001".repeat(size / 6)),
        format!("{{\"{}\":0}}", "x".repeat(size)),
    ];
    for text in texts {
        let what = text[..40].to_owned();
        let bytes = text.clone().into_bytes();
        for place in 0..3 {
            let mut files = files();
            files[place].1 = bytes.clone();
            read(&what, &files);
        }
        let weights = safetensors_of(text.len() as u64, &text);
        read_cache(&what, &weights);
        let mut files = files();
        files[3].1 = weights;
        read(&what, &files);
    }
}

#[test]
fn small_files_that_are_far_too_long_are_not_parsed() -> Result<()> {
    for name in ["config.json", "generation_config.json", "tokenizer_config.json"] {
        let dir = TempDir::new()?;
        write(dir.path(), &files());
        let mut long = std::fs::read(dir.path().join(name)).unwrap_or_else(|_| b"{}".to_vec());
        long.resize(17 << 20, b' ');
        std::fs::write(dir.path().join(name), long)?;
        let mut report = None;
        let most = most(|| report = Some(recant::inspect(dir.path())));
        let refusals = report.ok_or("no report")?.refusals;
        let said = &refusals[0];
        assert!(
            said.contains(name) && said.contains("at most 16777216 bytes"),
            "{refusals:?}"
        );
        assert!(most < 64 << 20, "{most}");
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn any_bytes_in_the_place_of_any_file_are_read_without_a_panic(
        bytes in prop::collection::vec(any::<u8>(), 0..300),
        place in 0..4_usize,
        framed in any::<bool>(),
    ) {
        let mut files = files();
        let bytes = match framed {
            true => [&(bytes.len() as u64).to_le_bytes(), bytes.as_slice()].concat(),
            false => bytes,
        };
        read_cache("bytes", &bytes);
        files[place].1 = bytes;
        read("bytes", &files);
    }

    #[test]
    fn any_change_of_right_files_is_read_without_a_panic(
        changes in prop::collection::vec((0..4_usize, any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in prop::option::of((0..4_usize, any::<prop::sample::Index>())),
    ) {
        let mut files = files();
        for (file, place, byte) in changes {
            let bytes = &mut files[file].1;
            let place = place.index(bytes.len());
            bytes[place] = byte;
        }
        if let Some((file, place)) = cut {
            let bytes = &mut files[file].1;
            bytes.truncate(place.index(bytes.len()));
        }
        read("changed", &files);
    }

    /// Numbers and words in the place of others, which changes of single bytes seldom make.
    #[test]
    fn any_value_in_the_place_of_another_is_read_without_a_panic(
        value in prop::sample::select(vec![
            "null", "true", "-1", "0", "1", "3", "1e9", "18446744073709551615", "1e400", "\"\"", "\"full_attention\"", "[]", "{}",
            "[[1]]", "0.5",
        ]),
        place in any::<prop::sample::Index>(),
        file in 0..3_usize,
    ) {
        let mut files = files();
        let text = String::from_utf8(files[file].1.clone()).expect("JSON");
        let starts: Vec<usize> = text.match_indices(':').map(|(at, _)| at + 1).collect();
        let start = starts[place.index(starts.len())];
        let rest = &text[start..];
        let end = rest.find([',', '}']).unwrap_or(rest.len());
        files[file].1 = format!("{}{value}{}", &text[..start], &rest[end..]).into_bytes();
        read("another value", &files);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn any_change_of_a_cache_file_is_read_without_a_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes = CACHE.with(Clone::clone);
        // Most bytes are numbers of the arrays; what can go wrong stands before them.
        let head = bytes.len().min(4000);
        for (place, byte) in changes {
            bytes[place.index(head)] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        read_cache("changed", &bytes);
    }
}

thread_local!(static CACHE: Vec<u8> = cache_file().expect("a cache file"));

/// What fuzzing begins with: for each target in `fuzz`, an input that is right.
#[test]
#[ignore = "writes fuzz/corpus, for .ci/run and for whoever fuzzes"]
fn inputs_to_begin_fuzzing_with() -> Result<()> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus");
    let [(_, config), (_, generation), (_, index), (_, weights)] = files().try_into().map_err(|_| "files")?;
    let length = usize::try_from(u64::from_le_bytes(weights[..8].try_into()?))?;
    let mut shard = weights[8..8 + length].to_vec();
    let index = String::from_utf8(index)?.replace("weights.safetensors", "a.safetensors");
    shard.push(b'\n');
    shard.extend(index.bytes());
    let named =
        json!({"eos_token": "b", "chat_template": [{"name": "default", "template": "{{ eos_token }}"}]});
    let template = b"{% for m in messages %}{{ m.content | trim }}{% endfor %}".to_vec();
    let small = [
        config,
        generation,
        named.to_string().into_bytes(),
        named.to_string().into_bytes(),
        template,
    ];
    let mut inputs = vec![
        ("index", shard),
        ("safetensors", weights),
        ("gguf", gguf::File::model().bytes()),
        ("cache_file", cache_file()?),
    ];
    inputs.extend(
        small
            .into_iter()
            .zip(0..)
            .map(|(file, which)| ("config", [vec![which], file].concat())),
    );
    for (number, (target, input)) in inputs.into_iter().enumerate() {
        let folder = corpus.join(target);
        std::fs::create_dir_all(&folder)?;
        std::fs::write(folder.join(format!("right-{number}")), input)?;
    }
    Ok(())
}
