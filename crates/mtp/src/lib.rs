//! The multi-token-prediction head of the Qwen3.5, Qwen3.6 and Qwen3-Next models, as a drafter.
//!
//! A head is one decoder layer that shares the target's embedding and output head. From the target's hidden row at a
//! position and the token after it, it guesses the token after that; fed its own output, it guesses on. [`MtpHead`] is the
//! head, [`MtpDrafter`] drafts with it, and [`HeadCheck`] tells whether it guesses what the target chooses: no output test can
//! see a dead head, since wrong guesses cost only time.
//!
//! # Step
//! For the target's hidden row `h` at position p and the token `t` at p + 1:
//!
//! ```text
//! x = fc( [norm_e(embed(t)), norm_h(h)] )       the embedding first
//! m = norm( decoder_layer(x) )                  full attention over the head's own keys and values
//! draft for p + 2 = argmax( lm_head(m) )
//! ```
//!
//! A further draft takes `m` for `h` and the token just drafted for `t`. The hidden row is the one after the final norm
//! unless chosen otherwise: that is what the heads of this family were measured to want.
#![forbid(unsafe_code)]

mod check;
mod drafter;
mod error;
mod head;

pub use check::{Agreement, HeadCheck, Suspicion};
pub use drafter::MtpDrafter;
pub use error::{Error, Result};
pub use head::MtpHead;
pub use recant_core::Hidden;
