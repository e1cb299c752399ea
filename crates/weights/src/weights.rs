//! A checkpoint's tensors, handed out once each.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};

use crate::error::{Error, Result};
use crate::folder::{Dtype, Folder, Slice, TensorInfo};
use crate::hub_quant::{self, Declared};
use crate::{format, mlx, names, Norms, Stored};

/// Hands out each tensor of a checkpoint once, under canonical names.
///
/// A canonical name is the name without the exporter's prefix: `embed_tokens.weight`, `layers.0.mlp.up_proj.weight`,
/// `norm.weight`, `lm_head.weight`. Accepted prefixes are `model.language_model.`, `model.` and
/// `language_model.model.`, and `lm_head.` or `language_model.lm_head.` for the head. Tensors of the vision tower
/// (`visual.` or `vision_tower.`, also behind `model.`) and of the multi-token-prediction head (`mtp.`, also behind `model.`,
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
    /// So many matrices of a stack are taken.
    Partly(usize),
    Taken,
    Discarded,
}

impl State {
    /// Refuses what is taken already, and a slice of a tensor that is not the next one.
    fn check(self, name: &str, slice: Option<Slice>) -> Result<()> {
        let next = match (self, slice) {
            (Self::Waiting, None) => true,
            (Self::Waiting, Some(slice)) => slice.index == 0 && slice.count > 0,
            (Self::Partly(taken), Some(slice)) => slice.index == taken,
            _ => false,
        };
        if next {
            return Ok(());
        }
        Err(Error::TakenTwice {
            tensor: name.to_owned(),
        })
    }

