//! Which drafts stay, and what follows them.

use super::noise::{Key, Stream};
use super::{Distribution, Proposed};
use crate::Result;

/// The numbers of a round.
#[derive(Debug, Clone, Copy)]
pub(super) struct Noise {
    pub(super) seed: u64,
    /// Tokens of the text when the round began.
    pub(super) start: usize,
}

impl Noise {
    /// What both sides race with: the same in whichever round the position comes up.
    pub(super) fn race(self, position: usize) -> Key {
        Key::new(self.seed, Stream::Race, position, 0)
    }

    /// A number that no other round uses: what a rule decided with it must not be known to anyone who draws again.
    pub(super) fn uniform(self, stream: Stream, place: usize) -> f64 {
        Key::new(self.seed, stream, self.start + place, self.start).uniform()
    }
}

/// The token of one place, and whether it is the accepted draft.
pub(super) fn by_token(
    target: &Distribution,
    draft: Option<&Proposed>,
    noise: Noise,
    place: usize,
) -> Result<(u32, bool)> {
    let Some(draft) = draft else {
        return Ok((last(target, 1.0, None, noise, place), false));
    };
    let (p, q) = (target.of(draft.id), draft.probability()?);
    if noise.uniform(Stream::Accept, place) * f64::from(q) < f64::from(p) {
        return Ok((draft.id, true));
    }
    Ok((last(target, 1.0, Some(draft), noise, place), false))
}

/// How many drafts stay, and the token after them. `targets`: the distributions of the place of each draft and of the one
/// after the last.
///
/// The names are those of the paper: `reach` is its p, by which a prefix is as likely in the target's text as among the
/// drafts, at most 1; a prefix stays if any of those that begin with it is accepted.
pub(super) fn by_block(targets: &[Distribution], drafts: &[Proposed], noise: Noise) -> Result<(usize, u32)> {
    let mut reach = 1.0;
    let (mut accepted, mut accepted_reach) = (0, reach);
    for (place, draft) in drafts.iter().enumerate() {
        reach = (reach * f64::from(targets[place].of(draft.id)) / f64::from(draft.probability()?)).min(1.0);
        let bar = match drafts.get(place + 1) {
            None => reach,
            Some(next) => {
                let excess = targets[place + 1].total_excess(reach, next);
                let rest = excess + 1.0 - reach;
                // Nothing in excess, and nothing short: the distributions are equal, and the next draft decides.
                if rest > 0.0 {
                    excess / rest
                } else {
                    1.0
                }
            }
        };
        if noise.uniform(Stream::Accept, place) < bar {
            (accepted, accepted_reach) = (place + 1, reach);
        }
    }
    let next = drafts.get(accepted);
    let token = last(&targets[accepted], accepted_reach, next, noise, accepted);
    Ok((accepted, token))
}

/// The token that ends a round: of what `reach` times the target's distribution has in excess of that of the rejected
/// draft, or of the target's own if none was rejected.
fn last(target: &Distribution, reach: f64, rejected: Option<&Proposed>, noise: Noise, place: usize) -> u32 {
    let uniform = noise.uniform(Stream::Pick, place);
    rejected
        .and_then(|draft| target.pick_excess(reach, draft, uniform))
        // Rounding alone may reject a draft where there is no excess: then the distributions are equal.
        .or_else(|| target.pick(uniform))
        .unwrap_or_default()
}
