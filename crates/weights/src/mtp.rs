//! The weights of a multi-token-prediction head, inside a checkpoint or in a folder of its own.

use std::collections::BTreeSet;

use crate::error::Result;
use crate::folder::{Folder, TensorInfo};
use crate::weights::{Inventory, Weights};
use crate::{format, names, Norms};

impl Folder {
    /// The tensors of a multi-token-prediction head, if there are any: those behind `mtp.` in a checkpoint, or all of a
    /// folder that holds nothing else (model type `qwen3_5_mtp`). Canonical names have no prefix: `fc.weight`.
    ///
    /// How norms are stored follows from the layout: without a prefix they are converted, behind `mtp.` they are stored as
    /// those of the language model in the same checkpoint, and where there is none as in the original.
    ///
    /// # Errors
    ///
    /// As [`weights`](Self::weights).
    pub fn mtp(&self) -> Result<Option<Weights<'_>>> {
        if let Some(gguf) = self.gguf() {
            let head = gguf.names(true);
            if head.is_empty() {
                return Ok(None);
            }
            let names: BTreeSet<&str> = head.values().copied().collect();
            gguf.check(self.tensors().filter(|t| names.contains(t.name.as_str())))?;
            return Ok(Some(Weights::of(
                self,
                &head,
                Norms::OnePlus,
                Inventory::default(),
            )));
        }
        let inside = names::mtp(self.path(), self.tensors().map(|t| t.name.as_str()))?;
        let (head, norms) = if inside.is_empty() && self.is_mtp_alone() {
            let all = self.tensors().map(|t| (t.name.as_str(), t.name.as_str()));
            (all.collect(), Norms::OnePlus)
        } else {
            (inside, format::norms(self.path(), self.tensors())?)
        };
        if head.is_empty() {
            return Ok(None);
        }
        let names: BTreeSet<&str> = head.values().copied().collect();
        let tensors: Vec<&TensorInfo> = self
            .tensors()
            .filter(|t| names.contains(t.name.as_str()))
            .collect();
        format::check_mtp(self.path(), self.config(), &tensors)?;
        Ok(Some(Weights::of(self, &head, norms, Inventory::default())))
    }

    /// Whether the folder holds a multi-token-prediction head and no model.
    pub fn is_mtp_alone(&self) -> bool {
        self.config()["model_type"] == "qwen3_5_mtp"
    }
}
