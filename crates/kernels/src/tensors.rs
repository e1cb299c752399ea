//! Tensors at the border: checked on the way in, made on the way out.

use candle_core::{DType, Device, Storage, StorageRef, Tensor, WithDType};

use crate::{Backend, Error, Result};

/// A tensor's elements, held for reading.
pub(crate) struct Held<'t> {
    storage: StorageRef<'t>,
    start: usize,
    len: usize,
}

impl Held<'_> {
    /// The elements in logical order. The type must be the one that the tensor was checked for.
    pub(crate) fn slice<T: WithDType>(&self) -> Result<&[T]> {
        match &*self.storage {
            Storage::Cpu(storage) => Ok(&storage.as_slice::<T>()?[self.start..self.start + self.len]),
            // `hold` took CPU tensors only.
            _ => Ok(&[]),
        }
    }

    pub(crate) fn f32(&self) -> Result<&[f32]> {
        self.slice()
    }

    /// Where the storage begins: equal for tensors that share it.
    pub(crate) fn address(&self) -> usize {
        match &*self.storage {
            Storage::Cpu(storage) => address_of(storage),
            _ => 0,
        }
    }
}

fn address_of(storage: &candle_core::CpuStorage) -> usize {
    use candle_core::CpuStorage as S;
    match storage {
        S::F32(x) => x.as_ptr() as usize,
        S::F16(x) => x.as_ptr() as usize,
        S::BF16(x) => x.as_ptr() as usize,
        _ => 0,
    }
}

/// Names the operation in errors about its operands.
#[derive(Clone, Copy)]
pub(crate) struct Op(pub(crate) &'static str);

impl Op {
    /// Refuses another shape.
    pub(crate) fn shape(self, operand: &'static str, tensor: &Tensor, expected: &[usize]) -> Result<()> {
        if tensor.dims() == expected {
            return Ok(());
        }
        Err(self.shape_error(operand, tensor, format!("{expected:?}")))
    }

    pub(crate) fn shape_error(self, operand: &'static str, tensor: &Tensor, expected: String) -> Error {
        Error::Shape {
            op: self.0,
            operand,
            expected,
            found: tensor.dims().to_vec(),
        }
    }

    /// Rows of a matrix whose rows have `width` elements.
    pub(crate) fn rows(self, operand: &'static str, tensor: &Tensor, width: usize) -> Result<usize> {
        match *tensor.dims() {
            [rows, w] if w == width => Ok(rows),
            _ => Err(self.shape_error(operand, tensor, format!("[rows, {width}]"))),
        }
    }

    /// Refuses another type.
    pub(crate) fn dtype(self, operand: &'static str, tensor: &Tensor, expected: DType) -> Result<()> {
        if tensor.dtype() == expected {
            return Ok(());
        }
        Err(Error::DType {
            op: self.0,
            operand,
            expected: expected.as_str(),
            found: tensor.dtype(),
        })
    }

    /// Refuses a type that weights and cached rows do not come in.
    pub(crate) fn float(self, operand: &'static str, tensor: &Tensor) -> Result<()> {
        match tensor.dtype() {
            DType::F32 | DType::BF16 | DType::F16 => Ok(()),
            found => Err(Error::DType {
                op: self.0,
                operand,
                expected: "f32, bf16 or f16",
                found,
            }),
        }
    }

    /// Refuses what a kernel cannot read as a slice.
    pub(crate) fn readable(self, operand: &'static str, tensor: &Tensor) -> Result<()> {
        if !tensor.device().is_cpu() {
            return Err(Error::Device {
                op: self.0,
                operand,
                found: format!("{:?}", tensor.device().location()),
            });
        }
        if !tensor.is_contiguous() {
            return Err(Error::Strided { op: self.0, operand });
        }
        Ok(())
    }

    /// Holds the elements of a contiguous CPU tensor of any float type.
    pub(crate) fn hold<'t>(self, operand: &'static str, tensor: &'t Tensor) -> Result<Held<'t>> {
        self.float(operand, tensor)?;
        self.readable(operand, tensor)?;
        Ok(held(tensor))
    }

    /// Holds the elements of a contiguous CPU tensor of bytes.
    pub(crate) fn hold_bytes<'t>(self, operand: &'static str, tensor: &'t Tensor) -> Result<Held<'t>> {
        self.dtype(operand, tensor, DType::U8)?;
        self.readable(operand, tensor)?;
        Ok(held(tensor))
    }

    /// Holds the elements of a contiguous f32 CPU tensor.
    pub(crate) fn hold_f32<'t>(self, operand: &'static str, tensor: &'t Tensor) -> Result<Held<'t>> {
        self.dtype(operand, tensor, DType::F32)?;
        self.hold(operand, tensor)
    }

    pub(crate) fn value(self, what: impl Into<String>) -> Error {
        Error::Value {
            op: self.0,
            what: what.into(),
        }
    }

    /// A weight as f32, on the device it is on, contiguous. A CPU backend takes CPU tensors only.
    pub(crate) fn weight(self, backend: Backend, operand: &'static str, tensor: &Tensor) -> Result<Tensor> {
        self.float(operand, tensor)?;
        if backend == Backend::Cpu {
            self.readable(operand, &tensor.contiguous()?)?;
        }
        Ok(tensor.to_dtype(DType::F32)?.contiguous()?)
    }
}

fn held(tensor: &Tensor) -> Held<'_> {
    let (storage, layout) = tensor.storage_and_layout();
    Held {
        storage,
        start: layout.start_offset(),
        len: tensor.elem_count(),
    }
}

/// A CPU tensor of a kernel's results.
pub(crate) fn tensor(values: Vec<f32>, shape: &[usize]) -> Result<Tensor> {
    Ok(Tensor::from_vec(values, shape, &Device::Cpu)?)
}
