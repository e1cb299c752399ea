//! Depths chosen in simulated worlds, where what is best is known.

use super::*;

/// A machine, a pair of models and a text.
#[derive(Clone, Copy)]
struct World {
    /// Seconds of proposing so many tokens.
    draft: fn(usize) -> f64,
    /// Seconds of a pass over so many rows.
    verify: fn(usize) -> f64,
    /// How often the token at a place agrees, given those before it.
    agrees: fn(usize) -> f64,
    /// How often anything is proposed.
    proposes: f64,
    /// Seconds in which the drafter reads a token of a round in which it was not asked.
    reads: f64,
}

const WORLD: World = World {
    draft: |k| 0.1 * k as f64,
    verify: |rows| 0.95 + 0.05 * rows as f64,
    agrees: |_| 0.8,
    proposes: 1.0,
    reads: 0.0,
};

/// Times are uneven, and one in thirty is that of a busy machine.
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }

    fn noisy(&mut self, seconds: f64) -> f64 {
        let busy = if self.roll() < 1.0 / 30.0 { 8.0 } else { 1.0 };
        seconds * busy * (0.95 + 0.1 * self.roll())
    }
}

/// A run: what was chosen, and what it cost without the noise.
struct Run {
    controller: Controller,
    dice: Dice,
    idle: usize,
    depths: Vec<usize>,
    tokens: usize,
    seconds: f64,
}

impl Run {
    fn new(most: usize, seed: u64) -> Self {
        Self {
            controller: Controller::new(most),
            dice: Dice(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1),
            idle: 0,
            depths: Vec::new(),
            tokens: 0,
            seconds: 0.0,
        }
    }

    fn go(&mut self, world: &World, tokens: usize) -> &mut Self {
        (self.depths, self.tokens, self.seconds) = (Vec::new(), 0, 0.0);
        while self.tokens < tokens {
            let asked = self.controller.choose();
            let drafted = if self.dice.roll() < world.proposes {
                asked
            } else {
                0
            };
            let accepted = (0..drafted)
                .take_while(|&place| self.dice.roll() < (world.agrees)(place))
                .count();
            let mut draft = 0.0;
            if asked > 0 {
                draft = (world.draft)(drafted) + world.reads * std::mem::take(&mut self.idle) as f64;
            } else {
                self.idle += 1;
            }
            let verify = (world.verify)(drafted + 1);
            self.seconds += draft + verify;
            self.tokens += accepted + 1;
            self.depths.push(asked);
            self.controller.record(&Sample {
                asked,
                drafted,
                accepted,
                draft: self.dice.noisy(draft),
                verify: self.dice.noisy(verify),
            });
        }
        self
    }

    /// Seconds over those of plain decoding.
    fn over_plain(&self, world: &World) -> f64 {
        self.seconds / (self.tokens as f64 * (world.verify)(1))
    }

    /// Speed over that of the best depth held all the time.
    fn of_the_best(&self, world: &World, most: usize) -> f64 {
        let best = (0..=most).map(|k| rate(world, k)).fold(0.0, f64::max);
        self.tokens as f64 / self.seconds / best
    }
}

/// Tokens a second at a fixed depth.
fn rate(world: &World, k: usize) -> f64 {
    let mut alive = 1.0;
    let mut tokens = 1.0;
    for place in 0..k {
        alive *= (world.agrees)(place);
        tokens += alive * world.proposes;
    }
    let silent = 1.0 - world.proposes;
    let silence = if k > 0 { (world.draft)(0) } else { 0.0 };
    let full = (world.draft)(k) + (world.verify)(k + 1);
    match k {
        0 => 1.0 / (world.verify)(1),
        _ => tokens / (world.proposes * full + silent * (silence + (world.verify)(1))),
    }
}

