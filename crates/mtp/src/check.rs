//! How often a head guesses what its target chooses, and what may be wrong where it seldom does.

use std::fmt;

use recant_core::candle::Tensor;
use recant_core::{CacheOptions, Hidden, LanguageModel, Readout, Rows, Segment};
use recant_generate::choose;
use recant_layers::{Family, HybridModel, LoadOptions};
use recant_weights::Folder;

use crate::head::Reading;
use crate::{MtpHead, Result};

/// Agreement below this is that of a head that is read or fed wrongly, or belongs to another target. Heads that work agree on
/// more than half of ordinary text.
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
        let probe = Probe::run(head.target(), hidden, text)?;
        Ok(probe.agreement(&probe.hits(head)?))
    }

    /// The share of positions that agree.
    pub fn share(&self) -> f64 {
        self.agreed as f64 / self.compared.max(1) as f64
    }

    /// The share of positions on path that agree.
    pub fn share_on_path(&self) -> f64 {
        self.agreed_on_path as f64 / self.compared_on_path.max(1) as f64
    }
}

impl fmt::Display for Agreement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} positions", self.agreed, self.compared)
    }
}

/// What a head, read as its layout asks, did on a short text, and whether another reading of the same tensors did better.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeadCheck {
    /// The head as it is used.
    pub agreement: Agreement,
    /// A reading that agrees clearly more often: the checkpoint is not what its layout says.
    pub better: Option<(Suspicion, Agreement)>,
}

/// What may be wrong with a checkpoint's head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Suspicion {
    /// Its norms are stored the other way than its layout says.
    Norms,
    /// The halves of its fusion matrix are swapped.
    Order,
}

impl HeadCheck {
    /// Loads a head and checks it on a text of at least 3 tokens, in one call of the target and one of the head for each
    /// reading. No output test can see a head that is read wrongly, since wrong guesses cost only time.
    ///
    /// # Errors
    /// As [`MtpHead::load`] and [`Agreement::measure`].
    pub fn load(
        family: &dyn Family,
        target: &HybridModel,
        folder: &Folder,
        options: &LoadOptions,
        hidden: Hidden,
        text: &[u32],
    ) -> Result<(MtpHead, Self)> {
        let head = MtpHead::load(family, target, folder, options)?;
        let probe = Probe::run(target, hidden, text)?;
        let hits = probe.hits(&head)?;
        let mut better = None;
        let mut best = hits.clone();
        for (suspicion, reading) in [
            (
                Suspicion::Norms,
                Reading {
                    other_norms: true,
                    ..Reading::default()
                },
            ),
            (
                Suspicion::Order,
                Reading {
                    swapped: true,
                    ..Reading::default()
                },
            ),
        ] {
            let other = MtpHead::load_as(family, target, folder, options, reading)?;
            let other_hits = probe.hits(&other)?;
            if clearly_more(&other_hits, &best) {
                better = Some((suspicion, probe.agreement(&other_hits)));
                best = other_hits;
            }
        }
        let check = Self {
            agreement: probe.agreement(&hits),
            better,
        };
        Ok((head, check))
    }

    /// What a user should know of the head, in words; none if nothing is suspicious.
    pub fn complaint(&self) -> Option<String> {
        const HARM: &str = "output is not affected, but drafting pays less than it could";
        if let Some((suspicion, other)) = &self.better {
            let (what, remedy) = match suspicion {
                Suspicion::Norms => (
                    "with its norms read the other way",
                    "the norms are stored as 1 + w behind raw names, or as w behind converted ones, so that one shift is \
                     too many or missing; convert the checkpoint again",
                ),
                Suspicion::Order => (
                    "with the halves of fc swapped",
                    "fc takes [hidden, embedding] instead of [embedding, hidden]; swap its halves",
                ),
            };
            return Some(format!(
                "the multi-token-prediction head agrees with the target on {}, but {what} on {other}: {remedy}; {HARM}",
                self.agreement
            ));
        }
        (self.agreement.share() < DEAD).then(|| {
            format!(
                "the multi-token-prediction head agrees with the target on {} only; it may want the hidden rows from before \
                 the final norm (Hidden::PreNorm), or belong to another checkpoint; {HARM}",
                self.agreement
            )
        })
    }
}

/// Whether `a` hits clearly more often than `b`: by more than two standard deviations of the positions where they differ,
/// and by at least one position in twenty.
fn clearly_more(a: &[bool], b: &[bool]) -> bool {
    let only = |x: &[bool], y: &[bool]| x.iter().zip(y).filter(|(x, y)| **x && !**y).count() as f64;
    let (gained, lost) = (only(a, b), only(b, a));
    gained - lost > 2.0 * (gained + lost).sqrt() && (gained - lost) * 20.0 >= a.len() as f64
}

/// A text, and what the target made of it.
struct Probe<'a> {
    target: &'a HybridModel,
    text: &'a [u32],
    /// The hidden row of every token but the last.
    hidden: Tensor,
    /// The target's choice after every token.
    chosen: Vec<u32>,
}

impl<'a> Probe<'a> {
    fn run(target: &'a HybridModel, hidden: Hidden, text: &'a [u32]) -> Result<Self> {
        if text.len() < 3 {
            return Err(recant_core::Error::mismatch(
                "tokens to check a multi-token-prediction head on",
                "at least 3",
                text.len(),
            )
            .into());
        }
        let mut caches = target.new_caches(&CacheOptions::default())?;
        let vocab = target.spec().vocab_size;
        let mut segment = Segment::new(text, &mut caches, Rows::All);
        segment.readout = Readout::Largest {
            count: 1,
            among: vocab,
        };
        segment.hidden = Some(hidden);
        let output = target.forward(&mut [segment])?;
        let output = output.only()?;
        Ok(Self {
            target,
            text,
            hidden: output.hidden()?.narrow(0, 0, text.len() - 1)?,
            chosen: choose(&output.largest(1, vocab)?, 1)?,
        })
    }

    /// For each pair, whether the head's guess is the target's choice: pair p guesses the token after `text[p + 1]`.
    fn hits(&self, head: &MtpHead) -> Result<Vec<bool>> {
        let guesses = head.forward(&self.hidden, &self.text[1..], &mut head.new_caches()?)?;
        let vocab = self.target.spec().vocab_size;
        let drafts = choose(&self.target.project_largest(&guesses, 1, vocab)?, 2)?;
        Ok(drafts
            .iter()
            .zip(&self.chosen[1..])
            .map(|(a, b)| a == b)
            .collect())
    }

    fn agreement(&self, hits: &[bool]) -> Agreement {
        let mut agreement = Agreement::default();
        for (p, &hit) in hits.iter().enumerate() {
            let on_path = usize::from(self.chosen[p] == self.text[p + 1]);
            agreement.compared += 1;
            agreement.agreed += usize::from(hit);
            agreement.compared_on_path += on_path;
            agreement.agreed_on_path += usize::from(hit) * on_path;
        }
        agreement
    }
}
