//! The greedy rule: the largest logit, the lowest id among equals.

use recant_core::Candidate;

use crate::{Error, Result};

/// The greedy choice for each row, from its largest logits. `position` is that of the first row's choice, for messages.
///
/// # Errors
/// A row without a number.
pub fn choose(largest: &[Vec<Candidate>], position: usize) -> Result<Vec<u32>> {
    (position..)
        .zip(largest)
        .map(|(position, row)| match row.first() {
            Some(candidate) => Ok(candidate.id),
            None => Err(Error::NoNumber { position }),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_without_a_number_is_an_error_that_names_the_position() {
        let first = Candidate { id: 1, logit: 3.0 };
        let second = Candidate { id: 0, logit: 2.0 };
        assert_eq!(
            choose(&[vec![first, second], vec![second]], 40).ok(),
            Some(vec![1, 0])
        );
        let error = choose(&[vec![first], vec![]], 40).err().map(|e| e.to_string());
        assert!(error.is_some_and(|e| e.contains("position 41")));
    }
}