#[test]
fn the_best_depth_is_found_in_worlds_of_many_kinds() {
    let worlds: [(&str, World); 9] = [
        (
            "cheap drafts that mostly agree",
            World {
                draft: |k| 0.02 * k as f64,
                agrees: |_| 0.95,
                ..WORLD
            },
        ),
        ("the usual", WORLD),
        (
            "agreement that falls with depth",
            World {
                agrees: |place| [0.9, 0.8, 0.6, 0.4, 0.3, 0.2][place.min(5)],
                ..WORLD
            },
        ),
        (
            "rows that cost",
            World {
                verify: |rows| 0.6 + 0.4 * rows as f64,
                ..WORLD
            },
        ),
        (
            "a first row that costs much, then none",
            World {
                verify: |rows| if rows > 1 { 1.6 } else { 1.0 },
                draft: |k| 0.03 * k as f64,
                ..WORLD
            },
        ),
        (
            "rows that are cheap up to four",
            World {
                verify: |rows| if rows > 4 { 2.5 } else { 1.0 + 0.02 * rows as f64 },
                agrees: |_| 0.9,
                ..WORLD
            },
        ),
        (
            "guesses for nothing, now and then",
            World {
                draft: |_| 1e-4,
                agrees: |_| 0.9,
                proposes: 0.3,
                ..WORLD
            },
        ),
        (
            "a block of guesses in one go",
            World {
                draft: |k| if k > 0 { 0.5 } else { 0.0 },
                agrees: |_| 0.85,
                ..WORLD
            },
        ),
        (
            "drafts that nearly pay",
            World {
                draft: |k| 0.45 * k as f64,
                agrees: |_| 0.5,
                ..WORLD
            },
        ),
    ];
    for (what, world) in worlds {
        for most in [1, 4, 8, 16] {
            let (mut early, mut late) = (Vec::new(), Vec::new());
            for seed in 1..11 {
                let mut run = Run::new(most, seed);
                early.push(run.go(&world, 1000).of_the_best(&world, most));
                late.push(run.go(&world, 4000).of_the_best(&world, most));
            }
            let mean = |shares: &[f64]| shares.iter().sum::<f64>() / shares.len() as f64;
            let least = |shares: &[f64]| shares.iter().copied().fold(1.0, f64::min);
            assert!(
                mean(&early) > 0.92 && least(&early) > 0.8,
                "{what}, most {most}: {early:.3?} of the best at first"
            );
            assert!(
                mean(&late) > 0.95 && least(&late) > 0.85,
                "{what}, most {most}: {late:.3?} of the best"
            );
        }
    }
}

#[test]
fn c118_drafting_that_does_not_pay_costs_at_most_three_in_a_hundred() {
    let wrong = World {
        agrees: |_| 0.0,
        ..WORLD
    };
    let worlds: [(&str, World); 8] = [
        ("always wrong", wrong),
        (
            "always wrong, at no cost but the rows",
            World {
                draft: |_| 1e-4,
                ..wrong
            },
        ),
        (
            "always wrong, and a little too dear",
            World {
                draft: |k| 0.001 * k as f64,
                verify: |rows| 0.98 + 0.02 * rows as f64,
                ..wrong
            },
        ),
        (
            "always right, slower than decoding",
            World {
                draft: |k| 1.2 * k as f64,
                agrees: |_| 1.0,
                ..WORLD
            },
        ),
        (
            "slow and wrong",
            World {
                draft: |k| 5.0 * k as f64,
                ..wrong
            },
        ),
        (
            "slow to say nothing",
            World {
                draft: |_| 0.5,
                proposes: 0.0,
                ..WORLD
            },
        ),
        ("slow to catch up", World { reads: 0.1, ..wrong }),
        (
            "each row as dear as one, half right",
            World {
                verify: |rows| rows as f64,
                agrees: |_| 0.5,
                ..WORLD
            },
        ),
    ];
    for (what, world) in worlds {
        for most in [1, 4, 8] {
            for seed in 1..6 {
                let mut run = Run::new(most, seed);
                for part in 0..5 {
                    let cost = run.go(&world, 1000).over_plain(&world);
                    assert!(
                        cost < 1.03,
                        "{what}, most {most}, seed {seed}, part {part}: {cost:.3} of plain"
                    );
                }
                // Where it loses next to nothing it may go on.
                let plain = run.depths.iter().filter(|&&k| k == 0).count();
                let loses = world.proposes > 0.0 && rate(&world, 1) * (world.verify)(1) < 0.95;
                assert!(
                    !loses || plain * 10 > run.depths.len() * 9,
                    "{what}: it goes on drafting"
                );
            }
        }
    }
}

#[test]
fn a_change_is_followed_both_ways() {
    let wrong = World {
        agrees: |_| 0.0,
        ..WORLD
    };
    let right = World {
        agrees: |_| 0.95,
        ..WORLD
    };
    let slow = World {
        verify: |rows| 0.5 + 0.5 * rows as f64,
        ..right
    };
    for seed in 1..8 {
        let mut run = Run::new(8, seed);
        run.go(&right, 2000);
        run.go(&wrong, 60);
        assert!(
            run.go(&wrong, 500).over_plain(&wrong) < 1.03,
            "seed {seed}: it ends when it stops to pay"
        );
        run.go(&wrong, 3000);
        run.go(&right, 600);
        let late = run.go(&right, 1000).of_the_best(&right, 8);
        assert!(
            late > 0.9,
            "seed {seed}: {late:.3} of the best after it pays again"
        );
        run.go(&slow, 600);
        let late = run.go(&slow, 1000).of_the_best(&slow, 8);
        assert!(
            late > 0.9,
            "seed {seed}: {late:.3} of the best after rows became dear"
        );
    }
}

