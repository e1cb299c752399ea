//! Running figures.

/// Samples that a running median is taken of.
const WINDOW: usize = 11;
/// What an older observation of a share counts beside one that is a round younger.
const FADE: f64 = 1.0 - 1.0 / 24.0;
/// Observations that an assumption counts for.
const ASSUMED: f64 = 2.0;

/// A running median of seconds: a few slow moments of the machine do not move it.
#[derive(Debug, Clone, Default)]
pub(super) struct Seconds {
    /// A ring of the latest samples.
    samples: Vec<f64>,
    next: usize,
    median: Option<f64>,
}

impl Seconds {
    pub(super) fn of(seconds: f64) -> Self {
        let mut figure = Self::default();
        figure.add(seconds);
        figure
    }

    pub(super) fn median(&self) -> Option<f64> {
        self.median
    }

    pub(super) fn samples(&self) -> usize {
        self.samples.len()
    }

    /// Lets all samples so far count for one.
    pub(super) fn forget(&mut self) {
        if let Some(median) = self.median {
            *self = Self::of(median);
        }
    }

    pub(super) fn add(&mut self, seconds: f64) {
        match self.samples.get_mut(self.next) {
            Some(oldest) => *oldest = seconds,
            None => self.samples.push(seconds),
        }
        self.next = (self.next + 1) % WINDOW;
        let mut sorted = self.samples.clone();
        sorted.sort_by(f64::total_cmp);
        // The lower of two in the middle: moments that are too slow are common, moments that are too fast are not.
        self.median = sorted.get((sorted.len() - 1) / 2).copied();
    }
}

/// Seconds for `index`: measured, or on the line through the nearest measured neighbours, or beyond the last on the line
/// through the last two, level if there is one alone. `origin` stands for what is not measured at 0. Never falling beyond
/// the last; 0 where nothing is known.
pub(super) fn at(figures: &[Seconds], index: usize, origin: Option<f64>) -> f64 {
    let known = |i: usize| figures[i].median.or(origin.filter(|_| i == 0));
    if let Some(seconds) = known(index) {
        return seconds;
    }
    let mut below = (0..index).rev().filter_map(|i| Some((i, known(i)?)));
    let mut above = (index + 1..figures.len()).filter_map(|i| Some((i, known(i)?)));
    let line = |(i, a): (usize, f64), (j, b): (usize, f64)| {
        a + (b - a) * (index as f64 - i as f64) / (j as f64 - i as f64)
    };
    match (below.next(), above.next()) {
        (Some(low), Some(high)) => line(low, high),
        (Some(low), None) => below.next().map_or(low.1, |lower| line(lower, low).max(low.1)),
        (None, Some(high)) => high.1,
        (None, None) => 0.0,
    }
}

/// How often something was so, the latest rounds counting most.
#[derive(Debug, Clone, Default)]
pub(super) struct Share {
    so: f64,
    seen: f64,
}

impl Share {
    /// As though it had been so in this share of so many observations.
    pub(super) fn new(share: f64, seen: f64) -> Self {
        Self {
            so: share * seen,
            seen,
        }
    }

    /// A round went by.
    pub(super) fn fade(&mut self) {
        self.so *= FADE;
        self.seen *= FADE;
    }

    pub(super) fn add(&mut self, so: bool) {
        self.so += f64::from(u8::from(so));
        self.seen += 1.0;
    }

    /// Lets what was seen count for at most `rounds` observations.
    pub(super) fn forget(&mut self, rounds: f64) {
        if self.seen > rounds {
            self.so *= rounds / self.seen;
            self.seen = rounds;
        }
    }

    /// The share of what was seen.
    pub(super) fn mean(&self) -> f64 {
        self.so / self.seen.max(f64::MIN_POSITIVE)
    }

    /// The share, where little was seen drawn towards what is assumed.
    pub(super) fn value(&self, assumed: f64) -> f64 {
        (self.so + ASSUMED * assumed) / (self.seen + ASSUMED)
    }
}
