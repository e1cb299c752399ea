//! What is stored in ways that a file does not show, through the reader of a model.

use recant_weights::{Folder, Stored, Weights};

use super::plan::Whole;
use crate::Result;

/// Reads what is to be written.
pub(super) struct Source<'f> {
    pub(super) folder: &'f Folder,
    /// A tensor is taken once, and two of them hold two projections in one.
    model: [Weights<'f>; 2],
    head: Option<[Weights<'f>; 2]>,
    /// The matrices that were read last, of the head or not, by name: the rows of two may be wanted by turns.
    last: Vec<(bool, String, Stored)>,
}

impl<'f> Source<'f> {
    pub(super) fn new(folder: &'f Folder) -> Result<Self> {
        let head = folder.mtp()?.zip(folder.mtp()?);
        Ok(Self {
            folder,
            model: [folder.weights()?, folder.weights()?],
            head: head.map(|(one, other)| [one, other]),
            last: Vec::new(),
        })
    }

    pub(super) fn read(&mut self, mtp: bool, whole: &Whole<'_>) -> Result<Stored> {
        let same = |last: &&(bool, String, Stored)| last.0 == mtp && last.1 == whole.name;
        if let Some((.., stored)) = self.last.iter().find(same) {
            return Ok(stored.clone());
        }
        let weights = match &mut self.head {
            Some(head) if mtp => head,
            _ => &mut self.model,
        };
        let weights = &mut weights[usize::from(whole.again)];
        let (name, shape) = (whole.name.as_str(), &whole.shape[..]);
        let stored = match (shape, whole.index) {
            (&[count, rows, width], Some(index)) => weights.take_stacked(name, [count, rows, width], index),
            (&[rows, width], None) => {
                let stored = weights.take_matrix(name, [rows, width])?;
                self.last.truncate(1);
                self.last.insert(0, (mtp, whole.name.clone(), stored.clone()));
                Ok(stored)
            }
            _ => weights.take(name, shape).map(Stored::Float),
        };
        Ok(stored?)
    }
}
