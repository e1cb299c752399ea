//! How many numbers a tensor stands for, and in what form: told from headers, of any checkpoint.

use crate::folder::{Dtype, Folder, TensorInfo};
use crate::mlx::{self, Entry};

/// Ends of the names of tensors that belong to a quantized weight beside them.
const COMPANIONS: [&str; 9] = [
    ".scales",
    ".biases",
    ".global_scale",
    ".weight_scale",
    ".weight_scale_2",
    ".weight_scale_inv",
    ".weight_global_scale",
    ".input_scale",
    ".qzeros",
];

/// What a tensor holds.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Described {
    /// The type of its numbers: `BF16`, `Q4_K`, or `affine of 4 bits in groups of 64`.
    pub format: String,
    /// How many numbers it stands for: of one that is packed, those that are packed in it, as far as its format is known. 0 of
    /// scales and other companions of a quantized weight.
    pub parameters: u64,
}

impl Folder {
    /// What a tensor of this folder holds. It refuses nothing.
    pub fn describe(&self, tensor: &TensorInfo) -> Described {
        let elements = tensor
            .shape
            .iter()
            .fold(1_u64, |n, size| n.saturating_mul(*size as u64));
        let plain = |parameters| Described {
            format: tensor.dtype.to_string(),
            parameters,
        };
        if COMPANIONS.iter().any(|end| tensor.name.ends_with(end)) {
            return plain(0);
        }
        self.packed(tensor).unwrap_or_else(|| plain(elements))
    }

    /// What MLX packed.
    fn packed(&self, tensor: &TensorInfo) -> Option<Described> {
        if tensor.dtype != Dtype::Other("U32".to_owned()) {
            return None;
        }
        let path = tensor.name.strip_suffix(".weight")?;
        let parts = mlx::Parts::find(path, |name| self.tensor(name)).ok()??;
        parts.check().ok()?;
        let said = [path, ""].into_iter().find_map(|path| {
            let entry = match path {
                "" => mlx::global(self.path(), self.config()),
                path => mlx::entry(self.path(), self.config(), path),
            };
            match entry.ok()?? {
                Entry::Packed(packing) if parts.can_be(packing) => Some(packing),
                _ => None,
            }
        });
        let packing = said.or_else(|| parts.possible().next())?;
        let groups = parts
            .scales
            .shape
            .iter()
            .fold(1_u64, |n, size| n.saturating_mul(*size as u64));
        Some(Described {
            format: packing.to_string(),
            parameters: groups.saturating_mul(packing.group as u64),
        })
    }
}
