//! How many tokens to draft in a round.

mod figures;
#[cfg(test)]
mod tests;

use figures::{Seconds, Share};

/// How many tokens to draft in a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Depth {
    /// Always as many. 0: plain decoding.
    Fixed(usize),
    /// As many as make most tokens a second by what was measured so far, from none to `most`. Where drafting does not pay,
    /// it ends, and is tried again at growing intervals; all that is lost against plain decoding is about two seconds in a
    /// hundred, and what the first few rounds take.
    Auto {
        /// Most tokens a round; more than 64 are taken for 64.
        most: usize,
    },
}

impl Depth {
    /// Most tokens that a round may draft.
    pub fn most(self) -> usize {
        match self {
            Self::Fixed(tokens) => tokens,
            Self::Auto { most } => most.min(Controller::DEEPEST),
        }
    }
}

/// What one round took and gave.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sample {
    /// Tokens asked for.
    pub(crate) asked: usize,
    /// Tokens proposed; may be fewer, or none.
    pub(crate) drafted: usize,
    /// Proposals that stayed.
    pub(crate) accepted: usize,
    /// Seconds of proposing.
    pub(crate) draft: f64,
    /// Seconds of all else: checking, taking back, choosing.
    pub(crate) verify: f64,
}

/// How much better than the depth in use another must look, so that noise does not drive the choice to and fro.
const LEAD: f64 = 1.03;
/// The same for plain decoding: nothing is risked there.
const PLAIN_LEAD: f64 = 1.01;
/// Rounds measured plainly before the first proposal. All is compared with them.
const FIRST: usize = 5;
/// Rounds that a depth is given before less or nothing may look better: one slow moment must not end it.
const STAY: usize = 3;
/// Rounds between trials of another depth: at first, and at most. Each trial that changes nothing doubles them.
const INTERVAL: usize = 16;
const LONGEST_INTERVAL: usize = 512;
/// Rounds of a trial: of drafting at all, and of a neighbouring depth.
const TRIAL: usize = 4;
const NEIGHBOUR_TRIAL: usize = 2;
/// Rounds of old agreement that still count when drafting is tried again.
const MEMORY: f64 = 3.0;
/// What may be lost against plain decoding: so many of its steps at a time, and a share of its time.
const LOSS_STEPS: f64 = 8.0;
const LOSS: f64 = 0.015;
/// After so many tokens without a proposal, a drafter's first one is slower for having to read them.
const CATCH_UP: usize = 4;
/// What is assumed of agreement before anything is known, and for how many observations that counts.
const HOPE: f64 = 0.8;
const HOPE_WEIGHT: f64 = 2.0;

/// Chooses depths: see [`Depth::Auto`].
///
/// A state machine without a clock: [`choose`](Self::choose) names a depth, [`record`](Self::record) is told what the round
/// took. It keeps running figures: seconds by tokens drafted, for proposing and for all else; for each place of a
/// proposal how often a token was proposed there and how often it agreed, given those before it. From them it computes
/// the tokens a second of each depth, and moves to the best one if it leads by enough. What is not measured is
/// interpolated, or else guessed hopefully: a depth that looks good for lack of figures is soon run, and then there are
/// figures. Depths that are not run are tried now and then.
///
/// A ledger bounds what all this may cost. Each round that was asked to draft is charged what it took beyond what its
/// tokens would have taken plainly. While more is owed than may be lost, nothing is drafted.
#[derive(Debug)]
pub(crate) struct Controller {
    most: usize,
    depth: usize,
    /// Rounds that it is given yet.
    stay: usize,
    trial: Option<Trial>,
    /// Rounds until the next trial, and how many there are to be after it.
    wait: usize,
    interval: usize,
    /// Deepest proposal made.
    deepest: usize,
    /// By tokens proposed.
    draft: Vec<Seconds>,
    verify: Vec<Seconds>,
    /// By place in the proposal.
    proposed: Vec<Share>,
    agreed: Vec<Share>,
    /// Rounds so far, and by depth the round in which it was asked for last.
    round: u64,
    asked: Vec<u64>,
    /// Tokens since the drafter was asked last, and seconds it then takes to read one.
    idle: usize,
    catch_up: Seconds,
    /// Seconds lost against plain decoding, and neither won back nor written off.
    owed: f64,
}

