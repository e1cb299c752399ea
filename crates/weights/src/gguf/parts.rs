//! Which files a model is in.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::config::Metadata;
use super::header::Header;
use crate::error::{list, Error, Result};

const END: &str = ".gguf";
/// Most parts of a model that are believed.
const MAX_PARTS: u64 = 10_000;
/// How the names of files begin that hold the vision tower of a model.
const VISION: &str = "mmproj";

/// `model-00002-of-00003.gguf` is part 2 of 3 of `model`.
#[derive(Debug, PartialEq, Eq)]
struct Part<'a> {
    stem: &'a str,
    number: u64,
    count: u64,
}

impl<'a> Part<'a> {
    fn parse(name: &'a str) -> Option<Self> {
        let (rest, count) = name.strip_suffix(END)?.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let digits = |text: &str| (text.len() == 5).then(|| text.parse::<u64>().ok()).flatten();
        Some(Self {
            stem,
            number: digits(number)?,
            count: digits(count)?,
        })
    }
}

/// Whether a path is named as a GGUF file.
pub(crate) fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|end| end == "gguf") && !path.is_dir()
}

/// The one model in GGUF that a folder holds, by its first file; None where there is no such file.
pub(crate) fn model_in(folder: &Path) -> Result<Option<PathBuf>> {
    let entries = std::fs::read_dir(folder).map_err(|error| Error::io(folder, error))?;
    let names: Vec<String> = entries
        .filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()))
        .filter(|name| name.ends_with(END) && !name.starts_with(VISION))
        .collect();
    let mut models: BTreeMap<(&str, u64), &str> = BTreeMap::new();
    for name in &names {
        let model = Part::parse(name).map_or((name.as_str(), 1), |part| (part.stem, part.count));
        let first = models.entry(model).or_insert(name);
        *first = (*first).min(name);
    }
    let files: Vec<&str> = models.into_values().collect();
    match files[..] {
        [] => Ok(None),
        [only] => Ok(Some(folder.join(only))),
        _ => Err(Error::NoCheckpoint {
            folder: folder.to_owned(),
            found: format!(
                "{} models in GGUF, {}: name the file that is meant",
                files.len(),
                list(&files)
            ),
        }),
    }
}

/// All files of the model that one file belongs to, in order.
///
/// # Errors
/// Files that its name promises and that are not there.
pub(super) fn all(file: &Path) -> Result<Vec<PathBuf>> {
    let name = file.file_name().map(|name| name.to_string_lossy());
    let Some(part) = name.as_deref().and_then(Part::parse) else {
        return Ok(vec![file.to_owned()]);
    };
    if part.number == 0 || part.number > part.count || part.count > MAX_PARTS {
        return Err(Error::gguf(
            file,
            format!(
                "its name says part {} of {}; expected 1 to {MAX_PARTS} parts, counted from 1",
                part.number, part.count
            ),
        ));
    }
    let files: Vec<PathBuf> = (1..=part.count)
        .map(|number| file.with_file_name(format!("{}-{number:05}-of-{:05}{END}", part.stem, part.count)))
        .collect();
    let missing: Vec<String> = files
        .iter()
        .filter(|file| !file.exists())
        .filter_map(|file| Some(file.file_name()?.to_string_lossy().into_owned()))
        .collect();
    if missing.is_empty() {
        Ok(files)
    } else {
        Err(Error::MissingShards {
            index: file.to_owned(),
            shards: missing,
        })
    }
}

/// Refuses files that do not say of themselves what their names say.
pub(super) fn check(files: &[PathBuf], headers: &[(Header, &[u8])]) -> Result<()> {
    let tensors: usize = headers.iter().map(|(header, _)| header.tensors.len()).sum();
    for (number, (file, (header, bytes))) in files.iter().zip(headers).enumerate() {
        let metadata = Metadata {
            file,
            values: &header.metadata,
            bytes,
        };
        let expected = [
            ("split.count", files.len(), 1),
            ("split.no", number, 0),
            ("split.tensors.count", tensors, tensors),
        ];
        for (key, expected, absent) in expected {
            let found = metadata.number(key)?.unwrap_or(absent as u64);
            // A file that is all there is may count tensors or not.
            if found != expected as u64 {
                return Err(metadata.wrong(
                    key,
                    &format!("{expected} from the names and headers of all its parts"),
                    &found.to_string(),
                ));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_parts_are_those_with_five_digits() {
        let part = |number, count| Part {
            stem: "Qwen-of-3",
            number,
            count,
        };
        assert_eq!(Part::parse("Qwen-of-3-00002-of-00003.gguf"), Some(part(2, 3)));
        for name in [
            "a.gguf",
            "a-2-of-3.gguf",
            "a-00002-of-00003.bin",
            "a-0000x-of-00003.gguf",
            "-of-.gguf",
        ] {
            assert_eq!(Part::parse(name), None, "{name}");
        }
    }
}
