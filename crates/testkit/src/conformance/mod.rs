//! Suites that hold any cache, model or drafter against the laws of `recant_core`.
//!
//! Each function runs a suite and gives the first law it finds broken, what had been done and what was found. Nothing is
//! compared with a tolerance. The `assert_*` forms panic with that text, for use in tests.
//!
//! Tokens are ids below 32. Under one checkpoint the suites feed up to 16 tokens, so a limit on records must not be
//! lower. Everything runs on the CPU.

mod attention;
mod drafter;
mod lab;
mod laws;
mod model;
mod recurrent;
mod snapshots;
mod stack;

use candle_core::Tensor;
use recant_core::{
    AttentionCache, CacheOptions, CacheStack, LanguageModel, RecurrentCache, RecurrentLayout, Result, Window,
};

use recant_generate::Drafter;

use crate::Failure;

/// How long a suite looks, and what it should expect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Length of the longer texts, in tokens. Choose it so that a cache with blocks, a ring or a spill goes round at
    /// least twice.
    pub tokens: usize,
    /// Where the random groupings start from.
    pub seed: u64,
    /// The window that an attention cache is expected to keep; `None`: all tokens.
    pub window: Option<Window>,
    /// Whether an attention cache gives back the bits that it was given. False for quantized ones, which are held against
    /// themselves, fed token by token.
    pub exact: bool,
}

impl Default for Options {
    /// 40 tokens, no window, exact.
    fn default() -> Self {
        Self {
            tokens: 40,
            seed: 1,
            window: None,
            exact: true,
        }
    }
}

/// Checks an attention cache. `make` gives a new one each time.
///
/// For every query the rows that it may see must be in the view, once and with the right bits.
///
/// # Errors
/// The first law found broken.
pub fn attention_cache(
    make: impl Fn() -> Box<dyn AttentionCache>,
    options: &Options,
) -> std::result::Result<(), Failure> {
    attention::check(&make, options)
}

/// Checks a recurrent cache. `make` gives a new one of the layout each time.
///
/// It is driven by a [`Recurrence`](crate::Recurrence), both by one that writes its state in place and by one that gives
/// new arrays.
///
/// # Errors
/// The first law found broken.
pub fn recurrent_cache(
    make: impl Fn(&RecurrentLayout) -> Box<dyn RecurrentCache>,
    options: &Options,
) -> std::result::Result<(), Failure> {
    recurrent::check(&make, options)
}

/// Checks a stack of caches. `make` gives a new one each time; `feed` feeds tokens as a model does and gives a row of
/// output for each, `[tokens, ..]`.
///
/// # Errors
/// The first law found broken.
pub fn cache_stack(
    make: impl Fn() -> CacheStack,
    feed: impl Fn(&mut CacheStack, &[u32]) -> Result<Tensor>,
    options: &Options,
) -> std::result::Result<(), Failure> {
    stack::check(&make, &feed, options)
}

/// Checks a model: its caches as [`cache_stack`] does with the logits as output, that sequences in one call do not touch
/// each other, and that what it refuses changes nothing.
///
/// # Errors
/// The first law found broken.
pub fn language_model(
    model: &dyn LanguageModel,
    caches: &CacheOptions,
    options: &Options,
) -> std::result::Result<(), Failure> {
    model::check(model, caches, options)
}

/// Checks a drafter whose proposals depend on nothing but the text: whatever was proposed, accepted and refused before, it
/// proposes what a new drafter does that is given the same text. `make` gives a new one each time.
///
/// Hidden rows come from `target`, if the drafter wants them.
///
/// # Errors
/// The first law found broken.
pub fn drafter(
    make: impl Fn() -> Box<dyn Drafter>,
    target: &dyn LanguageModel,
    options: &Options,
) -> std::result::Result<(), Failure> {
    drafter::check(&make, target, options)
}

/// Panics with the law that [`attention_cache`] finds broken.
///
/// # Panics
/// A law is broken.
pub fn assert_attention_cache(make: impl Fn() -> Box<dyn AttentionCache>, options: &Options) {
    passed(attention_cache(make, options));
}

/// Panics with the law that [`recurrent_cache`] finds broken.
///
/// # Panics
/// A law is broken.
pub fn assert_recurrent_cache(make: impl Fn(&RecurrentLayout) -> Box<dyn RecurrentCache>, options: &Options) {
    passed(recurrent_cache(make, options));
}

/// Panics with the law that [`cache_stack`] finds broken.
///
/// # Panics
/// A law is broken.
pub fn assert_cache_stack(
    make: impl Fn() -> CacheStack,
    feed: impl Fn(&mut CacheStack, &[u32]) -> Result<Tensor>,
    options: &Options,
) {
    passed(cache_stack(make, feed, options));
}

/// Panics with the law that [`language_model`] finds broken.
///
/// # Panics
/// A law is broken.
pub fn assert_language_model(model: &dyn LanguageModel, caches: &CacheOptions, options: &Options) {
    passed(language_model(model, caches, options));
}

/// Panics with the law that [`drafter`] finds broken.
///
/// # Panics
/// A law is broken.
pub fn assert_drafter(make: impl Fn() -> Box<dyn Drafter>, target: &dyn LanguageModel, options: &Options) {
    passed(drafter(make, target, options));
}

fn passed(result: std::result::Result<(), Failure>) {
    if let Err(failure) = result {
        panic!("{failure}");
    }
}
