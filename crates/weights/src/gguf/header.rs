//! The header of one GGUF file, read without trusting a number in it.
//!
//! Every count is compared with the bytes that are left before anything is kept of it, so that what is allocated is bounded
//! by the size of the file. Arrays stay where they are: a header holds their place, and [`Array`] reads them there.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;

use super::types::GgmlType;
use crate::error::{clipped, Error, Result};

const MAGIC: &[u8; 4] = b"GGUF";
/// Multiple that tensor data starts at where the file names none.
const ALIGNMENT: u64 = 32;
/// Largest alignment that is believed.
const MAX_ALIGNMENT: u64 = 1 << 20;
const MAX_DIMS: u32 = 4;
/// Arrays within arrays. Files in use have none.
const MAX_DEPTH: usize = 4;
/// Bytes of the smallest metadata entry: an empty key, a type, a byte.
const LEAST_ENTRY: u64 = 8 + 4 + 1;
/// Bytes of the smallest tensor entry: an empty name, the number of dimensions, a type, an offset.
const LEAST_TENSOR: u64 = 8 + 4 + 4 + 8;

/// What kind of value the metadata holds under a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Text,
    Array,
    U64,
    I64,
    F64,
}

impl Kind {
    fn of(number: u32) -> Option<Self> {
        const KINDS: [Kind; 13] = [
            Kind::U8,
            Kind::I8,
            Kind::U16,
            Kind::I16,
            Kind::U32,
            Kind::I32,
            Kind::F32,
            Kind::Bool,
            Kind::Text,
            Kind::Array,
            Kind::U64,
            Kind::I64,
            Kind::F64,
        ];
        KINDS.get(usize::try_from(number).ok()?).copied()
    }

    /// Bytes of a value, where they are always as many.
    fn size(self) -> Option<usize> {
        Some(match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 => 8,
            Self::Text | Self::Array => return None,
        })
    }

    /// Bytes of the smallest value.
    fn least(self) -> u64 {
        match self {
            Self::Text => 8,
            Self::Array => 4 + 8,
            _ => self.size().unwrap_or(1) as u64,
        }
    }
}

/// A value of the metadata.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    Unsigned(u64),
    Signed(i64),
    /// An f32, as the shortest decimal number that gives it: 1e-6, not 9.99999997e-7.
    Float(f64),
    Bool(bool),
    Text(String),
    Array(Array),
}

/// Where an array lies in its file. Its elements were checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Array {
    pub(super) kind: Kind,
    pub(super) count: usize,
    bytes: Range<usize>,
}

impl Array {
    /// The elements of an array of texts, in the bytes of its file. Empty for other kinds.
    pub(super) fn texts<'a>(&self, file: &'a [u8]) -> impl Iterator<Item = &'a str> {
        let count = if self.kind == Kind::Text { self.count } else { 0 };
        let mut reader = Reader {
            bytes: &file[self.bytes.clone()],
            at: 0,
        };
        (0..count).map_while(move |_| reader.text().ok())
    }

    /// The elements of an array of whole numbers or truth values. Empty for other kinds.
    pub(super) fn numbers<'a>(&self, file: &'a [u8]) -> impl Iterator<Item = i64> + 'a {
        let kind = self.kind;
        let mut reader = Reader {
            bytes: &file[self.bytes.clone()],
            at: 0,
        };
        (0..self.count).map_while(move |_| match reader.scalar(kind).ok()? {
            Value::Unsigned(x) => i64::try_from(x).ok(),
            Value::Signed(x) => Some(x),
            Value::Bool(x) => Some(x.into()),
            _ => None,
        })
    }
}

/// One tensor of a file. `bytes` was checked to lie in the file and to have the length that type and shape ask for.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) kind: GgmlType,
    /// Outermost first, the reverse of the order in the file.
    pub(super) shape: Vec<usize>,
    pub(super) bytes: Range<usize>,
}

/// A file's metadata and tensors.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) metadata: BTreeMap<String, Value>,
    pub(super) tensors: Vec<Entry>,
}

/// Parses and checks the header of the GGUF file that `data` is: versions 2 and 3, little-endian.
pub(super) fn parse(file: &Path, data: &[u8]) -> Result<Header> {
    parse_bytes(data).map_err(|reason| Error::gguf(file, reason))
}

type Parsed<T> = std::result::Result<T, String>;

