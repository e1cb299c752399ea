//! Greedy decoding, drafters, and the exact speculative step.
//!
//! One round: checkpoint; the drafter proposes up to `k` tokens; one forward over the pending token and the proposals; the
//! longest prefix that the target would have chosen itself is accepted, and one token is added; the rest is trimmed; commit.
//! Only [`Cache`](recant_core::Cache) and [`LanguageModel`](recant_core::LanguageModel) are used: this crate knows no model
//! and no concrete cache.
//!
//! Drafters: another model ([`ModelDrafter`], if need be with a [`DraftVocabulary`]), the text itself ([`NgramDrafter`]), or
//! the text first and something else where it does not repeat itself ([`CombinedDrafter`]). How far they look ahead is
//! fixed or chosen by what pays ([`Depth`]).
//!
//! Output equals plain decoding, bit for bit, as far as the model keeps its law
//! ([`LanguageModel`](recant_core::LanguageModel)); the drafter changes only how fast it comes.
#![forbid(unsafe_code)]

mod combined;
mod decoder;
mod depth;
mod draft_head;
mod drafter;
mod error;
mod greedy;
mod model_drafter;
mod ngram;
mod sampling;
mod store;
mod vocabulary;

pub use combined::CombinedDrafter;
pub use decoder::{step, Decoder, Done, Finish, Generation, Limits, Phases, Round, Step, Token};
pub use depth::Depth;
pub use draft_head::DraftHead;
pub use drafter::{caches_of, Drafter};
pub use error::{Error, Result};
pub use greedy::choose;
pub use model_drafter::ModelDrafter;
pub use ngram::NgramDrafter;
pub use sampling::{
    Distribution, Draws, LogitsProcessor, Logprobs, LogprobsOf, LogprobsOptions, Proposed, Row, Rule,
    Sampler, Sampling, Verdict,
};
pub use store::{DrafterState, Hit, PromptStore, StoreOptions, StoreStats, StoredState};
pub use vocabulary::DraftVocabulary;
