//! The largest logits of a row.

use candle_core::{DType, Storage, Tensor};

/// A token and its logit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// Index of the logit in its row: the token's id, unless the head is a reduced one.
    pub id: u32,
    /// The logit.
    pub logit: f32,
}

impl Candidate {
    /// A free place in a list of candidates, which any number takes.
    pub const NONE: Self = Self {
        id: u32::MAX,
        logit: f32::NEG_INFINITY,
    };

    /// Whether this is a free place.
    pub fn is_none(self) -> bool {
        self.id == u32::MAX
    }

    /// Puts it in its place in a list, largest first, if it has one there. Among equals those that came first stay in
    /// front; NaN has no place.
    pub fn enter(self, best: &mut [Self]) {
        let beats = |other: &Self| self.logit > other.logit || other.is_none();
        if self.logit.is_nan() || self.is_none() || !best.last().is_some_and(beats) {
            return;
        }
        if let Some(place) = best.iter().position(beats) {
            best[place..].rotate_right(1);
            best[place] = self;
        }
    }

    /// Enters logits, whose ids begin at `first`, into a list. If ids come in ascending order, equals stay in it.
    pub fn enter_all(best: &mut [Self], first: u32, logits: &[f32]) {
        let Some(last) = best.last() else { return };
        // Without a branch an element, since nearly all are too small.
        let least = last.logit;
        if !last.is_none() && !logits.iter().fold(false, |any, x| any | (*x > least)) {
            return;
        }
        if let [_] = best {
            let largest = greatest(logits);
            if let Some((id, logit)) = (first..).zip(logits).find(|(_, logit)| **logit == largest) {
                Self { id, logit: *logit }.enter(best);
            }
            return;
        }
        for (id, logit) in (first..).zip(logits) {
            Self { id, logit: *logit }.enter(best);
        }
    }
}

/// The greatest of some numbers, minus infinity if there is none.
fn greatest(x: &[f32]) -> f32 {
    let max = |a: f32, b: f32| if b > a { b } else { a };
    let (lanes, rest) = x.as_chunks::<8>();
    let mut most = [f32::NEG_INFINITY; 8];
    for x in lanes {
        for (most, x) in most.iter_mut().zip(x) {
            *most = max(*most, *x);
        }
    }
    most.iter().chain(rest).copied().fold(f32::NEG_INFINITY, max)
}

/// For each row the `count` largest of its first `among` logits, largest first, the lowest id first among equals. NaN is none
/// of them; so a row may have fewer.
///
/// # Shapes
/// `logits`: `[rows, vocab_size]`, any float type.
///
/// # Errors
/// Another number of dimensions.
pub fn largest(logits: &Tensor, count: usize, among: usize) -> candle_core::Result<Vec<Vec<Candidate>>> {
    let (_, width) = logits.dims2()?;
    let among = among.min(width);
    let pick = |data: &[f32]| {
        let rows = data.chunks_exact(width.max(1));
        rows.map(|row| {
            let mut best = vec![Candidate::NONE; count.min(among)];
            Candidate::enter_all(&mut best, 0, &row[..among]);
            best.retain(|candidate| !candidate.is_none());
            best
        })
        .collect()
    };
    {
        let (storage, layout) = logits.storage_and_layout();
        if let (Storage::Cpu(storage), Some((start, end))) = (&*storage, layout.contiguous_offsets()) {
            if logits.dtype() == DType::F32 {
                return Ok(pick(&storage.as_slice::<f32>()?[start..end]));
            }
        }
    }
    Ok(pick(
        &logits.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(row: &[f32], count: usize, among: usize) -> Vec<u32> {
        let logits = Tensor::from_slice(row, (1, row.len()), &candle_core::Device::Cpu).expect("a row");
        let found = largest(&logits, count, among).expect("candidates");
        found[0].iter().map(|candidate| candidate.id).collect()
    }

    #[test]
    fn c087_equal_maxima_go_to_the_lowest_id() {
        let mut row = vec![0.0; 16];
        row[3] = 2.5;
        row[9] = 2.5;
        assert_eq!(ids(&row, 1, 16), [3]);
        assert_eq!(ids(&row, 4, 16), [3, 9, 0, 1]);
    }

    #[test]
    fn c086_nan_is_never_chosen_and_infinities_are_values() {
        assert_eq!(ids(&[f32::NAN, 1.0, 2.0], 1, 3), [2]);
        assert_eq!(ids(&[1.0, f32::NAN, 0.5], 1, 3), [0]);
        assert_eq!(ids(&[f32::NAN, f32::NEG_INFINITY], 1, 2), [1]);
        assert_eq!(ids(&[0.0, f32::INFINITY, f32::NAN], 3, 3), [1, 0]);
        assert!(ids(&[f32::NAN, f32::NAN], 1, 2).is_empty());
    }

    #[test]
    fn one_is_the_first_of_several() {
        let numbers = [1.0, -0.0, f32::NAN, 0.0, 3.0, f32::NEG_INFINITY, 2.0, 3.0, -1.0];
        for len in 1..40 {
            for start in 0..numbers.len() {
                // Their order changes with the place, so that the greatest is in every lane and behind the last whole one.
                let row: Vec<f32> = (0..len)
                    .map(|i| numbers[(start + i + i * i / 7) % numbers.len()])
                    .collect();
                let several = ids(&row, 3, len);
                assert_eq!(ids(&row, 1, len), several[..several.len().min(1)], "{row:?}");
                // Piece by piece, as tasks of a head find it.
                let mut best = [Candidate::NONE];
                for (piece, first) in row.chunks(11).zip((0..).step_by(11)) {
                    Candidate::enter_all(&mut best, first, piece);
                }
                assert_eq!(best[0].is_none(), several.is_empty());
                assert!(several.first().is_none_or(|id| *id == best[0].id), "{row:?}");
            }
        }
    }

    #[test]
    fn padding_rows_of_the_head_are_never_chosen() {
        assert_eq!(ids(&[0.0, 3.0, 9.0], 1, 2), [1]);
        assert_eq!(ids(&[0.0, 3.0, 9.0], 9, 2), [1, 0]);
        assert!(ids(&[0.0, 3.0, 9.0], 1, 0).is_empty());
    }
}