    /// That of a tensor of which this was taken.
    fn after(slice: Option<Slice>) -> Self {
        match slice {
            Some(Slice { index, count }) if index + 1 < count => Self::Partly(index + 1),
            _ => Self::Taken,
        }
    }
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
        if let Some(gguf) = folder.gguf() {
            let inventory = Inventory {
                mtp: gguf.names(true).len(),
                ..Inventory::default()
            };
            return Ok(Self::of(folder, &gguf.names(false), Norms::OnePlus, inventory));
        }
        let sorted = names::sort(folder.path(), folder.tensors().map(|info| info.name.as_str()))?;
        let inventory = Inventory {
            vision: sorted.vision,
            mtp: sorted.mtp,
            ..Inventory::default()
        };
        let norms = format::norms(folder.path(), folder.tensors())?;
        Ok(Self::of(folder, &sorted.text, norms, inventory))
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
        let mut weights = Self {
            folder,
            bytes_total: text.values().map(|slot| slot.info.bytes()).sum(),
            bytes_taken: 0,
            text,
            norms,
            inventory,
        };
        let unused: Vec<&str> = weights
            .text
            .keys()
            .copied()
            .filter(|name| names::is_cache_scale(name))
            .collect();
        for name in unused {
            weights.set(name, State::Discarded);
        }
        weights
    }

    /// Whether the checkpoint has a text tensor of this canonical name, taken or not. A matrix has that of its unquantized form,
    /// however its parts are called.
    pub fn has(&self, name: &str) -> bool {
        self.slot_of(name).is_some()
    }

    /// The tensor that holds the numbers of what has this canonical name.
    fn slot_of(&self, name: &str) -> Option<&Slot<'a>> {
        let packed = || self.text.get(hub_quant::packed_name(name)?.as_str());
        self.text.get(name).or_else(packed)
    }

    /// The tensors that are handed out, the parts of quantized matrices each on its own: canonical names and what headers say,
    /// in name order.
    pub fn tensors(&self) -> impl Iterator<Item = (&'a str, &'a TensorInfo)> + '_ {
        self.text.iter().map(|(name, slot)| (*name, slot.info))
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
        self.take_with(name, shape, None, |folder, info| match folder.gguf() {
            Some(gguf) => gguf.floats(info, folder.data(info), name, shape),
            None => floats(folder, info, shape, None),
        })
    }

    /// A matrix `[out, in]`.
    ///
    /// # Errors
    ///
    /// As [`take`](Self::take).
    pub fn take_matrix(&mut self, name: &str, shape: [usize; 2]) -> Result<Stored> {
        if let Some(packed) = self.take_packed(name, &shape, None)? {
            return Ok(packed);
        }
        if let Some(scaled) = self.take_scaled(name, shape)? {
            return Ok(scaled);
        }
        self.take_with(name, &shape, None, |folder, info| match folder.gguf() {
            Some(gguf) => gguf.matrix(info, folder.data(info), name, shape),
            None => floats(folder, info, &shape, None).map(Stored::Float),
        })
    }

    /// Matrix `[out, in]` number `index` of a stack `[count, out, in]`. They are taken in order, each once, and the stack is
    /// taken when the last one is.
    ///
    /// # Errors
    ///
    /// As [`take_matrix`](Self::take_matrix), or a matrix out of order.
    pub fn take_stacked(&mut self, name: &str, shape: [usize; 3], index: usize) -> Result<Stored> {
        let slice = Some(Slice {
            index,
            count: shape[0],
        });
        if let Some(packed) = self.take_packed(name, &shape, slice)? {
            return Ok(packed);
        }
        self.take_with(name, &shape, slice, |folder, info| match folder.gguf() {
            Some(gguf) => gguf.stacked(info, folder.slice(info, slice), name, shape),
            None => floats(folder, info, &shape, slice).map(Stored::Float),
        })
    }

    /// Takes all parts of what MLX quantized, if that is how it is stored. Nothing is taken where that fails.
    fn take_packed(&mut self, name: &str, shape: &[usize], slice: Option<Slice>) -> Result<Option<Stored>> {
        let Some(path) = name.strip_suffix(".weight") else {
            return Ok(None);
        };
        let Some(parts) = mlx::Parts::find(path, |name| Some(self.text.get(name)?.info))? else {
            return Ok(None);
        };
        self.text[name].state.check(name, slice)?;
        let folder = self.folder;
        // The configuration names modules as the file does.
        let module = parts.weight.name.strip_suffix(".weight").unwrap_or(name);
        let entry = mlx::entry(folder.path(), folder.config(), module)?;
        let stored = parts.read(shape, slice.is_some(), entry, |part| folder.slice(part, slice))?;
        for part in parts.all() {
            folder.release(part, slice);
        }
        match State::after(slice) {
            State::Taken => self.set(name, State::Taken),
            partly => {
                if let Some(slot) = self.text.get_mut(name) {
                    slot.state = partly;
                }
            }
        }
        Ok(Some(stored))
    }

    /// Takes all parts of a matrix in FP8 or NVFP4, if that is how it is stored. Nothing is taken where that fails.
    fn take_scaled(&mut self, name: &str, shape: [usize; 2]) -> Result<Option<Stored>> {
        let Some(path) = name.strip_suffix(".weight") else {
            return Ok(None);
        };
        let Some(parts) = hub_quant::Parts::find(path, |name| Some(self.text.get(name)?.info))? else {
            return Ok(None);
        };
        if self.slot_of(name).is_none_or(|slot| slot.state != State::Waiting) {
            return Err(Error::TakenTwice {
                tensor: name.to_owned(),
            });
        }
        let folder = self.folder;
        let declared = Declared::of(folder.path(), folder.config())?;
        let stored = parts.read(shape, declared.as_ref(), |part| folder.data(part))?;
        folder.release(parts.weight, None);
        self.set(name, State::Taken);
        Ok(Some(stored))
    }

    /// Notes what became of a tensor and, if it is a quantized matrix, of its companions.
    fn set(&mut self, name: &str, state: State) {
        let companions = name.strip_suffix(".weight").into_iter().flat_map(|path| {
            mlx::COMPANIONS
                .iter()
                .chain(&hub_quant::COMPANIONS)
                .map(move |companion| format!("{path}{companion}"))
        });
        for name in companions.chain([name.to_owned()]) {
            let Some(slot) = self.text.get_mut(name.as_str()) else {
                continue;
            };
            if matches!(slot.state, State::Taken | State::Discarded) {
                continue;
            }
            slot.state = state;
            self.bytes_taken += slot.info.bytes();
            match state {
                State::Discarded => self.inventory.discarded += 1,
                _ => self.inventory.taken += 1,
            }
        }
    }

    /// Takes a tensor or a slice of it, as what `read` gives. Nothing is taken where that fails.
    fn take_with<T>(
        &mut self,
        name: &str,
        shape: &[usize],
        slice: Option<Slice>,
        read: impl FnOnce(&Folder, &TensorInfo) -> Result<T>,
    ) -> Result<T> {
        let slot = self.text.get_mut(name).ok_or_else(|| Error::MissingTensor {
            folder: self.folder.path().to_owned(),
            tensor: name.to_owned(),
            expected: shape.to_vec(),
        })?;
        slot.state.check(name, slice)?;
        let taken = read(self.folder, slot.info)?;
        self.folder.release(slot.info, slice);
        slot.state = State::after(slice);
        if slot.state == State::Taken {
            self.inventory.taken += 1;
            self.bytes_taken += slot.info.bytes();
        }
        Ok(taken)
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
        self.set(name, State::Discarded);
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
            .filter(|slot| matches!(slot.state, State::Waiting | State::Partly(_)))
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

/// A tensor of floats in safetensors that has this shape, or a slice of it.
fn floats(folder: &Folder, info: &TensorInfo, shape: &[usize], slice: Option<Slice>) -> Result<Tensor> {
    // MLX has the taps of a convolution in the middle. One of both dimensions is 1, so the order of the numbers is the same.
    let moved = matches!((&info.shape[..], shape), ([a, b, 1], [c, 1, d]) if a == c && b == d);
    if info.shape != shape && !moved {
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
    let shape = &shape[usize::from(slice.is_some())..];
    Tensor::from_raw_buffer(folder.slice(info, slice), dtype, shape, &Device::Cpu).map_err(|source| {
        Error::Tensor {
            tensor: info.name.clone(),
            source: source.into(),
        }
    })
}
