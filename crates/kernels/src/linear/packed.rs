//! Weights in tiles of sixteen output rows.

use half::{bf16, f16};

use candle_core::WithDType;

use crate::pool::{self, Shared};
use crate::simd::{Simd, LANES};

/// Output rows of a tile: two vectors of accumulators.
pub(super) const TILE: usize = 2 * LANES;

/// One input feature's weights for a tile's output rows.
#[derive(Clone, Copy)]
#[repr(align(32))]
pub(super) struct Strip<T>(pub(super) [T; TILE]);

/// An element type of packed weights.
pub(super) trait Element: WithDType + Sync {
    /// Where in a strip output row `lane` of the tile lies.
    fn place(lane: usize) -> usize;

    /// A strip as f32: output rows 0 to 7, and 8 to 15.
    fn widen<S: Simd>(s: S, strip: &Strip<Self>) -> [S::F; 2];

    fn to_f32(self) -> f32;
}

#[inline(always)]
fn halves<T>(strip: &[T; TILE]) -> [&[T; LANES]; 2] {
    let (halves, _) = strip.as_chunks::<LANES>();
    [&halves[0], &halves[1]]
}

impl Element for f32 {
    fn place(lane: usize) -> usize {
        lane
    }

    #[inline(always)]
    fn widen<S: Simd>(s: S, strip: &Strip<Self>) -> [S::F; 2] {
        let [low, high] = halves(&strip.0);
        [s.load(low), s.load(high)]
    }

    fn to_f32(self) -> f32 {
        self
    }
}

impl Element for f16 {
    fn place(lane: usize) -> usize {
        lane
    }

    #[inline(always)]
    fn widen<S: Simd>(s: S, strip: &Strip<Self>) -> [S::F; 2] {
        let [low, high] = halves(&strip.0);
        [s.f16(low), s.f16(high)]
    }

    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }
}

impl Element for bf16 {
    fn place(lane: usize) -> usize {
        2 * (lane % LANES) + lane / LANES
    }

    #[inline(always)]
    fn widen<S: Simd>(s: S, strip: &Strip<Self>) -> [S::F; 2] {
        s.bf16_by_parity(&strip.0)
    }

    fn to_f32(self) -> f32 {
        bf16::to_f32(self)
    }
}

/// A weight matrix, `[tile][input feature][TILE]`, zeros after the last output row.
///
/// A tile is contiguous, so a quantized kind can put a group's scales next to its strips and keep the rest.
pub(super) struct Packed<T> {
    strips: Vec<Strip<T>>,
    pub(super) in_features: usize,
    pub(super) out_features: usize,
}

impl<T: Element> Packed<T> {
    /// Packs matrices `[n, in_features]`, stacked by output row. `in_features` is not 0.
    pub(super) fn new(parts: &[&[T]], in_features: usize) -> Self {
        let rows: Vec<&[T]> = parts
            .iter()
            .flat_map(|part| part.chunks_exact(in_features))
            .collect();
        let tiles = rows.len().div_ceil(TILE);
        let mut strips = vec![Strip([T::zero(); TILE]); tiles * in_features];
        let shared = Shared::new(&mut strips);
        pool::for_each(tiles, rows.len() * in_features, &|tile| {
            // SAFETY: one task a tile, and tiles do not overlap.
            let strips = unsafe { shared.part(tile * in_features..(tile + 1) * in_features) };
            for (lane, row) in rows[tile * TILE..].iter().take(TILE).enumerate() {
                let place = T::place(lane);
                for (strip, weight) in strips.iter_mut().zip(*row) {
                    strip.0[place] = *weight;
                }
            }
        });
        Self {
            strips,
            in_features,
            out_features: rows.len(),
        }
    }

    pub(super) fn tiles(&self) -> usize {
        self.out_features.div_ceil(TILE)
    }

    pub(super) fn tile(&self, tile: usize) -> &[Strip<T>] {
        &self.strips[tile * self.in_features..][..self.in_features]
    }

    pub(super) fn bytes(&self) -> usize {
        std::mem::size_of_val(self.strips.as_slice())
    }

    /// One output row's weights.
    pub(super) fn row(&self, row: usize, to: &mut [f32]) {
        let place = T::place(row % TILE);
        for (to, strip) in to.iter_mut().zip(self.tile(row / TILE)) {
            *to = strip.0[place].to_f32();
        }
    }
}
