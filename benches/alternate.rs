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
    mut run: impl FnMut(usize) -> Result<Duration, E>,
) -> Result<Vec<Duration>, E> {
    let mut times = vec![Vec::with_capacity(rounds); variants];
    for round in 0..=rounds {
        for (variant, times) in times.iter_mut().enumerate() {
            let time = run(variant)?;
            if round > 0 {
                times.push(time);
            }
        }
    }
    Ok(times
        .into_iter()
        .map(|mut times| {
            times.sort_unstable();
            times[times.len() / 2]
        })
        .collect())
}

/// Milliseconds.
pub fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
