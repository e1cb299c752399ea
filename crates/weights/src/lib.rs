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
//! Tensors in F32, BF16 or F16, named as Hugging Face names them; releases with matrices in FP8 or NVFP4; and conversions by MLX,
//! whose norms hold 1 + w and whose matrices may be quantized ([`Stored`]). Other quantized checkpoints are refused by the name of
//! their format, never misread.
//!
//! A matrix of a release is read by its type and the tensors beside it. Bytes a weight:
//!
//! | release | handed out as | in the file | here |
//! |---|---|---|---|
//! | FP8 (E4M3) in blocks of 128 x 128 | E4M3 bytes, as they are; their scales for each row | 1.00 | 1.02, or 1.03 with f32 scales |
//! | FP8 (E4M3) by row, or of one scale | E4M3 bytes and scales, as they are | 1.00 | 1.00 |
//! | NVFP4 of ModelOpt or compressed-tensors | 4-bit codes, as they are, with a table; f32 scales | 0.56 | 0.75 |
//!
//! A scale of NVFP4 is a product or quotient of two, rounded to f32; nothing else is rounded. A matrix that kernels cannot read so
//! (rows that are no multiple of 32, blocks that are none of 16) is handed out in f32, each weight rounded once.
//!
//! Nothing that MLX packed is rounded again. Bytes a weight, with 16-bit scales and biases, groups of 64 for affine:
//!
//! | MLX | handed out as | in the file | here |
//! |---|---|---|---|
//! | affine, 2 or 3 bits | 4-bit groups | 0.31, 0.44 | 0.56 |
//! | affine, 4 bits | 4-bit groups, as they are | 0.56 | 0.56 |
//! | affine, 5 or 6 bits | 8-bit groups | 0.69, 0.81 | 1.06 |
//! | affine, 8 bits | 8-bit groups, as they are | 1.06 | 1.06 |
//! | mxfp4 | 4-bit codes, as they are, with a table: twice their numbers are whole | 0.53 | 0.56 |
//! | nvfp4 | likewise, in groups of 16 | 0.56 | 0.63, or 0.75 with a global scale |
//! | mxfp8 | E4M3 bytes, as they are | 1.03 | 1.06 |
//!
//! A [`Folder`] is also a model in GGUF as llama.cpp's converter writes it for `qwen35`, `qwen35moe` and `qwen3next`, in one file
//! or in parts: [`Folder::config`] is the configuration that the same model has on the Hub, tensors have the same names and
//! their value heads the same order, and [`Folder::vocabulary`] is its tokenizer. Blocks are taken apart into groups without
//! rounding, so that a weight is bit for bit what the type's definition gives in f32. Bytes a weight:
//!
//! | GGUF | handed out as | in the file | here |
//! |---|---|---|---|
//! | F32, F16, BF16 | as they are | 4, 2, 2 | 4, 2, 2 |
//! | Q8_0 | 8-bit groups of 32, f16 scales | 1.06 | 1.06 |
//! | Q4_0, Q4_1 | 4-bit groups of 32, f16 scales | 0.56, 0.63 | 0.56, 0.63 |
//! | Q5_0, Q5_1 | 8-bit groups of 32, f16 scales | 0.69, 0.75 | 1.06, 1.13 |
//! | Q4_K | 4-bit groups of 32, scales and biases of two levels | 0.56 | 0.58 |
//! | Q5_K | 8-bit groups of 32, scales and biases of two levels | 0.69 | 1.08 |
//! | Q6_K | 8-bit groups of 16, scales of two levels | 0.82 | 1.07 |
//! | Q3_K | 4-bit groups of 16, scales of two levels | 0.43 | 0.57 |
//! | Q2_K | 4-bit groups of 16, scales and biases of two levels | 0.33 | 0.64 |
//! | IQ4_NL | 4-bit codes with a table in groups of 32, f16 scales | 0.56 | 0.56 |
//! | IQ4_XS | 4-bit codes with a table in groups of 32, scales of two levels | 0.53 | 0.54 |
//! | MXFP4 | 4-bit codes with a table in groups of 32, bf16 scales | 0.53 | 0.56 |
//!
//! Scales of two levels are whole numbers in bytes and a factor in f16 that a block shares, or of a block that lies across heads
//! whose order is changed, the columns of a head.
//!
//! Other types are refused by name before any tensor is read.
//!
//! # Memory mapping
//!
//! Weight files are mapped, not read, and stay mapped while the [`Folder`] lives. **A weight file must not be changed
//! or cut short while a folder is open**: tensors taken later would hold the changed bytes, and reading past the new
//! end of a file kills the process. Replacing a file by renaming another over it is safe.
//!
//! Pages of a tensor that was taken are let go at once, so that they do not stand as memory of the process.
#![deny(unsafe_code)]

mod describe;
mod error;
mod folder;
mod format;
mod gguf;
mod header;
mod hub_quant;
mod index;
mod mapping;
mod mlx;
mod mtp;
mod names;
mod place;
mod source;
mod stored;
mod unique;
mod weights;

pub use describe::Described;
pub use error::{Error, Result};
pub use folder::{Dtype, Folder, TensorInfo};
pub use gguf::{Cutting, TokenKind, Vocabulary};
pub use place::Part;
pub use source::{Norms, Source};
pub use stored::{Coding, Factors, Stored, StoredGroups};
pub use weights::{Inventory, Weights};