#[test]
fn dear_drafts_are_taken_up_again_at_the_first_trial_that_goes_well() {
    let wrong = World {
        draft: |k| 0.4 * k as f64,
        agrees: |_| 0.0,
        ..WORLD
    };
    let right = World {
        agrees: |_| 0.95,
        ..wrong
    };
    for seed in 1..8 {
        let mut run = Run::new(8, seed);
        run.go(&right, 2000);
        run.go(&wrong, 3500);
        run.go(&right, LONGEST_INTERVAL + 100);
        let late = run.go(&right, 500).of_the_best(&right, 8);
        assert!(
            late > 0.8,
            "seed {seed}: {late:.3} of the best; plain decoding is below 0.65"
        );
    }
}

#[test]
fn trials_grow_rare_where_drafting_does_not_pay() {
    let world = World {
        agrees: |_| 0.0,
        ..WORLD
    };
    let mut run = Run::new(4, 3);
    run.go(&world, 8000);
    let drafting: Vec<usize> = (0..run.depths.len()).filter(|&i| run.depths[i] > 0).collect();
    let gaps: Vec<usize> = drafting
        .windows(2)
        .map(|w| w[1] - w[0])
        .filter(|&gap| gap > 1)
        .collect();
    assert!(gaps.windows(2).all(|w| w[0] <= w[1] + 4), "{gaps:?}");
    assert!(gaps.iter().any(|&gap| gap > 400) && gaps[0] < 50, "{gaps:?}");
}

#[test]
fn rounds_without_a_proposal_leave_the_figures_as_they_were() {
    let mut controller = Controller::new(4);
    let sample = |asked, drafted, accepted| Sample {
        asked,
        drafted,
        accepted,
        draft: 0.1 * drafted as f64,
        verify: 0.9 + 0.1 * (drafted + 1) as f64,
    };
    for _ in 0..3 {
        controller.record(&sample(0, 0, 0));
    }
    for _ in 0..30 {
        controller.record(&sample(4, 4, 3));
    }
    let figures = |c: &Controller| {
        let agreed: Vec<f64> = c.agreed.iter().map(|share| share.value(0.5)).collect();
        let seconds: Vec<f64> = (0..5)
            .map(|i| figures::at(&c.verify, i, None) + figures::at(&c.draft, i, Some(0.0)))
            .collect();
        (agreed, seconds)
    };
    let before = figures(&controller);
    for _ in 0..100 {
        controller.record(&sample(4, 0, 0));
    }
    assert_eq!(figures(&controller), before);
}

#[test]
fn shorter_rounds_than_chosen_and_absurd_depths_do_no_harm() {
    let mut controller = Controller::new(usize::MAX);
    assert!(controller.serves(usize::MAX) && !controller.serves(5));
    for round in 0..2000 {
        let asked = controller.choose().min(round % 3);
        controller.record(&Sample {
            asked,
            drafted: asked,
            accepted: asked,
            draft: if round % 50 == 0 { f64::NAN } else { 0.0 },
            verify: 0.0,
        });
        assert!(controller.choose() <= 64);
    }
    let mut none = Controller::new(0);
    for _ in 0..2000 {
        assert_eq!(none.choose(), 0);
        none.record(&Sample {
            asked: 0,
            drafted: 0,
            accepted: 0,
            draft: 0.0,
            verify: 1.0,
        });
    }
}

#[test]
fn what_is_not_measured_lies_on_the_line_between_neighbours() {
    let mut known = vec![Seconds::default(); 8];
    assert_eq!(figures::at(&known, 3, None), 0.0);
    [5.0, 1.0, 1.0].into_iter().for_each(|s| known[2].add(s));
    assert_eq!(figures::at(&known, 2, None), 1.0, "a slow moment does not count");
    assert_eq!(
        figures::at(&known, 5, None),
        1.0,
        "one figure alone is hoped to hold beyond"
    );
    assert_eq!(
        figures::at(&known, 4, Some(0.0)),
        2.0,
        "with an origin there is a line"
    );
    known[4].add(3.0);
    assert_eq!(
        [1, 3, 4, 6].map(|i| figures::at(&known, i, None)),
        [1.0, 2.0, 3.0, 5.0]
    );
    known[5].add(1.0);
    assert_eq!(
        figures::at(&known, 7, None),
        1.0,
        "more tokens are never hoped to take less time"
    );
}
