//! `model.safetensors.index.json`: which shard holds which tensor.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path};

use serde::Deserialize;

use crate::error::{clipped, count, list, Error, Result};
use crate::unique::UniqueMap;

#[derive(Deserialize)]
struct File {
    weight_map: UniqueMap<String>,
}

/// A parsed index: tensor name to shard name.
pub(crate) struct Index {
    map: BTreeMap<String, String>,
}

impl Index {
    /// Parses an index. Every shard it names is a plain file name.
    pub(crate) fn parse(path: &Path, text: &[u8]) -> Result<Self> {
        let File {
            weight_map: UniqueMap(map),
        } = serde_json::from_slice(text).map_err(|error| {
            Error::json(
                path,
                "an object `weight_map` of tensor names and shard names",
                error,
            )
        })?;
        if map.is_empty() {
            return Err(Error::json(path, "at least one tensor in `weight_map`", "none"));
        }
        if let Some((tensor, shard)) = map.iter().find(|(_, shard)| !is_plain(shard)) {
            return Err(Error::index(
                path,
                format!(
                    "tensor {} is said to be in {:?}; expected the name of a file in the same folder",
                    clipped(tensor),
                    clipped(shard)
                ),
            ));
        }
        Ok(Self { map })
    }

    /// The shards, in name order, each once.
    pub(crate) fn shards(&self) -> BTreeSet<&str> {
        self.map.values().map(String::as_str).collect()
    }

    /// Checks that a shard holds exactly the tensors that the index puts there.
    pub(crate) fn check(&self, path: &Path, shard: &str, held: &BTreeSet<&str>) -> Result<()> {
        let lacking: Vec<&str> = self
            .map
            .iter()
            .filter(|(name, place)| place.as_str() == shard && !held.contains(name.as_str()))
            .map(|(name, _)| name.as_str())
            .collect();
        if !lacking.is_empty() {
            return Err(Error::index(
                path,
                format!(
                    "it puts {} in {shard} that the shard lacks: {}; index and shards are of different downloads",
                    count(lacking.len(), "tensor"),
                    list(&lacking)
                ),
            ));
        }
        let unlisted: Vec<&str> = held
            .iter()
            .copied()
            .filter(|name| self.map.get(*name).map(String::as_str) != Some(shard))
            .collect();
        if !unlisted.is_empty() {
            return Err(Error::index(
                path,
                format!(
                    "{shard} holds {} that the index does not put there: {}; index and shards are of different downloads",
                    count(unlisted.len(), "tensor"),
                    list(&unlisted)
                ),
            ));
        }
        Ok(())
    }
}

/// Whether a name is a plain file name, on any system: `C:x` starts with a drive, not with a normal component.
fn is_plain(name: &str) -> bool {
    let first = Path::new(name).components().next();
    matches!(first, Some(Component::Normal(only)) if only == name) && !name.contains(['/', '\\', '\0'])
}