#[derive(Debug)]
struct Trial {
    depth: usize,
    left: usize,
}

impl Controller {
    /// No deeper proposal is considered.
    const DEEPEST: usize = 64;

    /// Chooses from none to `most`, but not above [`DEEPEST`](Self::DEEPEST).
    pub(crate) fn new(most: usize) -> Self {
        let most = most.min(Self::DEEPEST);
        let mut agreed = vec![Share::default(); most];
        if let Some(first) = agreed.first_mut() {
            *first = Share::new(HOPE, HOPE_WEIGHT);
        }
        Self {
            most,
            depth: 0,
            stay: FIRST,
            trial: None,
            wait: INTERVAL,
            interval: INTERVAL,
            deepest: 0,
            draft: vec![Seconds::default(); most + 1],
            verify: vec![Seconds::default(); most + 1],
            proposed: vec![Share::default(); most],
            agreed,
            round: 0,
            asked: vec![0; most + 1],
            idle: 0,
            // Nothing at first: one slow moment alone would keep a drafter from being tried ever again.
            catch_up: Seconds::of(0.0),
            owed: 0.0,
        }
    }

    /// Whether it was made for this `most`.
    pub(crate) fn serves(&self, most: usize) -> bool {
        self.most == most.min(Self::DEEPEST)
    }

    /// Tokens to ask for in the next round.
    pub(crate) fn choose(&self) -> usize {
        self.trial.as_ref().map_or(self.depth, |trial| trial.depth)
    }

    /// Takes in a round, whether it asked for what was chosen or, near an end, for less.
    pub(crate) fn record(&mut self, sample: &Sample) {
        let drafted = sample.drafted.min(self.most);
        let asked = sample.asked.min(self.most);
        self.round += 1;
        self.asked[asked] = self.round;
        self.deepest = self.deepest.max(drafted);
        self.verify[drafted].add(sample.verify);
        if asked > 0 {
            self.count(sample, asked, drafted);
        }
        self.charge(sample, asked, drafted);
        self.idle = if asked > 0 { 0 } else { self.idle + 1 };
        self.decide(drafted > 0);
    }

    fn count(&mut self, sample: &Sample, asked: usize, drafted: usize) {
        if self.idle <= CATCH_UP {
            self.draft[drafted].add(sample.draft);
        } else {
            let beyond = sample.draft - figures::at(&self.draft, drafted, Some(0.0));
            self.catch_up.add(beyond.max(0.0) / self.idle as f64);
        }
        self.proposed.iter_mut().for_each(Share::fade);
        for place in 0..asked.min(drafted + 1) {
            self.proposed[place].add(place < drafted);
        }
        if drafted > 0 {
            self.agreed.iter_mut().for_each(Share::fade);
            for place in 0..drafted.min(sample.accepted + 1) {
                self.agreed[place].add(place < sample.accepted);
            }
        }
    }

    /// Enters a round in the ledger, by the figures: a moment in which the machine was busy is nobody's loss, so what was
    /// measured but once does not count either. A share of the time that goes by is written off.
    fn charge(&mut self, sample: &Sample, asked: usize, drafted: usize) {
        let plain = self.step() * (sample.accepted.min(drafted) + 1) as f64;
        self.owed -= LOSS * plain;
        if asked > 0 && self.verify[drafted].samples() > 1 {
            let draft = figures::at(&self.draft, drafted, Some(0.0)) + self.behind();
            self.owed += draft + figures::at(&self.verify, drafted, None) - plain;
        }
        self.owed = self.owed.max(0.0);
    }

    /// Seconds of a plain step.
    fn step(&self) -> f64 {
        figures::at(&self.verify, 0, None)
    }

    /// Seconds that a drafter takes to read the tokens of rounds in which it was not asked.
    fn behind(&self) -> f64 {
        if self.idle > CATCH_UP {
            self.catch_up.median().unwrap_or(0.0) * self.idle as f64
        } else {
            0.0
        }
    }

    /// What may be owed now.
    fn credit(&self) -> f64 {
        LOSS_STEPS * self.step()
    }

