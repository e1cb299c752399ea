//! What drafters choose with: a model's head, or some rows of it.

use std::sync::Arc;

use recant_core::candle::Tensor;
use recant_core::{LanguageModel, ModelSpec, Readout, SegmentOutput};

use crate::{DraftVocabulary, Draws, Error, Proposed, Result, Row};

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
    pub fn readout(&self, draws: &Draws<'_>) -> Readout {
        draws.readout(self.width)
    }

    /// The choice after one row of a call that asked for the [`readout`](Self::readout), as an id of the whole
    /// vocabulary. `drafted` are the tokens proposed before it.
    ///
    /// # Errors
    /// No logit is a number, or the output is not one row of this head.
    pub fn choose(
        &self,
        output: &SegmentOutput,
        draws: &Draws<'_>,
        drafted: &[Proposed],
    ) -> Result<Proposed> {
        let drafted: Vec<u32> = drafted.iter().map(|token| token.id).collect();
        draws.choose(&drafted, Row::only(output)?, self.ids.as_deref(), self.width)
    }

    /// The same for one row that comes after the final norm: `[1, hidden_size]`.
    ///
    /// # Errors
    /// As [`choose`](Self::choose) says, or the model does not offer [`LanguageModel::project`].
    pub fn choose_after(&self, hidden: &Tensor, draws: &Draws<'_>, drafted: &[Proposed]) -> Result<Proposed> {
        let mut output = SegmentOutput {
            logits: None,
            largest: None,
            hidden: None,
        };
        match self.readout(draws) {
            Readout::All => output.logits = Some(self.model.project(hidden)?),
            Readout::Largest { count, among } => {
                output.largest = Some(self.model.project_largest(hidden, count, among)?);
            }
        }
        self.choose(&output, draws, drafted)
    }
}
