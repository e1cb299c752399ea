//! The grouping law and random schedules, on any model.

use std::path::Path;

use recant::candle::Tensor;
use recant::core::{Cache, CacheOptions, LanguageModel, Rows, Segment};
use recant::{ActivationPrecision, LoadOptions, Threads};
use recant_layers::HybridModel;
use recant_weights::Folder;

use super::{assert_same, feed, relative_error, seeded, Result, Rng};

/// Drafts of a round.
const DRAFTS: usize = 4;

/// Activations as they are, so that nothing but the order of sums differs from plain floats.
pub fn in_full() -> LoadOptions {
    LoadOptions {
        activations: ActivationPrecision::Full,
        ..LoadOptions::default()
    }
}

/// A model without a tokenizer.
pub fn model(path: &Path, options: &LoadOptions) -> Result<HybridModel> {
    let folder = Folder::open(path)?;
    let family = seeded::family(folder.config());
    Ok(HybridModel::load(family, &folder, options, &mut |_, _| {})?.0)
}

/// Greedy tokens after a prompt, one a call, and by how much each was ahead of the next.
pub fn greedy(model: &dyn LanguageModel, prompt: &[u32], count: usize) -> Result<(Vec<u32>, Vec<f32>)> {
    let mut caches = model.new_caches(&CacheOptions::default())?;
    let (mut text, mut margins) = (Vec::new(), Vec::new());
    let mut fed = prompt.to_vec();
    for _ in 0..count {
        let output = model.forward(&mut [Segment::new(&fed, &mut caches, Rows::Last)])?;
        let row = output.segments[0].logits()?.flatten_all()?.to_vec1::<f32>()?;
        let mut order: Vec<usize> = (0..row.len()).collect();
        order.sort_by(|a, b| row[*b].total_cmp(&row[*a]));
        margins.push(row[order[0]] - row[order[1]]);
        text.push(order[0] as u32);
        fed = vec![order[0] as u32];
    }
    Ok((text, margins))
}

/// How far the logits of a checkpoint are from those of another with the same numbers, which must not be of one size.
pub fn apart(what: &str, own: &Path, other: &Path) -> Result<f32> {
    let run = |path: &Path| -> Result<Tensor> {
        let model = model(path, &in_full())?;
        let tokens: Vec<u32> = (0..40).map(|i| (7 * i + 3) % 250).collect();
        let mut caches = model.new_caches(&CacheOptions::default())?;
        let output = model.forward(&mut [Segment::new(&tokens, &mut caches, Rows::All)])?;
        Ok(output.segments[0].logits()?.clone())
    };
    let (found, want) = (run(own)?, run(other)?);
    let row = want.get(39)?.to_vec1::<f32>()?;
    let spread = row.iter().copied().fold(f32::MIN, f32::max) - row.iter().copied().fold(f32::MAX, f32::min);
    assert!(spread > 0.1, "{what}: logits of one size");
    relative_error(&found, &want)
}

/// Fails unless logits and caches are the same bits however tokens are grouped, on whatever threads, and whatever was drafted and
/// taken back between. Gives the bits of each token's logits.
pub fn keeps_the_law(what: &str, model: &dyn LanguageModel, ids: &[u32]) -> Result<Vec<Vec<u32>>> {
    let mut rng = Rng(23);
    let mut plain = model.new_caches(&CacheOptions::default())?;
    let mut rows = Vec::new();
    for id in ids {
        rows.push(feed(model, &mut plain, &[*id])?);
    }
    let expected = rows.concat();
    for round in 0..4 {
        let pieces = match round {
            0 => vec![ids.len()],
            _ => rng.partition(ids.len(), 24),
        };
        let threads = Threads::new(1 + round % 3)?;
        let mut caches = model.new_caches(&CacheOptions::default())?;
        let (mut found, mut rest) = (Vec::new(), ids);
        for piece in &pieces {
            let (now, later) = rest.split_at(*piece);
            found.extend(threads.run(|| feed(model, &mut caches, now).map_err(|error| error.to_string()))?);
            rest = later;
        }
        assert!(found == expected, "{what}: {pieces:?}");
        assert_same(&format!("{what}: {pieces:?}"), &plain, &caches)?;
    }
    follows_a_random_schedule(what, model, ids, &rows, &mut rng)?;
    Ok(rows)
}

/// Rounds of drafts, of which every number from none to all is kept as often.
fn follows_a_random_schedule(
    what: &str,
    model: &dyn LanguageModel,
    ids: &[u32],
    rows: &[Vec<u32>],
    rng: &mut Rng,
) -> Result<()> {
    let (mut plain, mut caches) = (
        model.new_caches(&CacheOptions::default())?,
        model.new_caches(&CacheOptions::default())?,
    );
    let vocabulary = rows[0].len() as u32;
    let (mut at, mut deck) = (0, Vec::new());
    while at + DRAFTS < ids.len() {
        if deck.is_empty() {
            deck.extend(0..=DRAFTS);
        }
        let kept = 1 + deck.swap_remove(rng.below(deck.len()));
        // The pending token, drafts that are right, and others.
        let mut fed = ids[at..at + kept].to_vec();
        fed.extend(
            ids[at + kept..=at + DRAFTS]
                .iter()
                .map(|id| (id + 1) % vocabulary),
        );
        let checkpoint = caches.checkpoint()?;
        let found = feed(model, &mut caches, &fed)?;
        caches.trim(fed.len() - kept)?;
        caches.commit(checkpoint);
        let expected = rows[at..at + kept].concat();
        assert!(found[..expected.len()] == expected, "{what}: {kept} kept at {at}");
        feed(model, &mut plain, &ids[at..at + kept])?;
        assert_same(&format!("{what}: {kept} kept at {at}"), &plain, &caches)?;
        at += kept;
    }
    Ok(())
}
