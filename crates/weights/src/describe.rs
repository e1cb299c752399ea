//! How many numbers a tensor stands for, and in what form: told from headers, of any checkpoint.

use crate::folder::{Dtype, Folder, TensorInfo};
use crate::hub_quant::{self, Declared};
use crate::mlx::{self, Entry};
use crate::names;

/// What stands beside a quantized weight in a format that is not read.
const ZEROS: &str = ".qzeros";

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
        if let Some(scaled) = self.scaled(tensor) {
            return scaled;
        }
        let mut companions = mlx::COMPANIONS
            .iter()
            .chain(&hub_quant::COMPANIONS)
            .chain([&ZEROS]);
        if companions.any(|end| tensor.name.ends_with(end)) || names::is_cache_scale(&tensor.name) {
            return plain(0);
        }
        self.packed(tensor).unwrap_or_else(|| plain(elements))
    }

    /// The numbers of a matrix in FP8 or NVFP4.
    fn scaled(&self, tensor: &TensorInfo) -> Option<Described> {
        let path = hub_quant::path_of(tensor)?;
        let parts = hub_quant::Parts::find(path, |name| self.tensor(name)).ok()??;
        if parts.weight.name != tensor.name {
            return None;
        }
        let declared = Declared::of(self.path(), self.config()).ok()?;
        let [rows, columns] = parts.shape().ok()?;
        Some(Described {
            format: parts.check(declared.as_ref()).ok()?.to_string(),
            parameters: (rows as u64).saturating_mul(columns as u64),
        })
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
