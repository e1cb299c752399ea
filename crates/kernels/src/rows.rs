//! RMS norm and gated activation, row by row.

use candle_core::{DType, Tensor};

use crate::pool::{self, Shared};
use crate::simd::{self, Kernel, Simd, LANES};
use crate::tensors::{tensor, Op};
use crate::{composed, Backend, Result};

/// `x / sqrt(mean(x^2) + eps) * weight`, the weight as it is: for a zero-centred one add the 1 at load.
///
/// # Shapes
/// `x`: `[rows, d]`, f32. `weight`: `[d]`, f32. Result: `[rows, d]`, f32.
///
/// # Errors
/// Another shape, type or device, or not contiguous.
pub fn rms_norm(backend: Backend, x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    const OP: Op = Op("rms_norm");
    let width = match *weight.dims() {
        [width] if width > 0 => width,
        _ => return Err(OP.shape_error("weight", weight, "[d] with d > 0".to_owned())),
    };
    let rows = OP.rows("x", x, width)?;
    OP.dtype("x", x, DType::F32)?;
    OP.dtype("weight", weight, DType::F32)?;
    if backend == Backend::Composed {
        return composed::rms_norm(x, weight, eps);
    }
    let (x, weight) = (OP.hold("x", x)?, OP.hold("weight", weight)?);
    let (x, weight) = (x.f32()?, weight.f32()?);
    let mut y = vec![0.0; x.len()];
    let shared = Shared::new(&mut y);
    let isa = simd::isa();
    pool::for_each(rows, 4 * x.len(), &|row| {
        let range = row * width..(row + 1) * width;
        let x = &x[range.clone()];
        // SAFETY: one task a row, and rows do not overlap.
        let y = unsafe { shared.part(range) };
        let eps = eps as f32;
        simd::run(isa, RmsNorm { x, weight, eps, y });
    });
    tensor(y, &[rows, width])
}

/// `a + b`: a layer's result to the residual stream.
///
/// # Shapes
/// `a`, `b`: `[rows, d]`, f32. Result: the same.
///
/// # Errors
/// Another shape, type or device, or not contiguous.
pub fn add(backend: Backend, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    const OP: Op = Op("add");
    OP.shape("b", b, a.dims())?;
    OP.dtype("a", a, DType::F32)?;
    OP.dtype("b", b, DType::F32)?;
    if backend == Backend::Composed {
        return Ok((a + b)?);
    }
    let (left, right) = (OP.hold("a", a)?, OP.hold("b", b)?);
    let (left, right) = (left.f32()?, right.f32()?);
    /// Elements of a task.
    const CHUNK: usize = 16 * 1024;
    let mut y = vec![0.0; left.len()];
    let shared = Shared::new(&mut y);
    pool::for_each(left.len().div_ceil(CHUNK), left.len(), &|task| {
        let range = task * CHUNK..left.len().min((task + 1) * CHUNK);
        // SAFETY: one task a chunk, and chunks do not overlap.
        let y = unsafe { shared.part(range.clone()) };
        for ((y, a), b) in y.iter_mut().zip(&left[range.clone()]).zip(&right[range]) {
            *y = a + b;
        }
    });
    tensor(y, a.dims())
}

/// `silu(first half) * second half`
///
/// # Shapes
/// `gate_up`: `[rows, 2 * w]`, f32. Result: `[rows, w]`, f32.
///
/// # Errors
/// Another shape, type or device, or not contiguous.
pub fn swiglu(backend: Backend, gate_up: &Tensor) -> Result<Tensor> {
    const OP: Op = Op("swiglu");
    let (rows, width) = match *gate_up.dims() {
        [rows, both] if both > 0 && both % 2 == 0 => (rows, both / 2),
        _ => return Err(OP.shape_error("gate_up", gate_up, "[rows, 2 * w] with w > 0".to_owned())),
    };
    OP.dtype("gate_up", gate_up, DType::F32)?;
    if backend == Backend::Composed {
        return composed::swiglu(gate_up);
    }
    let held = OP.hold("gate_up", gate_up)?;
    let x = held.f32()?;
    /// Columns of a task.
    const CHUNK: usize = 1024;
    let mut y = vec![0.0; rows * width];
    let work = 16 * y.len();
    let shared = Shared::new(&mut y);
    let isa = simd::isa();
    let chunks = width.div_ceil(CHUNK);
    pool::for_each(rows * chunks, work, &|task| {
        let (row, start) = (task / chunks, task % chunks * CHUNK);
        let columns = start..width.min(start + CHUNK);
        let (gate, up) = x[2 * row * width..2 * (row + 1) * width].split_at(width);
        let (gate, up) = (&gate[columns.clone()], &up[columns.clone()]);
        // SAFETY: one task for these columns of this row.
        let y = unsafe { shared.part(row * width + columns.start..row * width + columns.end) };
        simd::run(isa, SwiGlu { gate, up, y });
    });
    tensor(y, &[rows, width])
}

/// One row of [`rms_norm`].
pub(crate) struct RmsNorm<'a> {
    pub(crate) x: &'a [f32],
    pub(crate) weight: &'a [f32],
    pub(crate) eps: f32,
    pub(crate) y: &'a mut [f32],
}

impl Kernel for RmsNorm<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mean = simd::sum_of_squares(s, self.x) / self.x.len() as f32;
        let scale = s.splat(1.0 / (mean + self.eps).sqrt());
        let (x8, x_tail) = self.x.as_chunks::<LANES>();
        let (w8, w_tail) = self.weight.as_chunks::<LANES>();
        let (y8, y_tail) = self.y.as_chunks_mut::<LANES>();
        for ((x, w), y) in x8.iter().zip(w8).zip(y8) {
            s.store(s.mul(s.mul(s.load(x), scale), s.load(w)), y);
        }
        if !x_tail.is_empty() {
            s.store_part(
                s.mul(s.mul(s.load_part(x_tail), scale), s.load_part(w_tail)),
                y_tail,
            );
        }
    }
}

struct SwiGlu<'a> {
    gate: &'a [f32],
    up: &'a [f32],
    y: &'a mut [f32],
}

impl Kernel for SwiGlu<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (g8, g_tail) = self.gate.as_chunks::<LANES>();
        let (u8, u_tail) = self.up.as_chunks::<LANES>();
        let (y8, y_tail) = self.y.as_chunks_mut::<LANES>();
        for ((g, u), y) in g8.iter().zip(u8).zip(y8) {
            s.store(s.mul(simd::silu(s, s.load(g)), s.load(u)), y);
        }
        if !g_tail.is_empty() {
            s.store_part(
                s.mul(simd::silu(s, s.load_part(g_tail)), s.load_part(u_tail)),
                y_tail,
            );
        }
    }
}
