//! Checkpoint folders as named weights, read strictly.
//!
//! A [`Folder`] is a model as the Hugging Face Hub lays it out: `config.json`, one `model.safetensors` or shards with
//! an index, and the tokenizer's files. Opening it parses and checks every header and reads no tensor data.
//! [`Folder::weights`] then hands out each tensor once under a name that does not depend on who exported the
//! checkpoint, and [`Weights::finish`] refuses a checkpoint of which some part was not used: a model with a weight
//! that was never set, or a tensor that nobody asked for, is an error with a name in it.
//!
//! ```no_run
//! # fn main() -> recant_weights::Result<()> {
//! let folder = recant_weights::Folder::open("Qwen3.5-0.8B")?;
//! let mut weights = folder.weights()?;
//! let embedding = weights.take("embed_tokens.weight", &[248_320, 1024])?;
//! // ... every other tensor ...
//! let inventory = weights.finish()?;
//! println!("{} tensors of the vision tower were left alone", inventory.vision);
//! # Ok(())
//! # }
//! ```
//!
//! # What is read
//!
//! Tensors in F32, BF16 or F16, named as Hugging Face names them, with zero-centred norms. Quantized checkpoints and
//! MLX conversions are refused by the name of their format, never misread.
//!
//! # Memory mapping
//!
//! Weight files are mapped, not read, and stay mapped while the [`Folder`] lives. **A weight file must not be changed
//! or cut short while a folder is open**: tensors taken later would hold the changed bytes, and reading past the new
//! end of a file kills the process. Replacing a file by renaming another over it is safe.
#![deny(unsafe_code)]

mod error;
mod folder;
mod format;
mod gguf;
mod header;
mod index;
mod mapping;
mod mlx;
mod mtp;
mod names;
mod source;
mod stored;
mod unique;
mod weights;

pub use error::{Error, Result};
pub use folder::{Dtype, Folder, TensorInfo};
pub use gguf::{Cutting, TokenKind, Vocabulary};
pub use source::{Norms, Source};
pub use stored::{Stored, StoredGroups};
pub use weights::{Inventory, Weights};
