//! Where a checkpoint's tensors belong, and their rows.

use std::collections::BTreeMap;
use std::ops::Range;

use candle_core::{DType, Device, Tensor};

use crate::error::{Error, Result};
use crate::folder::{Dtype, Folder, TensorInfo};
use crate::names::{self, Name};

/// What a tensor of a checkpoint is part of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Part<'a> {
    /// The language model and its output head: its canonical name.
    Text(&'a str),
    /// The multi-token-prediction head: its canonical name.
    Mtp(&'a str),
    /// The vision tower.
    Vision,
    /// Nothing that is known. [`Folder::weights`] refuses such a checkpoint.
    Unknown,
}

impl Folder {
    /// Every tensor of the checkpoint with its place, in name order. It refuses nothing.
    pub fn placed(&self) -> Vec<(&TensorInfo, Part<'_>)> {
        let Some(gguf) = self.gguf() else {
            let alone = self.is_mtp_alone();
            return self
                .tensors()
                .map(|tensor| (tensor, place(&tensor.name, alone)))
                .collect();
        };
        let inverse = |head| -> BTreeMap<&str, &str> {
            let names = gguf.names(head).into_iter();
            names.map(|(canonical, name)| (name, canonical)).collect()
        };
        let (text, head) = (inverse(false), inverse(true));
        let place = |name| match (text.get(name), head.get(name)) {
            (Some(canonical), _) => Part::Text(canonical),
            (None, Some(canonical)) => Part::Mtp(canonical),
            (None, None) => Part::Unknown,
        };
        self.tensors()
            .map(|tensor| (tensor, place(tensor.name.as_str())))
            .collect()
    }

    /// The tensor of a name, if there is one.
    pub(crate) fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        let tensors = self.in_name_order();
        let place = tensors.binary_search_by(|tensor| tensor.name.as_str().cmp(name));
        Some(&tensors[place.ok()?])
    }

    /// Some rows of a tensor of floats, where all its dimensions but the last one count as one.
    ///
    /// # Shapes
    /// `[rows, last dimension]`, in the type they are stored in, on the CPU.
    ///
    /// # Errors
    /// A tensor of another type than F32, BF16 or F16, or fewer rows than asked for.
    pub fn rows(&self, tensor: &TensorInfo, rows: Range<usize>) -> Result<Tensor> {
        let dtype = match &tensor.dtype {
            Dtype::F32 => DType::F32,
            Dtype::BF16 => DType::BF16,
            Dtype::F16 => DType::F16,
            Dtype::Other(found) => {
                return Err(Error::Dtype {
                    tensor: tensor.name.clone(),
                    file: tensor.file.clone(),
                    found: found.clone(),
                })
            }
        };
        let width = tensor.shape.last().copied().unwrap_or(1);
        let shape = (rows.len(), width);
        // Products of a shape that was read are those of bytes in a file, and cannot overflow.
        let row = width * dtype.size_in_bytes();
        let bytes = rows.end.checked_mul(row).and_then(|end| {
            let bytes = self.data(tensor);
            bytes.get(rows.start.min(rows.end) * row..end)
        });
        let bytes = bytes.ok_or_else(|| Error::Shape {
            tensor: tensor.name.clone(),
            file: tensor.file.clone(),
            expected: vec![rows.end, width],
            found: tensor.shape.clone(),
        })?;
        let rows = Tensor::from_raw_buffer(bytes, dtype, &[shape.0, shape.1], &Device::Cpu);
        self.release(tensor, None);
        rows.map_err(|source| Error::Tensor {
            tensor: tensor.name.clone(),
            source: source.into(),
        })
    }
}

fn place(name: &str, mtp_alone: bool) -> Part<'_> {
    match names::classify(name) {
        _ if mtp_alone => Part::Mtp(names::without_mtp(name).unwrap_or(name)),
        Name::Text { canonical, .. } | Name::Head { canonical } => Part::Text(canonical),
        Name::Mtp => Part::Mtp(names::without_mtp(name).unwrap_or(name)),
        Name::Vision => Part::Vision,
        Name::Unknown => Part::Unknown,
    }
}
