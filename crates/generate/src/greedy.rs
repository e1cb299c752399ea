//! The greedy rule: the largest logit, the lowest id among equals.

use recant_core::candle::{DType, Storage, Tensor};

use crate::{Error, Result};

/// Index of the largest value. Equal values go to the lowest index; NaN is never chosen. `None` if all are NaN or there
/// are none.
pub fn argmax(values: &[f32]) -> Option<u32> {
    let max = values
        .iter()
        .fold(f32::NEG_INFINITY, |max, &v| if v > max { v } else { max });
    // With a maximum of minus infinity this finds the first that is not NaN.
    values.iter().position(|&v| v == max).map(|i| i as u32)
}

/// The greedy choice for each row of `logits`, among the first `vocab` ids.
///
/// # Shapes
/// `logits`: `[rows, vocab_size]`. `position` is that of the first row's choice, for messages.
///
/// # Errors
/// A row without a number, or logits of another number of dimensions.
pub fn choose(logits: &Tensor, vocab: usize, position: usize) -> Result<Vec<u32>> {
    let (rows, width) = logits.dims2()?;
    let vocab = vocab.min(width);
    let pick = |data: &[f32]| -> Result<Vec<u32>> {
        data.chunks_exact(width)
            .take(rows)
            .enumerate()
            .map(|(i, row)| {
                argmax(&row[..vocab]).ok_or(Error::NoNumber {
                    position: position + i,
                })
            })
            .collect()
    };
    {
        let (storage, layout) = logits.storage_and_layout();
        if let (Storage::Cpu(storage), Some((start, end))) = (&*storage, layout.contiguous_offsets()) {
            if logits.dtype() == DType::F32 {
                return pick(&storage.as_slice::<f32>()?[start..end]);
            }
        }
    }
    pick(&logits.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c087_equal_maxima_go_to_the_lowest_id() {
        let mut row = vec![0.0; 16];
        row[3] = 2.5;
        row[9] = 2.5;
        assert_eq!(argmax(&row), Some(3));
    }

    #[test]
    fn c086_nan_is_never_chosen_and_infinities_are_values() {
        assert_eq!(argmax(&[f32::NAN, 1.0, 2.0]), Some(2));
        assert_eq!(argmax(&[1.0, f32::NAN, 0.5]), Some(0));
        assert_eq!(argmax(&[f32::NAN, f32::NEG_INFINITY]), Some(1));
        assert_eq!(argmax(&[0.0, f32::INFINITY, f32::NAN]), Some(1));
        assert_eq!(argmax(&[f32::NAN, f32::NAN]), None);
        assert_eq!(argmax(&[]), None);
    }

    #[test]
    fn padding_rows_of_the_head_are_never_chosen() -> Result<()> {
        let logits = Tensor::new(
            &[[0.0f32, 3.0, 9.0], [4.0, 3.0, 9.0]],
            &recant_core::candle::Device::Cpu,
        )?;
        assert_eq!(choose(&logits, 2, 0)?, [1, 0]);
        Ok(())
    }

    #[test]
    fn a_row_without_a_number_is_an_error_that_names_the_position() -> Result<()> {
        let logits = Tensor::new(
            &[[0.0f32, 3.0], [f32::NAN, f32::NAN]],
            &recant_core::candle::Device::Cpu,
        )?;
        let error = choose(&logits, 2, 40).err().map(|e| e.to_string());
        assert!(error.is_some_and(|e| e.contains("position 41")));
        Ok(())
    }
}
