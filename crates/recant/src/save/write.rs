//! Units into safetensors files, some rows at a time.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::Path;

use recant_core::candle::{DType, Tensor};
use recant_layers::{group_weights, GroupFormat, GroupScales, GroupWeights};
use recant_weights::{Coding, Folder, Stored, StoredGroups};
use safetensors::View;
use serde_json::json;

use super::plan::{bytes, Form, Piece, Plan, Unit, Whole};
use super::put;
use super::source::Source;
use crate::{Error, Result};

/// Bytes of floats that are rounded at once.
const CHUNK: u64 = 64 << 20;

/// One tensor of a file.
struct Written {
    name: String,
    dtype: &'static str,
    shape: Vec<usize>,
    bytes: u64,
}

/// Writes all units and the index.
pub(super) fn write(
    folder: &Folder,
    plan: &Plan<'_>,
    shard: u64,
    target: &Path,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<()> {
    let (head, model): (Vec<_>, Vec<_>) = plan.units.iter().partition(|unit| unit.mtp);
    let shards = split(model, shard);
    let count = shards.len();
    let name = |index: usize| match count {
        1 => "model.safetensors".to_owned(),
        _ => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
    };
    let mut files: Vec<(String, Vec<&Unit<'_>>)> = shards
        .into_iter()
        .enumerate()
        .map(|(index, units)| (name(index), units))
        .collect();
    if !head.is_empty() {
        files.push(("mtp.safetensors".to_owned(), head));
    }
    let mut source = Source::new(folder)?;
    let (total, mut done) = (plan.bytes(), 0);
    progress(0, total);
    let mut map = BTreeMap::new();
    let mut size = 0;
    for (name, units) in &files {
        let path = target.join(name);
        let mut file = Shard::create(&path, units)?;
        for unit in units {
            file.write(&mut source, unit, &mut |bytes| {
                done += bytes;
                progress(done, total);
            })?;
        }
        file.finish()?;
        for tensor in units.iter().flat_map(|unit| written(unit)) {
            size += tensor.bytes;
            map.insert(tensor.name, name);
        }
    }
    let index = json!({"metadata": {"total_size": size}, "weight_map": map});
    put(&target.join("model.safetensors.index.json"), |path| {
        std::fs::write(path, index.to_string())
    })
}

/// Units into shards that are no larger than `most`, unless one unit is.
fn split<'u, 'a>(units: Vec<&'u Unit<'a>>, most: u64) -> Vec<Vec<&'u Unit<'a>>> {
    let mut shards = vec![Vec::new()];
    let mut filled = 0;
    for unit in units {
        let size: u64 = written(unit).iter().map(|tensor| tensor.bytes).sum();
        if filled + size > most && filled > 0 {
            shards.push(Vec::new());
            filled = 0;
        }
        filled += size;
        if let Some(shard) = shards.last_mut() {
            shard.push(unit);
        }
    }
    shards
}

/// The tensors that a unit is written as.
fn written(unit: &Unit<'_>) -> Vec<Written> {
    let tensor = |end: &str, dtype: DType, shape: Vec<usize>| {
        let (dtype, size) = match dtype {
            DType::F16 => ("F16", 2),
            DType::BF16 => ("BF16", 2),
            DType::U32 => ("U32", 4),
            _ => ("F32", 4),
        };
        Written {
            name: format!("{}{end}", unit.name),
            dtype,
            bytes: shape.iter().product::<usize>() as u64 * size,
            shape,
        }
    };
    let shape = &unit.shape;
    match unit.form {
        Form::Kept(dtype) => vec![tensor("", dtype, shape.clone())],
        Form::OnePlus => vec![tensor("", DType::F32, shape.clone())],
        Form::Rounded(GroupFormat {
            bits, group, scales, ..
        }) => {
            let (lead, features) = match shape.split_last() {
                Some((features, lead)) => (lead, *features),
                None => (&[][..], 0),
            };
            let with = |last: usize| [lead, &[last]].concat();
            vec![
                tensor(".weight", DType::U32, with(features * bits / 32)),
                tensor(".scales", scales, with(features / group)),
                tensor(".biases", scales, with(features / group)),
            ]
        }
    }
}

/// A file of which the header is written, and the data as it comes.
struct Shard<'p> {
    path: &'p Path,
    file: File,
    /// Where the next bytes of each tensor go.
    places: BTreeMap<String, u64>,
}

impl<'p> Shard<'p> {
    fn create(path: &'p Path, units: &[&Unit<'_>]) -> Result<Self> {
        let mut tensors: Vec<Written> = units.iter().flat_map(|unit| written(unit)).collect();
        // Wide types first, so that each begins at a multiple of its size.
        tensors.sort_by_key(|tensor| !matches!(tensor.dtype, "U32" | "F32"));
        let mut header = serde_json::Map::new();
        header.insert("__metadata__".to_owned(), json!({"format": "mlx"}));
        let mut places = BTreeMap::new();
        let mut end = 0;
        for tensor in tensors {
            let start = end;
            end += tensor.bytes;
            header.insert(
                tensor.name.clone(),
                json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end]}),
            );
            places.insert(tensor.name, start);
        }
        let mut header = serde_json::Value::Object(header).to_string();
        header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
        let data = 8 + header.len() as u64;
        places.values_mut().for_each(|place| *place += data);
        let create = || {
            let mut file = File::create_new(path)?;
            file.set_len(data + end)?;
            file.write_all(&(header.len() as u64).to_le_bytes())?;
            file.write_all(header.as_bytes())?;
            Ok(file)
        };
        Ok(Self {
            path,
            file: create().map_err(|source| failed(path, source))?,
            places,
        })
    }

    fn write(&mut self, source: &mut Source<'_>, unit: &Unit<'_>, done: &mut dyn FnMut(u64)) -> Result<()> {
        for piece in &unit.pieces {
            match piece {
                Piece::Rows(tensor, rows) => {
                    for rows in steps(rows, bytes(tensor, &(0..1))) {
                        let read = source.folder.rows(tensor, rows.clone())?;
                        self.write_rows(unit, &read)
                            .map_err(|failure| self.told(source.folder, &tensor.name, &rows, failure))?;
                        done(bytes(tensor, &rows));
                    }
                }
                Piece::Whole(whole) => {
                    let stored = source.read(unit.mtp, whole)?;
                    for rows in steps(&whole.rows, (4 * whole.width()) as u64) {
                        self.write_stored(unit, whole, &stored, &rows)
                            .map_err(|failure| {
                                self.told(source.folder, &whole.tensor.name, &rows, failure)
                            })?;
                    }
                    done(piece.bytes());
                }
            }
        }
        Ok(())
    }

    fn told(&self, folder: &Folder, tensor: &str, rows: &Range<usize>, failure: Failure) -> Error {
        match failure {
            Failure::Write(source) => failed(self.path, source),
            Failure::Weights(error) => Error::Save {
                folder: folder.path().to_owned(),
                reason: format!("tensor {tensor}, rows {} to {}: {error}", rows.start, rows.end),
            },
        }
    }

    /// Writes some rows of what was read whole.
    fn write_stored(
        &mut self,
        unit: &Unit<'_>,
        whole: &Whole<'_>,
        stored: &Stored,
        rows: &Range<usize>,
    ) -> std::result::Result<(), Failure> {
        let some = match stored {
            Stored::Float(tensor) => {
                let flat = tensor.reshape(((), whole.width()))?;
                return self.write_rows(unit, &flat.narrow(0, rows.start, rows.len())?);
            }
            stored => stored.map_rows(|tensor| tensor.narrow(0, rows.start, rows.len())?.contiguous())?,
        };
        let Stored::Groups(groups) = some else {
            return Err(Failure::Weights(recant_core::Error::mismatch(
                "a stored matrix",
                "floats or groups",
                "another kind",
            )));
        };
        match unit.form {
            // It is what is asked for: rounding it again could change it.
            Form::Rounded(format) if is_in(&groups, format) => {
                let parts = [
                    (".weight", Some(&groups.quants)),
                    (".scales", Some(&groups.scales)),
                ];
                self.append_all(
                    unit,
                    parts.into_iter().chain([(".biases", groups.biases.as_ref())]),
                )
            }
            _ => {
                let weights = group_weights(groups).and_then(|weights| weights.dequantize());
                self.write_rows(unit, &weights.map_err(|error| Failure::Weights(error.into()))?)
            }
        }
    }

    fn write_rows(&mut self, unit: &Unit<'_>, rows: &Tensor) -> std::result::Result<(), Failure> {
        match unit.form {
            Form::Kept(dtype) => self.append(&unit.name, &rows.to_dtype(dtype)?),
            Form::OnePlus => self.append(&unit.name, &(rows.to_dtype(DType::F32)? + 1.0)?),
            Form::Rounded(format) => {
                let groups =
                    GroupWeights::quantize(rows, format).map_err(|error| Failure::Weights(error.into()))?;
                let biases = groups.biases().and_then(GroupScales::plain);
                let parts = [
                    (".weight", Some(groups.quants())),
                    (".scales", groups.scales().plain()),
                ];
                self.append_all(unit, parts.into_iter().chain([(".biases", biases)]))
            }
        }
    }

    /// Writes the parts of a matrix, by the ends of their names.
    fn append_all<'t>(
        &mut self,
        unit: &Unit<'_>,
        parts: impl Iterator<Item = (&'static str, Option<&'t Tensor>)>,
    ) -> std::result::Result<(), Failure> {
        for (end, part) in parts {
            if let Some(part) = part {
                self.append(&format!("{}{end}", unit.name), part)?;
            }
        }
        Ok(())
    }

    /// Writes bytes behind those that are there of the tensor.
    fn append(&mut self, name: &str, tensor: &Tensor) -> std::result::Result<(), Failure> {
        let bytes = tensor.data();
        if let Some(place) = self.places.get_mut(name) {
            self.file.seek(SeekFrom::Start(*place))?;
            self.file.write_all(&bytes)?;
            *place += bytes.len() as u64;
        }
        Ok(())
    }

    fn finish(self) -> Result<()> {
        self.file.sync_all().map_err(|source| failed(self.path, source))
    }
}

/// Cuts rows that have so many bytes each.
fn steps(rows: &Range<usize>, bytes: u64) -> impl Iterator<Item = Range<usize>> {
    let step = usize::try_from(CHUNK / bytes.max(1)).unwrap_or(usize::MAX).max(1);
    let end = rows.end;
    let starts = rows.clone().step_by(step);
    starts.map(move |start| start..end.min(start.saturating_add(step)))
}

/// Whether groups are stored in this format.
fn is_in(groups: &StoredGroups, format: GroupFormat) -> bool {
    let whole = Coding::Whole {
        bits: format.bits,
        zero: 0,
    };
    groups.coding == whole
        && groups.group == format.group
        && groups.scales.dtype() == format.scales
        && groups.biases.is_some()
}

/// Why rows were not written.
enum Failure {
    Write(std::io::Error),
    Weights(recant_core::Error),
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::Write(error)
    }
}

impl From<recant_core::candle::Error> for Failure {
    fn from(error: recant_core::candle::Error) -> Self {
        Self::Weights(error.into())
    }
}

fn failed(path: &Path, source: std::io::Error) -> Error {
    Error::Write {
        path: path.to_owned(),
        source,
    }
}
