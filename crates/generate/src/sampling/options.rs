//! What a caller may ask of the choice of tokens.

use crate::{Error, Result};

/// Temperatures below this are taken for 0: quotients of logits would overflow, and chance would decide only between
/// logits that are equal or all but equal.
const COLDEST: f32 = 1e-5;

/// How drafts are accepted at a temperature above 0. Each rule gives the target's processed distribution exactly.
///
/// At temperature 0 there is nothing to choose between them: a draft is accepted if and only if it is the greedy choice.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Rule {
    /// The token of a position is the target's own draw, with noise that depends on the seed and the position only; a draft
    /// is accepted if it equals that draw. Drafters draw from their own distributions with the same noise, which makes
    /// agreement likely.
    ///
    /// The text of a seed is that of plain decoding, token for token, whatever the drafter and however far it looks ahead.
    /// Fewer drafts are accepted than by the other rules: at least the share `s / (2 - s)`, where `s` is the sum over
    /// all tokens of the lesser of both probabilities, which is the share that [`Token`](Self::Token) accepts (Daliri, Musco
    /// and Suresh, arXiv 2408.07978).
    #[default]
    Coupled,
    /// A draft is accepted with the quotient of the target's and the drafter's probability; if it is not, a token is drawn
    /// from what the target's distribution has in excess of the drafter's (Leviathan, Kalman and Matias, arXiv 2211.17192).
    ///
    /// The distribution is that of plain decoding; the text of a seed is not, and changes with the drafter and with how far
    /// it looks ahead.
    Token,
    /// As [`Token`](Self::Token), but the drafts of a round are judged together, which accepts at least as many on average
    /// (Sun et al., arXiv 2403.10444).
    ///
    /// It looks at rows whose tokens may not stay. With processors of the caller's, which may see only tokens that stay, it
    /// acts as `Token`.
    Block,
}

/// How tokens are chosen. The default is greedy, and changes no logit.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampling {
    /// Logits are divided by it. 0, or less than 0.00001: greedy, that is the largest logit, the lowest id among equals.
    pub temperature: f32,
    /// Keeps the so many most likely tokens; the lowest ids among equals at the border. 0: all.
    pub top_k: usize,
    /// Keeps the fewest most likely tokens, of those that top-k left, whose probabilities sum to at least this. 1: all.
    pub top_p: f32,
    /// Keeps tokens that are at least this times as likely as the most likely one. 0: all.
    pub min_p: f32,
    /// Divides the positive logits of tokens in the text, prompt included, and multiplies the negative ones. 1: none.
    pub repetition_penalty: f32,
    /// Is taken from the logits of tokens in the output; the prompt does not count. 0: none.
    pub presence_penalty: f32,
    /// Is taken from the logits of tokens in the output once for each time they occur; the prompt does not count. 0: none.
    pub frequency_penalty: f32,
    /// How many of the newest tokens, prompt included, the three penalties look at; 0 is none. None: all.
    pub penalty_window: Option<usize>,
    /// Is added to the logits of these tokens. Minus infinity bans one.
    pub logit_bias: Vec<(u32, f32)>,
    /// What all random numbers come from.
    pub seed: u64,
    /// How drafts are accepted.
    pub rule: Rule,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            penalty_window: None,
            logit_bias: Vec::new(),
            seed: 0,
            rule: Rule::default(),
        }
    }
}

impl Sampling {
    /// Refuses what cannot be meant. `vocab` is the number of ids that may be chosen.
    ///
    /// # Errors
    /// [`Error::Parameter`], of the first parameter at fault.
    pub fn check(&self, vocab: usize) -> Result<()> {
        let number = |name, value: f32, allowed: bool, expected: &str| {
            if allowed && value.is_finite() {
                Ok(())
            } else {
                Err(Error::parameter(name, value, expected))
            }
        };
        let temperature = self.temperature;
        number("temperature", temperature, temperature >= 0.0, "a number from 0")?;
        let within = self.top_p > 0.0 && self.top_p <= 1.0;
        number("top_p", self.top_p, within, "a number above 0, to 1")?;
        let within = (0.0..1.0).contains(&self.min_p);
        number("min_p", self.min_p, within, "a number from 0, below 1")?;
        let positive = self.repetition_penalty > 0.0;
        number(
            "repetition_penalty",
            self.repetition_penalty,
            positive,
            "a number above 0",
        )?;
        number("presence_penalty", self.presence_penalty, true, "a number")?;
        number("frequency_penalty", self.frequency_penalty, true, "a number")?;
        for &(id, bias) in &self.logit_bias {
            if id as usize >= vocab {
                let found = format!("for token {id}");
                return Err(Error::parameter(
                    "logit_bias",
                    found,
                    &format!("ids below {vocab}"),
                ));
            }
            if bias.is_nan() || bias == f32::INFINITY {
                let found = format!("{bias} for token {id}");
                return Err(Error::parameter(
                    "logit_bias",
                    found,
                    "a number, or -inf to ban it",
                ));
            }
        }
        Ok(())
    }

    /// Whether nothing but a row's largest logit matters, as far as these parameters go.
    pub fn is_plain_greedy(&self) -> bool {
        self.is_greedy() && !self.adjusts()
    }

    pub(super) fn is_greedy(&self) -> bool {
        self.temperature < COLDEST
    }

    /// Whether logits change before the temperature is applied.
    pub(super) fn adjusts(&self) -> bool {
        self.penalises() || !self.logit_bias.is_empty()
    }

    /// Whether logits depend on tokens before the last.
    pub(super) fn penalises(&self) -> bool {
        let some =
            self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0;
        some && self.penalty_window != Some(0)
    }
}
