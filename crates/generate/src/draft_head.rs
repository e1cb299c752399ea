//! What drafters choose with: a model's head, or some rows of it.

use std::sync::Arc;

use recant_core::candle::Tensor;
use recant_core::{LanguageModel, ModelSpec};

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

    /// The greedy choice from one row of its logits, as an id of the whole vocabulary. `position` is for messages.
    ///
    /// # Errors
    /// No logit is a number, or the row is not of this head.
    pub fn choose(&self, logits: &Tensor, position: usize) -> Result<u32> {
        let chosen = choose(logits, self.width, position)?;
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
