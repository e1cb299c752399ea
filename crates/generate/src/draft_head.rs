//! What drafters choose with: a model's head, or some rows of it.

use std::sync::Arc;

use recant_core::candle::Tensor;
use recant_core::{Candidate, LanguageModel, ModelSpec, Readout, SegmentOutput};

use crate::greedy::choose;
use crate::{DraftVocabulary, Error, Result};

/// A model that gives logits to draft from, and the ids that the logits are of.
pub struct DraftHead {
    model: Arc<dyn LanguageModel>,
    /// Logits to choose from; those beyond are not proposed.
    width: usize,
    /// The ids that the logits are of, if not each of its own place.
    ids: Option<Vec<u32>>,
}

impl DraftHead {
    /// All of a model's head.
    pub fn whole(model: Arc<dyn LanguageModel>) -> Self {
        Self {
            width: model.spec().vocab_size,
            model,
            ids: None,
        }
    }

    /// The part of a model's head that may be drafted from for a target: ids below `vocab`, and of the vocabulary, if there
    /// is one, to which the target's end tokens are added.
    ///
    /// # Errors
    /// No id is left, or the model does not offer [`LanguageModel::with_head_rows`].
    pub fn of(
        model: &Arc<dyn LanguageModel>,
        vocabulary: Option<&DraftVocabulary>,
        target: &ModelSpec,
        vocab: usize,
    ) -> Result<Self> {
        let vocab = model.spec().vocab_size.min(vocab);
        let Some(vocabulary) = vocabulary else {
            return Ok(Self {
                model: Arc::clone(model),
                width: vocab,
                ids: None,
            });
        };
        let vocabulary = vocabulary.clone().with(&target.eos);
        let ids: Vec<u32> = vocabulary.ids().filter(|&id| (id as usize) < vocab).collect();
        if ids.is_empty() {
            return Err(Error::Drafter(format!(
                "no id of its draft vocabulary is below {vocab}, the number of ids that both models know"
            )));
        }
        Ok(Self {
            model: model.with_head_rows(&ids)?,
            width: ids.len(),
            ids: Some(ids),
        })
    }

    /// The model that gives the logits. It takes the caches of the model it was made of.
    pub fn model(&self) -> &dyn LanguageModel {
        &*self.model
    }

    /// What to ask of its logits, for [`choose`](Self::choose).
    pub fn readout(&self) -> Readout {
        Readout::Largest {
            count: 1,
            among: self.width,
        }
    }

    /// The greedy choice after one row of a call that asked for the [`readout`](Self::readout), as an id of the whole
    /// vocabulary. `position` is for messages.
    ///
    /// # Errors
    /// No logit is a number, or the output is not one row of this head.
    pub fn choose(&self, output: &SegmentOutput, position: usize) -> Result<u32> {
        self.chosen(&output.largest(1, self.width)?, position)
    }

    /// The same for one row that comes after the final norm: `[1, hidden_size]`.
    ///
    /// # Errors
    /// As [`choose`](Self::choose) says, or the model does not offer [`LanguageModel::project`].
    pub fn choose_after(&self, hidden: &Tensor, position: usize) -> Result<u32> {
        self.chosen(&self.model.project_largest(hidden, 1, self.width)?, position)
    }

    fn chosen(&self, largest: &[Vec<Candidate>], position: usize) -> Result<u32> {
        let chosen = choose(largest, position)?;
        let &[chosen] = chosen.as_slice() else {
            return Err(recant_core::Error::mismatch("rows of logits", 1, chosen.len()).into());
        };
        match &self.ids {
            None => Ok(chosen),
            Some(ids) => ids.get(chosen as usize).copied().ok_or_else(|| {
                recant_core::Error::mismatch("logits of a reduced head", ids.len(), "more").into()
            }),
        }
    }
}
