//! A tile: some columns of a head's state, all of its rows, and what is done to its rows.

use std::ops::Range;

use crate::pool::Shared;
use crate::simd::{Simd, WIDE};

/// Wide vectors side by side in a tile of the state.
pub(super) const WIDTH: usize = 4;

/// State columns of a tile: with 128 rows it is 32 KB, and stays in the first-level cache for all tokens.
pub(super) const COLUMNS: usize = WIDTH * WIDE;

/// State rows that records are folded into at a time.
pub(super) const ROWS: usize = 2;

/// Records folded in one walk over a tile.
pub(super) const GROUP: usize = 8;

/// Scales below it go into the numbers: far from where an update divided by one would be infinite.
pub(crate) const LEAST_SCALE: f32 = 1.0 / (1_u64 << 32) as f32;

/// The numbers of a state `[value_heads, key_dim, value_dim]`: the state is a head's scale times them.
#[derive(Clone, Copy)]
pub(super) enum State<'a> {
    Read(&'a [f32]),
    Write(&'a Shared<'a, f32>),
}

/// What a token's decay does to a head's scale and numbers.
#[derive(Clone, Copy)]
pub(super) struct Decay {
    /// What the numbers are multiplied with: 1, but where the scale would get too small and goes into them.
    pub(super) factor: f32,
    /// The scale after it.
    pub(super) scale: f32,
}

impl Decay {
    pub(super) const NONE: Self = Self {
        factor: 1.0,
        scale: 1.0,
    };

    pub(super) fn new(scale: f32, decay: f32) -> Self {
        let scale = scale * decay;
        if scale < LEAST_SCALE {
            Self {
                factor: scale,
                scale: 1.0,
            }
        } else {
            Self { factor: 1.0, scale }
        }
    }

    /// What an update is multiplied with before it is added to the numbers.
    pub(super) fn inverse(self) -> f32 {
        1.0 / self.scale
    }

    /// Whether numbers change by it.
    pub(super) fn moves(self) -> bool {
        self.factor != 1.0
    }

    #[inline(always)]
    pub(super) fn apply<S: Simd, const N: usize>(self, s: S, x: &mut [S::W; N]) {
        if self.moves() {
            let factor = s.wide_splat(self.factor);
            for x in x {
                *x = s.wide_mul(factor, *x);
            }
        }
    }
}

/// Records that are folded in one walk.
pub(super) struct Group<'a> {
    pub(super) len: usize,
    /// Whether any decay changes the numbers.
    pub(super) moves: bool,
    pub(super) decays: [Decay; GROUP],
    /// `[key_dim]` each
    pub(super) keys: [&'a [f32]; GROUP],
    /// Divided by the scale after their decay.
    pub(super) updates: [[f32; COLUMNS]; GROUP],
}

impl Group<'_> {
    /// Folds the records into `N` rows of a tile from `first` on, half of their columns at a time: as many as there are
    /// registers for.
    #[inline(always)]
    pub(super) fn fold_into<S: Simd, const N: usize>(
        &self,
        s: S,
        first: usize,
        tiles: &mut [[f32; COLUMNS]; N],
    ) {
        const HALF: usize = WIDTH / 2;
        let records = self.decays.iter().zip(&self.keys).zip(&self.updates);
        for half in 0..2 {
            let columns = half * HALF..(half + 1) * HALF;
            let mut x = [[s.wide_splat(0.0); HALF]; N];
            for (x, tile) in x.iter_mut().zip(tiles.iter()) {
                for (x, from) in x.iter_mut().zip(&tile.as_chunks().0[columns.clone()]) {
                    *x = s.wide_load(from);
                }
            }
            for ((decay, key), update) in records.clone().take(self.len) {
                let key = &key[first..first + N];
                let mut u = [s.wide_splat(0.0); HALF];
                for (u, from) in u.iter_mut().zip(&update.as_chunks().0[columns.clone()]) {
                    *u = s.wide_load(from);
                }
                for (x, k) in x.iter_mut().zip(key) {
                    if self.moves {
                        decay.apply(s, x);
                    }
                    let k = s.wide_splat(*k);
                    for (x, u) in x.iter_mut().zip(u) {
                        *x = s.wide_fma(k, u, *x);
                    }
                }
            }
            for (x, tile) in x.into_iter().zip(tiles.iter_mut()) {
                for (x, to) in x.into_iter().zip(&mut tile.as_chunks_mut().0[columns.clone()]) {
                    s.wide_store(x, to);
                }
            }
        }
    }
}

/// A token that the state decays for.
#[derive(Clone, Copy)]
pub(super) struct Token<'a> {
    pub(super) decay: Decay,
    /// `[key_dim]`
    pub(super) key: &'a [f32],
}

impl Token<'_> {
    /// Decays row `i` of a tile and adds what the key finds there.
    #[inline(always)]
    pub(super) fn meet<S: Simd>(&self, s: S, i: usize, x: &mut [S::W; WIDTH], kv: &mut [S::W; WIDTH]) {
        self.decay.apply(s, x);
        find(s, x, self.key[i], kv);
    }
}

#[inline(always)]
pub(super) fn wide<S: Simd>(s: S, row: &[f32; COLUMNS]) -> [S::W; WIDTH] {
    let mut x = [s.wide_splat(0.0); WIDTH];
    for (x, columns) in x.iter_mut().zip(row.as_chunks::<WIDE>().0) {
        *x = s.wide_load(columns);
    }
    x
}

#[inline(always)]
pub(super) fn store<S: Simd>(s: S, x: [S::W; WIDTH], row: &mut [f32; COLUMNS]) {
    for (x, columns) in x.into_iter().zip(row.as_chunks_mut::<WIDE>().0) {
        s.wide_store(x, columns);
    }
}

/// Writes the columns of a tile's row that a state has, if it is one to be written.
#[inline(always)]
pub(super) fn put<S: Simd>(s: S, x: [S::W; WIDTH], state: State<'_>, at: Range<usize>) {
    let State::Write(state) = state else { return };
    // SAFETY: one unit has these columns of this value head.
    let to = unsafe { state.part(at) };
    match to.first_chunk_mut() {
        Some(to) => store(s, x, to),
        None => {
            let mut row = [0.0; COLUMNS];
            store(s, x, &mut row);
            to.copy_from_slice(&row[..to.len()]);
        }
    }
}

/// Adds what the key writes to a row.
#[inline(always)]
pub(super) fn add<S: Simd>(s: S, x: &mut [S::W; WIDTH], k: f32, update: &[S::W; WIDTH]) {
    let k = s.wide_splat(k);
    for (x, update) in x.iter_mut().zip(update) {
        *x = s.wide_fma(k, *update, *x);
    }
}

/// Adds what a key or query finds in a row.
#[inline(always)]
pub(super) fn find<S: Simd>(s: S, x: &[S::W; WIDTH], q: f32, found: &mut [S::W; WIDTH]) {
    let q = s.wide_splat(q);
    for (x, found) in x.iter().zip(found) {
        *found = s.wide_fma(*x, q, *found);
    }
}