fn parse_bytes(data: &[u8]) -> Parsed<Header> {
    let mut reader = Reader { bytes: data, at: 0 };
    let magic = reader.take(4, "the magic bytes")?;
    if magic != MAGIC {
        return Err(format!("it begins with {magic:?}, expected \"GGUF\""));
    }
    match reader.u32()? {
        2 | 3 => {}
        version if version.swap_bytes() < 16 => {
            return Err("it is big-endian; expected a little-endian file: convert the model again".to_owned())
        }
        version => return Err(format!("it is of version {version}; expected 2 or 3")),
    }
    let tensor_count = reader.u64()?;
    let entry_count = reader.u64()?;
    reader.enough_for("metadata entries", entry_count, LEAST_ENTRY)?;
    reader.enough_for("tensors", tensor_count, LEAST_TENSOR)?;

    let mut metadata = BTreeMap::new();
    for _ in 0..entry_count {
        let key = reader.text()?.to_owned();
        let value = reader
            .value()
            .map_err(|reason| format!("metadata key {}: {reason}", clipped(&key)))?;
        if metadata.contains_key(&key) {
            return Err(format!("metadata key {} occurs twice", clipped(&key)));
        }
        metadata.insert(key, value);
    }

    let mut places = Vec::new();
    let mut names = BTreeSet::new();
    for _ in 0..tensor_count {
        let name = reader.text()?;
        let place = reader
            .place()
            .map_err(|reason| format!("tensor {}: {reason}", clipped(name)))?;
        if !names.insert(name) {
            return Err(format!("tensor {} occurs twice", clipped(name)));
        }
        places.push((name, place));
    }

    let alignment = alignment(&metadata)?;
    // Where the data begins. A file without tensors may end before that.
    let start = (reader.at as u64).next_multiple_of(alignment);
    let mut tensors = Vec::with_capacity(places.len());
    for (name, place) in places {
        let named = |reason: String| format!("tensor {}: {reason}", clipped(name));
        if place.offset % alignment != 0 {
            return Err(named(format!(
                "its data should begin {} bytes after the header, which is no multiple of {alignment}",
                place.offset
            )));
        }
        let first = start.checked_add(place.offset);
        let end = first.and_then(|first| first.checked_add(place.size));
        match (first, end) {
            (Some(first), Some(end)) if end <= data.len() as u64 => tensors.push(Entry {
                name: name.to_owned(),
                kind: place.kind,
                shape: place.shape,
                // Both are at most the file's length, which is a usize.
                bytes: first as usize..end as usize,
            }),
            _ => {
                return Err(named(format!(
                    "its {} bytes of data should begin {} bytes after the header, but only {} bytes follow that: the file \
                     is cut short",
                    place.size,
                    place.offset,
                    (data.len() as u64).saturating_sub(start)
                )))
            }
        }
    }
    check_overlaps(&tensors)?;
    Ok(Header { metadata, tensors })
}

fn alignment(metadata: &BTreeMap<String, Value>) -> Parsed<u64> {
    match metadata.get("general.alignment") {
        None => Ok(ALIGNMENT),
        Some(Value::Unsigned(found)) if found.is_power_of_two() && *found <= MAX_ALIGNMENT => Ok(*found),
        Some(Value::Unsigned(found)) => Err(format!(
            "general.alignment is {found}; expected a power of two of at most {MAX_ALIGNMENT}"
        )),
        Some(_) => Err("general.alignment is no whole number".to_owned()),
    }
}

fn check_overlaps(tensors: &[Entry]) -> Parsed<()> {
    let mut sorted: Vec<&Entry> = tensors.iter().collect();
    sorted.sort_by_key(|tensor| (tensor.bytes.start, tensor.bytes.end));
    for pair in sorted.windows(2) {
        if pair[0].bytes.end > pair[1].bytes.start {
            return Err(format!(
                "tensors {} and {} overlap",
                clipped(&pair[0].name),
                clipped(&pair[1].name)
            ));
        }
    }
    Ok(())
}

/// What a tensor entry says of where its data is.
struct Place {
    kind: GgmlType,
    shape: Vec<usize>,
    size: u64,
    offset: u64,
}

