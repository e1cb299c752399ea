//! Randomness without state: every number is a hash of what it is for.

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// What a number decides.
#[derive(Debug, Clone, Copy)]
pub(super) enum Stream {
    /// Which token wins a position, under the coupled rule: for target and drafter alike.
    Race,
    /// Which token is drafted, under the other rules.
    Draft,
    /// Whether a draft is accepted.
    Accept,
    /// Which token follows those accepted.
    Pick,
}

/// A source of numbers for one decision.
#[derive(Debug, Clone, Copy)]
pub(super) struct Key(u64);

impl Key {
    /// The source for a position of the text. `start` is the length of the text when the round began, or 0 if rounds
    /// shall not matter.
    pub(super) fn new(seed: u64, stream: Stream, position: usize, start: usize) -> Self {
        let words = [stream as u64, position as u64, start as u64];
        let absorb = |key: u64, word: u64| mix((key ^ word).wrapping_add(GOLDEN));
        Self(words.into_iter().fold(mix(seed.wrapping_add(GOLDEN)), absorb))
    }

    /// A number between 0 and 1, neither included.
    pub(super) fn uniform(self) -> f64 {
        let bits = mix(self.0.wrapping_add(GOLDEN)) >> 12;
        (bits as f64 + 0.5) * (1.0 / (1u64 << 52) as f64)
    }

    /// The first 32 bits of the number that belongs to `id`. A loop over it becomes vector code.
    #[inline(always)]
    pub(super) fn coarse(self, id: u32) -> u32 {
        let (low, high) = (self.0 as u32, (self.0 >> 32) as u32);
        let mut x = id ^ low;
        x ^= x >> 16;
        x = x.wrapping_mul(0x21f0_aaad) ^ high;
        x ^= x >> 15;
        x = x.wrapping_mul(0xd35a_2d97);
        x ^ (x >> 15)
    }

    /// The number between 0 and 1, neither included, that belongs to `id`. All its 53 bits count: how often a rare
    /// token wins is decided by the last ones.
    pub(super) fn fine(self, id: u32) -> f64 {
        let coarse = u64::from(self.coarse(id));
        let rest = mix((self.0 ^ u64::from(id)).wrapping_add(GOLDEN)) >> 44;
        let bits = (coarse << 21) | (rest << 1) | 1;
        bits as f64 * (1.0 / (1u64 << 53) as f64)
    }
}

/// Spreads the bits of `x` (the finaliser of SplitMix64).
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
