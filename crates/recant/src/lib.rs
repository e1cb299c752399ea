//! Exact speculative decoding for the Qwen3.5, Qwen3.6 and Qwen3-Next hybrid language models, on candle.
//!
//! A draft is checked by the target in one pass, and what the target rejects is taken back out of every cache, the
//! recurrent state included, as though it had never been fed. Output is bit for bit that of plain decoding.
//!
//! [`load`] reads a checkpoint folder or fetches a repository of the Hub, [`Loaded::session`] prepares a [`Session`], and [`Session::generate`] streams
//! [`Event`]s.
//!
//! ```no_run
//! let target = recant::load("Qwen3.5-9B")?;
//! let draft = recant::load("Qwen3.5-0.8B")?;
//! let mut session = target.session().draft(&draft).draft_tokens(4).build()?;
//! session.start("def fibonacci(n):")?;
//! for event in session.generate(200) {
//!     print!("{}", event?.text());
//! }
//! println!("\n{:?}", session.stats());
//! # Ok::<(), recant::Error>(())
//! ```
//!
//! Caches of one's own are handed to a session by [`SessionBuilder::caches`]; the traits they implement are in [`core`].
//! candle and tokenizers are re-exported, since their types are in this API: their minor versions are part of this
//! crate's.
#![forbid(unsafe_code)]

mod batcher;
mod chat;
mod error;
mod heads;
#[cfg(feature = "hub")]
mod hub;
mod inspect;
mod limited;
mod loaded;
mod recommended;
mod save;
mod session;
mod stop;
mod text;
mod threads;

pub use recant_core as core;
pub use recant_core::candle;
pub use recant_generate as generate;
pub use tokenizers;

pub use batcher::{Batcher, BatcherOptions, Refused, Ticket};
pub use chat::{ChatOptions, ChatTemplate, Content, Function, Message, Part, ToolCall};
pub use error::{Error, Result};
#[cfg(feature = "hub")]
pub use hub::{Hub, HubError};
pub use inspect::{inspect, Layers, Module, ModuleKind, Mtp, Report};
pub use loaded::{load, load_with, Loaded};
pub use recant_core::{CacheOptions, Cancel, Hidden, KvType};
pub use recant_generate::{
    Depth, DraftVocabulary, Finish, LogitsProcessor, Logprobs, LogprobsOf, LogprobsOptions, Phases,
    PromptStore, Round, Rule, Sampling, StoreOptions, StoreStats, Token,
};
pub use recant_layers::{ActivationPrecision, Backend, GroupFormat, LoadOptions};
pub use recant_mtp::{Agreement, HeadCheck, Suspicion};
pub use save::save;
pub use session::{Event, Run, Session, SessionBuilder, Stats};
pub use text::Text;
pub use threads::Threads;

/// The code in the README and the guides compiles.
#[cfg(doctest)]
mod guides {
    #[doc = include_str!("../../../README.md")]
    struct Readme;
    #[doc = include_str!("../../../docs/guide.md")]
    struct Guide;
    #[doc = include_str!("../../../docs/cache-authors.md")]
    struct CacheAuthors;
}
