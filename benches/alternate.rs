//! Medians of several variants run in turn, so that a shared machine's moods fall on all of them alike.

use std::convert::Infallible;
use std::time::Duration;

/// Runs each of `variants` once in turn, `rounds` times after one that is not counted, and gives their medians.
pub fn medians(variants: usize, rounds: usize, mut run: impl FnMut(usize) -> Duration) -> Vec<Duration> {
    let Ok(medians) = try_medians(variants, rounds, |variant| Ok::<_, Infallible>(run(variant)));
    medians
}

/// [`medians`] of what can fail.
pub fn try_medians<E>(
    variants: usize,
    rounds: usize,
    run: impl FnMut(usize) -> Result<Duration, E>,
) -> Result<Vec<Duration>, E> {
    let times = sorted(variants, rounds, run)?;
    Ok(times.iter().map(|times| times[times.len() / 2]).collect())
}

/// The least times instead of the medians: for differences that are small beside a shared machine's moods.
pub fn try_least<E>(
    variants: usize,
    rounds: usize,
    run: impl FnMut(usize) -> Result<Duration, E>,
) -> Result<Vec<Duration>, E> {
    let times = sorted(variants, rounds, run)?;
    Ok(times.iter().map(|times| times[0]).collect())
}

fn sorted<E>(
    variants: usize,
    rounds: usize,
    mut run: impl FnMut(usize) -> Result<Duration, E>,
) -> Result<Vec<Vec<Duration>>, E> {
    let mut times = vec![Vec::with_capacity(rounds); variants];
    for round in 0..=rounds {
        for (variant, times) in times.iter_mut().enumerate() {
            let time = run(variant)?;
            if round > 0 {
                times.push(time);
            }
        }
    }
    times.iter_mut().for_each(|times| times.sort_unstable());
    Ok(times)
}

/// Milliseconds.
pub fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
