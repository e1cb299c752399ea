//! A checkpoint's tensors, handed out once each.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};

use crate::error::{Error, Result};
use crate::folder::{Dtype, Folder, TensorInfo};
use crate::{names, Norms, Stored};

/// Hands out each tensor of a checkpoint once, under canonical names.
///
/// A canonical name is the name without the exporter's prefix: `embed_tokens.weight`, `layers.0.mlp.up_proj.weight`,
/// `norm.weight`, `lm_head.weight`. Accepted prefixes are `model.language_model.`, `model.` and
/// `language_model.model.`, and `lm_head.` or `language_model.lm_head.` for the head. Tensors of the vision tower
/// (`model.visual.`, `visual.`) and of the multi-token-prediction head (`mtp.`, also behind `model.`,
/// `language_model.` or `model.language_model.`) are counted and left alone.
#[derive(Debug)]
pub struct Weights<'a> {
    folder: &'a Folder,
    text: BTreeMap<&'a str, Slot<'a>>,
    norms: Norms,
    inventory: Inventory,
    bytes_total: u64,
    bytes_taken: u64,
}

#[derive(Debug)]
struct Slot<'a> {
    info: &'a TensorInfo,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Waiting,
    Taken,
    Discarded,
}

/// What became of a checkpoint's tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Inventory {
    /// Text tensors taken.
    pub taken: usize,
    /// Text tensors discarded as known and not wanted.
    pub discarded: usize,
    /// Tensors of the vision tower, left alone.
    pub vision: usize,
    /// Tensors of the multi-token-prediction head, left alone.
    pub mtp: usize,
}

impl<'a> Weights<'a> {
    pub(crate) fn new(folder: &'a Folder) -> Result<Self> {
        let sorted = names::sort(folder.path(), folder.tensors().map(|info| info.name.as_str()))?;
        let inventory = Inventory {
            vision: sorted.vision,
            mtp: sorted.mtp,
            ..Inventory::default()
        };
        Ok(Self::of(folder, &sorted.text, Norms::ZeroCentred, inventory))
    }

    /// `names`: canonical name to the name in the file, for the tensors to hand out.
    pub(crate) fn of(
        folder: &'a Folder,
        names: &BTreeMap<&'a str, &str>,
        norms: Norms,
        inventory: Inventory,
    ) -> Self {
        let infos: BTreeMap<&str, &TensorInfo> =
            folder.tensors().map(|info| (info.name.as_str(), info)).collect();
        let text: BTreeMap<&str, Slot<'_>> = names
            .iter()
            .map(|(&canonical, &name)| {
                let slot = Slot {
                    info: infos[name],
                    state: State::Waiting,
                };
                (canonical, slot)
            })
            .collect();
        Self {
            folder,
            bytes_total: text.values().map(|slot| slot.info.bytes()).sum(),
            bytes_taken: 0,
            text,
            norms,
            inventory,
        }
    }

    /// Whether the checkpoint has a text tensor of this canonical name, taken or not.
    pub fn has(&self, name: &str) -> bool {
        self.text.contains_key(name)
    }

    /// A text tensor on the CPU, in the dtype it is stored in: F32, BF16 or F16.
    ///
    /// Its bytes are copied out of the file, so the tensor outlives the [`Folder`].
    ///
    /// # Shapes
    ///
    /// The result has exactly the `shape` asked for.
    ///
    /// # Errors
    ///
    /// A tensor that is missing, of another shape, of another dtype, or already taken or discarded. Nothing is taken
    /// then.
    pub fn take(&mut self, name: &str, shape: &[usize]) -> Result<Tensor> {
        let slot = self.text.get_mut(name).ok_or_else(|| Error::MissingTensor {
            folder: self.folder.path().to_owned(),
            tensor: name.to_owned(),
            expected: shape.to_vec(),
        })?;
        let info = slot.info;
        if slot.state != State::Waiting {
            return Err(Error::TakenTwice {
                tensor: name.to_owned(),
            });
        }
        if info.shape != shape {
            return Err(Error::Shape {
                tensor: info.name.clone(),
                file: info.file.clone(),
                expected: shape.to_vec(),
                found: info.shape.clone(),
            });
        }
        let dtype = match &info.dtype {
            Dtype::F32 => DType::F32,
            Dtype::BF16 => DType::BF16,
            Dtype::F16 => DType::F16,
            Dtype::Other(found) => {
                return Err(Error::Dtype {
                    tensor: info.name.clone(),
                    file: info.file.clone(),
                    found: found.clone(),
                })
            }
        };
        let tensor = Tensor::from_raw_buffer(self.folder.data(info), dtype, shape, &Device::Cpu).map_err(
            |source| Error::Tensor {
                tensor: info.name.clone(),
                source: source.into(),
            },
        )?;
        slot.state = State::Taken;
        self.inventory.taken += 1;
        self.bytes_taken += info.bytes();
        Ok(tensor)
    }

    /// A matrix `[out, in]`.
    ///
    /// # Errors
    ///
    /// As [`take`](Self::take).
    pub fn take_matrix(&mut self, name: &str, shape: [usize; 2]) -> Result<Stored> {
        Ok(Stored::Float(self.take(name, &shape)?))
    }

    /// The matrices `[out, in]` of a stack `[count, out, in]`, in order.
    ///
    /// # Errors
    ///
    /// As [`take_matrix`](Self::take_matrix).
    pub fn take_stack(&mut self, name: &str, shape: [usize; 3]) -> Result<Vec<Stored>> {
        Stored::Float(self.take(name, &shape)?).unstacked(name)
    }

    /// How the checkpoint stores norms, told by its layout.
    pub fn norms(&self) -> Norms {
        self.norms
    }

    /// Takes the norms to be stored otherwise than the layout tells: to find out whether a checkpoint is what it seems.
    pub fn with_norms(self, norms: Norms) -> Self {
        Self { norms, ..self }
    }

    /// Sets a text tensor aside as known and not wanted, such as the copy of the embedding that some tied checkpoints
    /// carry as `lm_head.weight`. Does nothing where there is no such tensor or it was taken.
    pub fn discard(&mut self, name: &str) {
        if let Some(slot) = self.text.get_mut(name) {
            if slot.state == State::Waiting {
                slot.state = State::Discarded;
                self.inventory.discarded += 1;
                self.bytes_taken += slot.info.bytes();
            }
        }
    }

    /// Bytes of all text tensors, for a progress bar.
    pub fn bytes_total(&self) -> u64 {
        self.bytes_total
    }

    /// Bytes of the text tensors taken or discarded so far: [`bytes_total`](Self::bytes_total) once all are.
    pub fn bytes_taken(&self) -> u64 {
        self.bytes_taken
    }

    /// Ends the loading of a model.
    ///
    /// # Errors
    ///
    /// [`Error::Unused`] where a text tensor was neither taken nor discarded.
    pub fn finish(self) -> Result<Inventory> {
        let left: Vec<String> = self
            .text
            .values()
            .filter(|slot| slot.state == State::Waiting)
            .map(|slot| slot.info.name.clone())
            .collect();
        if left.is_empty() {
            Ok(self.inventory)
        } else {
            Err(Error::Unused {
                folder: self.folder.path().to_owned(),
                tensors: left,
            })
        }
    }
}
