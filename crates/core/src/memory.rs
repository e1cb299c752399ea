//! Where arrays lie in memory.

use candle_core::{CpuStorage, DType, Device, Shape, Storage, Tensor};

use crate::Result;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Zeros that begin with a cache line where kernels read them in wide vectors, on the CPU: one that lies in two lines takes two
/// loads, or two stores. Their storage is up to a line longer than they are.
pub(crate) fn zeros(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Tensor> {
    let shape = shape.into();
    if !device.is_cpu() || !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
        return Ok(Tensor::zeros(shape, dtype, device)?);
    }
    let elements = shape.elem_count();
    let line = LINE / dtype.size_in_bytes();
    let longer = Tensor::zeros(elements + line - 1, dtype, device)?;
    let skipped = match &*longer.storage_and_layout().0 {
        Storage::Cpu(storage) => to_line(storage).min(line - 1),
        _ => 0,
    };
    Ok(longer.narrow(0, skipped, elements)?.reshape(shape)?)
}

/// A copy that begins as [`zeros`] do.
pub(crate) fn copy(array: &Tensor, device: &Device) -> Result<Tensor> {
    let from = array.to_device(device)?.flatten_all()?;
    let to = zeros(from.shape(), array.dtype(), device)?;
    to.slice_set(&from, 0, 0)?;
    Ok(to.reshape(array.shape())?)
}

/// The array itself if it is all of its storage, but for what [`zeros`] may add, or else a copy. A view would keep all that it
/// was cut from alive, and every snapshot would copy that too.
///
/// Off the CPU the size of the storage is not known, so a view that starts where its storage does passes for whole.
pub(crate) fn owned(array: Tensor) -> Result<Tensor> {
    let whole = {
        let (storage, layout) = array.storage_and_layout();
        layout.is_contiguous()
            && match &*storage {
                Storage::Cpu(storage) => elements(storage)
                    .is_some_and(|all| (all - array.elem_count()) * array.dtype().size_in_bytes() < LINE),
                _ => layout.start_offset() == 0,
            }
    };
    Ok(if whole { array } else { array.force_contiguous()? })
}

/// Elements in a storage; `None` for types that no kernel writes.
fn elements(storage: &CpuStorage) -> Option<usize> {
    match storage {
        CpuStorage::U8(data) => Some(data.len()),
        CpuStorage::U32(data) => Some(data.len()),
        CpuStorage::I64(data) => Some(data.len()),
        CpuStorage::BF16(data) => Some(data.len()),
        CpuStorage::F16(data) => Some(data.len()),
        CpuStorage::F32(data) => Some(data.len()),
        CpuStorage::F64(data) => Some(data.len()),
        _ => None,
    }
}

/// Elements before the first that begins a cache line; none for types other than those of [`zeros`].
fn to_line(storage: &CpuStorage) -> usize {
    match storage {
        CpuStorage::BF16(data) => data.as_ptr().align_offset(LINE),
        CpuStorage::F16(data) => data.as_ptr().align_offset(LINE),
        CpuStorage::F32(data) => data.as_ptr().align_offset(LINE),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes from the last beginning of a line, and elements of the storage.
    fn place(tensor: &Tensor) -> (usize, usize) {
        let (storage, layout) = tensor.storage_and_layout();
        let Storage::Cpu(CpuStorage::F32(data)) = &*storage else {
            panic!("not f32 on the CPU");
        };
        let start = &data[layout.start_offset()..];
        (start.as_ptr() as usize % LINE, data.len())
    }

    #[test]
    fn zeros_and_copies_begin_with_a_line_and_are_owned() -> Result<()> {
        for elements in [1_usize, 15, 16, 17, 1000, 100_000] {
            let zeros = zeros((1, elements), DType::F32, &Device::Cpu)?;
            let from = Tensor::arange(0.0, elements as f32, &Device::Cpu)?.reshape((elements, 1))?;
            let copy = copy(&from, &Device::Cpu)?;
            assert_eq!(copy.dims(), [elements, 1]);
            let held = copy.flatten_all()?.to_vec1::<f32>()?;
            assert_eq!(held, from.flatten_all()?.to_vec1::<f32>()?);
            assert_eq!(zeros.flatten_all()?.to_vec1::<f32>()?, vec![0.0; elements]);
            for tensor in [zeros, copy] {
                assert_eq!(place(&tensor), (0, elements + 15));
                assert!(tensor.is_contiguous());
                assert_eq!(owned(tensor.clone())?.id(), tensor.id(), "it was copied");
            }
        }
        Ok(())
    }

    #[test]
    fn a_view_of_more_than_a_line_is_copied() -> Result<()> {
        let all = Tensor::arange(0_f32, 100.0, &Device::Cpu)?;
        for (start, len, kept) in [
            (0, 100, true),
            (5, 85, true),
            (0, 84, false),
            (16, 84, false),
            (40, 10, false),
        ] {
            let view = all.narrow(0, start, len)?;
            let owned = owned(view.clone())?;
            assert_eq!(owned.id() == view.id(), kept, "{len} from {start}");
            assert_eq!(owned.to_vec1::<f32>()?, view.to_vec1::<f32>()?);
            assert_eq!(place(&owned).1, if kept { 100 } else { len });
        }
        let columns = all.reshape((10, 10))?.narrow(1, 0, 9)?;
        let owned = owned(columns.clone())?;
        assert!(owned.is_contiguous());
        assert_eq!(owned.to_vec2::<f32>()?, columns.to_vec2::<f32>()?);
        Ok(())
    }
}
