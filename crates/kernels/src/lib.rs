//! Row-invariant CPU kernels for hybrid language models, and the same operations composed of candle ops.
//!
//! # The grouping law
//! With [`Backend::Cpu`], what an operation computes for a row depends on that row and on what it reads of its own
//! sequence; never on how many rows are in the call, which other sequences are, or how many threads run it. Equality is
//! of bits. Each output is accumulated in one fixed order, and work is split over outputs only.
//!
//! # Threads
//! Operations use the current rayon pool, the caller included. Install a pool of the size you want around a whole
//! forward pass; a pool of one thread runs everything on it. Between operations that follow each other closely the
//! pool's threads look out for the next one, for 50 microseconds at most, then they are the pool's again. No thread is
//! pinned to a core.
//!
//! # Instruction sets
//! The best set that the machine has is found at run time: on x86-64 AVX-512 with VNNI, or AVX2 with FMA and F16C; on AArch64
//! NEON with its dot products; anywhere else portable code. All give the same bits. NEON was run under emulation only,
//! and never timed. Divisions and roots are exact ones, never estimates.
//!
//! # Example
//! ```
//! use candle_core::{Device, Tensor};
//! use recant_kernels::{Backend, Linear};
//!
//! let weight = Tensor::new(&[[1.0_f32, 2.0], [3.0, 4.0], [5.0, 6.0]], &Device::Cpu)?;
//! let linear = Linear::new(Backend::Cpu, &[weight], None)?;
//! let rows = Tensor::new(&[[1.0_f32, 1.0], [0.0, 1.0]], &Device::Cpu)?;
//! assert_eq!(linear.forward(&rows)?.to_vec2::<f32>()?, [[3.0, 7.0, 11.0], [2.0, 4.0, 6.0]]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

// What tests share names the crate as tests do.
#[cfg(test)]
extern crate self as recant_kernels;

mod attention;
#[cfg(test)]
#[path = "../tests/common/mod.rs"]
mod common;
mod composed;
mod error;
mod gated_delta;
#[cfg(test)]
#[path = "../tests/common/kinds.rs"]
mod kinds;
mod limits;
mod linear;
mod mlp;
mod moe;
#[cfg(test)]
mod oracle;
mod pool;
mod rotary;
mod rows;
mod simd;
mod tensors;

pub use attention::{attention, attention_inputs, AttentionInputs, AttentionSegment, AttentionShape};
pub use error::{Error, Result};
pub use gated_delta::{DeltaAdvance, DeltaOutput, DeltaSegment, GatedDelta, GatedDeltaShape};
pub use limits::{limits, Limits, Reader};
pub use linear::{ActivationPrecision, Coding, GroupFormat, GroupScales, GroupWeights, Linear, Weight};
pub use mlp::Mlp;
pub use moe::{add_gated, route, MoeShape, Routes, SparseExperts};
pub use rotary::{Rotary, RotaryTable};
pub use rows::{add, rms_norm, swiglu};

/// What runs an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// This crate's own kernels, on CPU tensors. They keep the grouping law.
    Cpu,
    /// candle ops, on any device: what the kernels are held against. They do **not** promise the grouping law, since
    /// candle picks its matrix multiplication by the number of rows.
    Composed,
}