    /// Moves, or starts or goes on with a trial. A round without a proposal told nothing of the depth on trial.
    fn decide(&mut self, told: bool) {
        if self.owed > self.credit() && self.choose() > 0 {
            self.trial = None;
            self.settle(0);
            return;
        }
        if self.trial.is_none() && self.stay > 0 {
            self.stay -= usize::from(told || self.depth == 0);
        }
        let rates = self.rates();
        let best = self.best(&rates, 0);
        if self.stay > 0 && (self.depth == 0 || best <= self.depth) {
            return;
        }
        let lead = if best == 0 { PLAIN_LEAD } else { LEAD };
        if rates[best] > rates[self.depth] * lead && self.affordable(best, 1) {
            self.trial = None;
            self.settle(best);
            return;
        }
        match &mut self.trial {
            Some(trial) => {
                trial.left -= usize::from(told || trial.depth == 0);
                if trial.left == 0 {
                    self.trial = None;
                    self.interval = (self.interval * 2).min(LONGEST_INTERVAL);
                    self.wait = self.interval;
                }
            }
            None => {
                self.wait = self.wait.saturating_sub(1);
                if self.wait == 0 {
                    self.try_another(&rates);
                }
            }
        }
    }

    fn settle(&mut self, depth: usize) {
        self.depth = depth;
        self.stay = STAY;
        self.interval = INTERVAL;
        self.wait = INTERVAL;
    }

    fn try_another(&mut self, rates: &[f64]) {
        if self.depth == 0 {
            let best = self.best(rates, 1);
            let depth = [best, 1].into_iter().find(|&depth| self.affordable(depth, TRIAL));
            if let Some(depth) = depth.filter(|&depth| depth <= self.most) {
                self.agreed.iter_mut().for_each(|share| share.forget(MEMORY));
                self.trial = Some(Trial { depth, left: TRIAL });
            }
            return;
        }
        let neighbours = [0, self.depth - 1, self.depth + 1];
        let oldest = neighbours
            .into_iter()
            .filter(|&depth| depth <= self.most)
            .min_by_key(|&depth| self.asked[depth]);
        if let Some(depth) = oldest {
            // What is measured now outvotes what was measured then.
            self.draft[depth].forget();
            self.verify[depth].forget();
            let left = NEIGHBOUR_TRIAL;
            self.trial = Some(Trial { depth, left });
        }
    }

    /// Whether `rounds` rounds of a depth are covered though every proposal be wrong.
    fn affordable(&self, depth: usize, rounds: usize) -> bool {
        if depth == 0 || depth > self.most {
            return depth == 0;
        }
        let round = figures::at(&self.draft, depth, Some(0.0)) + figures::at(&self.verify, depth, None);
        self.owed + self.behind() + (round - self.step()).max(0.0) * rounds as f64 <= self.credit()
    }

    /// The depth of most tokens a second, of those not below `least` nor far beyond what was ever run. The lowest among
    /// equals.
    fn best(&self, rates: &[f64], least: usize) -> usize {
        let reach = self.most.min((2 * self.deepest).max(1));
        let better = |best, depth| if rates[depth] > rates[best] { depth } else { best };
        (least..=reach).fold(least.min(reach), better)
    }

    /// Tokens a second that the figures promise, by depth.
    fn rates(&self) -> Vec<f64> {
        let round = |drafted| {
            let seconds =
                figures::at(&self.draft, drafted, Some(0.0)) + figures::at(&self.verify, drafted, None);
            seconds.max(f64::MIN_POSITIVE)
        };
        let mut rates = vec![1.0 / self.step().max(f64::MIN_POSITIVE)];
        // How likely a proposal is at least so long, and that all of it agrees; tokens, and seconds of shorter proposals.
        let (mut length, mut agreement) = (1.0, 1.0);
        let (mut tokens, mut shorter) = (1.0, 0.0);
        // A place of which little is known is taken to agree as often as the one before it.
        let mut agreed = self.agreed.first().map_or(0.0, Share::mean);
        for place in 0..self.most {
            let proposed = self.proposed[place].value(1.0);
            agreed = self.agreed[place].value(agreed);
            shorter += length * (1.0 - proposed) * round(place);
            length *= proposed;
            agreement *= proposed * agreed;
            tokens += agreement;
            rates.push(tokens / (shorter + length * round(place + 1)));
        }
        rates
    }
}
