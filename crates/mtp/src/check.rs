//! How often a head guesses what its target chooses.

use std::fmt;

use recant_core::{CacheOptions, Hidden, LanguageModel, Rows, Segment};
use recant_generate::choose;

use crate::{Error, MtpHead, Result};

/// Agreement below this is that of a head that is fed or scaled wrongly, or belongs to another target. Heads that work agree
/// on more than half of ordinary text.
const DEAD: f64 = 0.1;

/// How often a head's first draft is what its target chooses, over a text fed as it is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Agreement {
    /// Positions compared.
    pub compared: usize,
    /// Positions where the draft was the target's choice.
    pub agreed: usize,
    /// Positions where the text's own token was the target's choice too, as in drafting.
    pub compared_on_path: usize,
    /// Of those, positions where the draft was the target's choice.
    pub agreed_on_path: usize,
}

impl Agreement {
    /// Measures a head on a text of at least 3 tokens, in one call of the target and one of the head.
    ///
    /// # Errors
    /// The text is shorter, or the target or the head refuses it.
    pub fn measure(head: &MtpHead, hidden: Hidden, text: &[u32]) -> Result<Self> {
        if text.len() < 3 {
            return Err(recant_core::Error::mismatch(
                "tokens to check a multi-token-prediction head on",
                "at least 3",
                text.len(),
            )
            .into());
        }
        let target = head.target();
        let mut caches = target.new_caches(&CacheOptions::default())?;
        let mut segment = Segment::new(text, &mut caches, Rows::All);
        segment.hidden = Some(hidden);
        let output = target.forward(&mut [segment])?;
        let output = &output.segments[0];
        let rows = output.hidden.as_ref().ok_or_else(|| -> Error {
            recant_core::Error::mismatch("the target's output", "hidden rows", "none").into()
        })?;
        let vocab = target.spec().vocab_size;
        let chosen = choose(output.logits()?, vocab, 1)?;
        let pairs = text.len() - 1;
        let guesses = head.forward(&rows.narrow(0, 0, pairs)?, &text[1..], &mut head.new_caches()?)?;
        let drafts = choose(&target.project(&guesses)?, vocab, 2)?;
        let mut agreement = Self::default();
        // Pair p guesses the token after text[p + 1], which the target chooses in row p + 1.
        for (p, draft) in drafts.iter().enumerate() {
            let agreed = usize::from(*draft == chosen[p + 1]);
            let on_path = usize::from(chosen[p] == text[p + 1]);
            agreement.compared += 1;
            agreement.agreed += agreed;
            agreement.compared_on_path += on_path;
            agreement.agreed_on_path += agreed * on_path;
        }
        Ok(agreement)
    }

    /// The share of positions that agree.
    pub fn share(&self) -> f64 {
        self.agreed as f64 / self.compared.max(1) as f64
    }

    /// The share of positions on path that agree.
    pub fn share_on_path(&self) -> f64 {
        self.agreed_on_path as f64 / self.compared_on_path.max(1) as f64
    }

    /// What is likely to be wrong, if the head agrees with almost nothing.
    pub fn complaint(&self) -> Option<String> {
        (self.share() < DEAD).then(|| {
            format!(
                "the multi-token-prediction head agrees with the target on {self}; output is not affected, but \
                 drafts are as good as none. Likely causes: its norms are stored as 1 + w and were shifted once more, or \
                 not at all (a converted file behind raw names); it wants the hidden row from before the final norm \
                 (Hidden::PreNorm); its halves [embedding, hidden] are swapped; or it belongs to another checkpoint"
            )
        })
    }
}

impl fmt::Display for Agreement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} positions", self.agreed, self.compared)
    }
}