/// Reads on in a file. What it cannot read is an error that says where.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn left(&self) -> u64 {
        (self.bytes.len() - self.at) as u64
    }

    /// Refuses a count of which even the smallest would not fit into the rest of the file.
    fn enough_for(&self, what: &str, count: u64, least: u64) -> Parsed<()> {
        match count.checked_mul(least) {
            Some(bytes) if bytes <= self.left() => Ok(()),
            _ => Err(format!(
                "its header promises {count} {what}, but only {} bytes follow",
                self.left()
            )),
        }
    }

    fn take(&mut self, count: u64, what: &str) -> Parsed<&'a [u8]> {
        let rest = &self.bytes[self.at..];
        let taken = usize::try_from(count)
            .ok()
            .and_then(|count| rest.get(..count))
            .ok_or_else(|| {
                format!(
                    "{what} should have {count} bytes at byte {}, but only {} follow: the file is cut short",
                    self.at,
                    rest.len()
                )
            })?;
        self.at += taken.len();
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Parsed<[u8; N]> {
        let mut bytes = [0; N];
        bytes.copy_from_slice(self.take(N as u64, "a number")?);
        Ok(bytes)
    }

    fn u32(&mut self) -> Parsed<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Parsed<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn text(&mut self) -> Parsed<&'a str> {
        let length = self.u64()?;
        let bytes = self.take(length, "a text")?;
        std::str::from_utf8(bytes)
            .map_err(|error| format!("a text before byte {} is no UTF-8: {error}", self.at))
    }

    fn kind(&mut self) -> Parsed<Kind> {
        let number = self.u32()?;
        Kind::of(number).ok_or_else(|| format!("its value is of kind {number}, expected 0 to 12"))
    }

    fn value(&mut self) -> Parsed<Value> {
        let kind = self.kind()?;
        match kind {
            Kind::Text => Ok(Value::Text(self.text()?.to_owned())),
            Kind::Array => Ok(Value::Array(self.elements(1)?)),
            _ => self.scalar(kind),
        }
    }

    fn scalar(&mut self, kind: Kind) -> Parsed<Value> {
        Ok(match kind {
            Kind::U8 => Value::Unsigned(self.array::<1>()?[0].into()),
            Kind::I8 => Value::Signed(i8::from_le_bytes(self.array()?).into()),
            Kind::U16 => Value::Unsigned(u16::from_le_bytes(self.array()?).into()),
            Kind::I16 => Value::Signed(i16::from_le_bytes(self.array()?).into()),
            Kind::U32 => Value::Unsigned(self.u32()?.into()),
            Kind::I32 => Value::Signed(i32::from_le_bytes(self.array()?).into()),
            Kind::F32 => Value::Float(decimal(f32::from_le_bytes(self.array()?))),
            Kind::Bool => match self.array::<1>()?[0] {
                0 => Value::Bool(false),
                1 => Value::Bool(true),
                other => return Err(format!("a truth value is {other}, expected 0 or 1")),
            },
            Kind::U64 => Value::Unsigned(self.u64()?),
            Kind::I64 => Value::Signed(i64::from_le_bytes(self.array()?)),
            Kind::F64 => Value::Float(f64::from_le_bytes(self.array()?)),
            Kind::Text | Kind::Array => return Err("a number was expected".to_owned()),
        })
    }

    /// Passes over an array, checking every element.
    fn elements(&mut self, depth: usize) -> Parsed<Array> {
        let kind = self.kind()?;
        let count = self.u64()?;
        self.enough_for("elements of an array", count, kind.least())?;
        let start = self.at;
        match kind {
            Kind::Text => {
                for _ in 0..count {
                    self.text()?;
                }
            }
            Kind::Array if depth == MAX_DEPTH => {
                return Err(format!("arrays lie within arrays deeper than {MAX_DEPTH}"))
            }
            Kind::Array => {
                for _ in 0..count {
                    self.elements(depth + 1)?;
                }
            }
            Kind::Bool => {
                if let Some(other) = self.take(count, "an array")?.iter().find(|byte| **byte > 1) {
                    return Err(format!("a truth value is {other}, expected 0 or 1"));
                }
            }
            _ => {
                self.take(count * kind.least(), "an array")?;
            }
        }
        Ok(Array {
            kind,
            // As many bytes were there at least.
            count: count as usize,
            bytes: start..self.at,
        })
    }

    fn place(&mut self) -> Parsed<Place> {
        let dims = self.u32()?;
        if dims == 0 || dims > MAX_DIMS {
            return Err(format!("it has {dims} dimensions, expected 1 to {MAX_DIMS}"));
        }
        let mut shape = Vec::new();
        let mut elements = 1_u64;
        for _ in 0..dims {
            let size = self.u64()?;
            elements = elements
                .checked_mul(size)
                .filter(|elements| *elements > 0)
                .ok_or_else(|| "it has no elements, or more than 2^64".to_owned())?;
            shape.push(usize::try_from(size).map_err(|_| format!("a dimension is {size}"))?);
        }
        let number = self.u32()?;
        let kind = GgmlType::of(number).ok_or_else(|| {
            format!(
                "it is of type {number}, which is not known here; use a file of another type of quantization"
            )
        })?;
        let width = shape[0];
        shape.reverse();
        if width % kind.block() != 0 {
            return Err(format!(
                "its rows have {width} elements, expected a multiple of {} for {kind}",
                kind.block()
            ));
        }
        let size = (elements / kind.block() as u64)
            .checked_mul(kind.bytes() as u64)
            .ok_or_else(|| format!("its {elements} elements take more than 2^64 bytes"))?;
        Ok(Place {
            kind,
            shape,
            size,
            offset: self.u64()?,
        })
    }
}

/// The number that was written, before it became an f32: the shortest decimal that gives the same f32.
fn decimal(x: f32) -> f64 {
    x.to_string().parse().unwrap_or(f64::from(x))
}
