//! The header of one safetensors file.

use std::ops::Range;
use std::path::Path;

use safetensors::tensor::Metadata;
use serde::de::IgnoredAny;

use crate::error::{Error, Result};
use crate::unique::UniqueMap;

/// Bytes of the length field at the start of a file.
const PREFIX: usize = 8;
/// Longest header read, in bytes: the limit of the format.
const MAX_HEADER: u64 = 100_000_000;

/// One tensor of a file. `bytes` is checked to lie within the file and to have the length that dtype and shape ask for.
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) dtype: safetensors::Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Range<usize>,
}

/// Parses and checks the header of the safetensors file that `data` is.
///
/// The format's parser checks each tensor: offsets in order, without gap or overlap, of the length that dtype and
/// shape ask for. Lengths are compared with the file's here and not by that parser, whose sum of them overflows on a
/// header that promises close to 2^64 bytes, and whose message says neither length.
pub(crate) fn parse(file: &Path, data: &[u8]) -> Result<Vec<Entry>> {
    let Some((prefix, rest)) = data.split_first_chunk::<PREFIX>() else {
        return Err(Error::header(
            file,
            format!("expected at least {PREFIX} bytes, found {}", data.len()),
        ));
    };
    let promised = u64::from_le_bytes(*prefix);
    if promised > MAX_HEADER {
        return Err(Error::header(
            file,
            format!("its header should have {promised} bytes, expected at most {MAX_HEADER}"),
        ));
    }
    let header = usize::try_from(promised)
        .ok()
        .and_then(|length| rest.get(..length))
        .ok_or_else(|| {
            Error::header(
                file,
                format!(
                    "its header should have {promised} bytes, but only {} follow",
                    rest.len()
                ),
            )
        })?;

    serde_json::from_slice::<UniqueMap<IgnoredAny>>(header).map_err(|error| Error::header(file, error))?;
    let metadata: Metadata = serde_json::from_slice(header).map_err(|error| Error::header(file, error))?;

    let found = rest.len() - header.len();
    if metadata.data_len() != found {
        let hint = if metadata.data_len() > found {
            "cut short"
        } else {
            "too long"
        };
        return Err(Error::header(
            file,
            format!(
                "its header describes {} bytes of data, found {found}: the file is {hint}",
                metadata.data_len()
            ),
        ));
    }

    let start = PREFIX + header.len();
    Ok(metadata
        .tensors()
        .into_iter()
        .map(|(name, info)| Entry {
            name,
            dtype: info.dtype,
            shape: info.shape.clone(),
            bytes: start + info.data_offsets.0..start + info.data_offsets.1,
        })
        .collect())
}
