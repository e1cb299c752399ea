//! From the names in a file to names that do not depend on who exported it.

use std::collections::BTreeMap;
use std::path::Path;

use crate::error::{clipped, count, list, Error, Result};

/// Prefixes of the language model, longest match first.
const TEXT: [&str; 3] = ["model.language_model.", "language_model.model.", "model."];
const HEAD: [&str; 2] = ["lm_head.", "language_model.lm_head."];
const VISION: [&str; 4] = ["model.visual.", "visual.", "vision_tower.", "model.vision_tower."];
const MTP: [&str; 4] = [
    "mtp.",
    "model.mtp.",
    "language_model.mtp.",
    "model.language_model.mtp.",
];
/// Scales of keys and values that are cached in 8 bits, which they are not here: ends of canonical names.
const CACHE_SCALES: [&str; 4] = [
    ".self_attn.k_scale",
    ".self_attn.v_scale",
    ".self_attn.k_proj.k_scale",
    ".self_attn.v_proj.v_scale",
];
/// What may follow a text prefix.
const PARTS: [&str; 3] = ["embed_tokens.", "layers.", "norm."];

/// What a name in a file stands for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Name<'a> {
    /// A tensor of the language model: its canonical name, and the prefix that was taken off.
    Text {
        canonical: &'a str,
        prefix: &'static str,
    },
    /// The output head: its canonical name. It stands outside the text prefix.
    Head { canonical: &'a str },
    /// A tensor of the vision tower.
    Vision,
    /// A tensor of the multi-token-prediction head.
    Mtp,
    /// Nothing that is known.
    Unknown,
}

/// Reads one name.
pub(crate) fn classify(name: &str) -> Name<'_> {
    let starts = |prefixes: &[&str]| prefixes.iter().any(|prefix| name.starts_with(prefix));
    if starts(&VISION) {
        return Name::Vision;
    }
    if starts(&MTP) {
        return Name::Mtp;
    }
    if starts(&HEAD) {
        return Name::Head {
            canonical: name.strip_prefix("language_model.").unwrap_or(name),
        };
    }
    for prefix in TEXT {
        if let Some(canonical) = name.strip_prefix(prefix) {
            return if PARTS.iter().any(|part| canonical.starts_with(part)) {
                Name::Text { canonical, prefix }
            } else {
                Name::Unknown
            };
        }
    }
    Name::Unknown
}

/// A name of the multi-token-prediction head, without its prefix.
pub(crate) fn without_mtp(name: &str) -> Option<&str> {
    MTP.iter().find_map(|prefix| name.strip_prefix(prefix))
}

/// Whether a canonical name is that of a scale of cached keys or values.
pub(crate) fn is_cache_scale(name: &str) -> bool {
    CACHE_SCALES.iter().any(|end| name.ends_with(end))
}

/// Whether a name belongs to the language model or its head, whatever its spelling.
pub(crate) fn is_text(name: &str) -> bool {
    !matches!(classify(name), Name::Vision | Name::Mtp)
}

/// The names of a checkpoint, sorted out.
#[derive(Debug)]
pub(crate) struct Sorted<'a> {
    /// Canonical name to the name in the file.
    pub(crate) text: BTreeMap<&'a str, &'a str>,
    pub(crate) vision: usize,
    pub(crate) mtp: usize,
}

/// The tensors of a multi-token-prediction head inside a checkpoint: canonical name to the name in the file.
pub(crate) fn mtp<'a>(
    folder: &Path,
    names: impl Iterator<Item = &'a str>,
) -> Result<BTreeMap<&'a str, &'a str>> {
    let mut head = BTreeMap::new();
    let mut prefixes: BTreeMap<&str, &str> = BTreeMap::new();
    for name in names {
        for prefix in MTP {
            if let Some(canonical) = name.strip_prefix(prefix) {
                prefixes.entry(prefix).or_insert(name);
                head.insert(canonical, name);
            }
        }
    }
    one_prefix(folder, &prefixes)?;
    Ok(head)
}

fn one_prefix(folder: &Path, prefixes: &BTreeMap<&str, &str>) -> Result<()> {
    if prefixes.len() <= 1 {
        return Ok(());
    }
    let seen: Vec<String> = prefixes
        .iter()
        .map(|(prefix, example)| format!("{prefix} ({})", clipped(example)))
        .collect();
    Err(Error::names(
        folder,
        format!(
            "its tensors carry {} different prefixes: {}; expected one; two checkpoints seem to be mixed",
            seen.len(),
            list(&seen)
        ),
    ))
}

/// Sorts out every name of a checkpoint, or says why that cannot be done without guessing.
pub(crate) fn sort<'a>(folder: &Path, names: impl Iterator<Item = &'a str>) -> Result<Sorted<'a>> {
    let mut sorted = Sorted {
        text: BTreeMap::new(),
        vision: 0,
        mtp: 0,
    };
    let mut prefixes: BTreeMap<&str, &str> = BTreeMap::new();
    let mut unknown = Vec::new();
    let mut doubles = Vec::new();
    for name in names {
        let canonical = match classify(name) {
            Name::Vision => {
                sorted.vision += 1;
                continue;
            }
            Name::Mtp => {
                sorted.mtp += 1;
                continue;
            }
            Name::Unknown => {
                unknown.push(name);
                continue;
            }
            Name::Head { canonical } => canonical,
            Name::Text { canonical, prefix } => {
                prefixes.entry(prefix).or_insert(name);
                canonical
            }
        };
        if let Some(other) = sorted.text.insert(canonical, name) {
            doubles.push(format!("{} and {}", clipped(other), clipped(name)));
        }
    }
    if !unknown.is_empty() {
        return Err(Error::names(
            folder,
            format!(
                "{} in no known naming: {}; expected names that start with one of {}, lm_head. or language_model.lm_head.; \
                 rename them as the model's original export does",
                count(unknown.len(), "tensor"),
                list(&unknown),
                TEXT.join(", ")
            ),
        ));
    }
    if !doubles.is_empty() {
        return Err(Error::names(
            folder,
            format!(
                "{} of tensors stand for the same weight: {}; expected one; delete the wrong ones",
                count(doubles.len(), "pair"),
                list(&doubles)
            ),
        ));
    }
    one_prefix(folder, &prefixes)?;
    Ok(sorted)
}
