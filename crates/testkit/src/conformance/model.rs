//! Models: their caches' laws, and those of a call.

use recant_core::{Cache, CacheOptions, CacheStack, Hidden, LanguageModel, Rows, Segment, Snapshot};

use super::lab::{rows_of, Bits};
use super::{stack, Options};
use crate::Failure;

pub(super) fn check(
    model: &dyn LanguageModel,
    caches: &CacheOptions,
    options: &Options,
) -> Result<(), Failure> {
    // A first try, so that what follows may rely on it.
    new_caches(model, caches)?;
    let make = || match model.new_caches(caches) {
        Ok(stack) => stack,
        Err(error) => unreachable!("caches were made a moment ago: {error}"),
    };
    let feed = |stack: &mut CacheStack, tokens: &[u32]| {
        let mut output = model.forward(&mut [Segment::new(tokens, stack, Rows::All)])?;
        let segment = output.segments.pop();
        let segment = segment.ok_or_else(|| recant_core::Error::mismatch("segments of an output", 1, 0))?;
        segment.logits().cloned()
    };
    stack::check(&make, &feed, options)?;
    rows_asked_for(model, caches)?;
    batches(model, caches)?;
    refusals(model, caches)
}

fn new_caches(model: &dyn LanguageModel, caches: &CacheOptions) -> Result<CacheStack, Failure> {
    let law = "a model makes caches that it takes";
    let stack = done(law, "new_caches()", model.new_caches(caches))?;
    done(law, "belongs_to()", stack.belongs_to(&model.spec().layout))?;
    Ok(stack)
}

fn rows_asked_for(model: &dyn LanguageModel, caches: &CacheOptions) -> Result<(), Failure> {
    let law = "which rows are asked for changes neither their bits nor the caches";
    let tokens = [3, 1, 4, 1, 5];
    let (all, hidden, held) = run(law, model, caches, &tokens, Rows::All)?;
    for rows in [Rows::None, Rows::Last, Rows::All] {
        let (found, same_hidden, same_held) = run(law, model, caches, &tokens, rows)?;
        let expected = all.split_at(all.len() - rows.count(all.len())).1;
        if found != expected || hidden != same_hidden {
            return Err(broken(
                law,
                format!("{rows:?} of 5 rows gave other bits than all of them"),
            ));
        }
        if let Some(difference) = held.difference(&same_held) {
            return Err(broken(law, format!("asked for {rows:?}: {difference}")));
        }
    }
    Ok(())
}

/// Logits, hidden rows and caches after `tokens`.
fn run(
    law: &'static str,
    model: &dyn LanguageModel,
    caches: &CacheOptions,
    tokens: &[u32],
    rows: Rows,
) -> Result<(Vec<Bits>, Vec<Bits>, Snapshot), Failure> {
    let mut stack = new_caches(model, caches)?;
    let mut segment = Segment::new(tokens, &mut stack, rows);
    segment.hidden = Some(Hidden::PostNorm);
    let output = done(law, "forward()", model.forward(&mut [segment]))?;
    let [segment] = output.segments.as_slice() else {
        return Err(broken(law, format!("one segment gave {}", output.segments.len())));
    };
    if segment.logits.is_some() != (rows.count(tokens.len()) > 0) {
        return Err(broken(
            law,
            format!("asked for {rows:?}, logits: {:?}", segment.logits),
        ));
    }
    let bits = |tensor: Option<&candle_core::Tensor>| match tensor {
        None => Ok(Vec::new()),
        Some(tensor) => done(law, "reading rows", rows_of(tensor).map_err(Into::into)),
    };
    let (logits, hidden) = (bits(segment.logits.as_ref())?, bits(segment.hidden.as_ref())?);
    if hidden.len() != tokens.len() {
        return Err(broken(
            law,
            format!("{} tokens have {} hidden rows", tokens.len(), hidden.len()),
        ));
    }
    Ok((logits, hidden, done(law, "snapshot()", stack.snapshot())?))
}

fn batches(model: &dyn LanguageModel, caches: &CacheOptions) -> Result<(), Failure> {
    let law = "sequences that share a call give what each gives alone";
    let texts: [&[u32]; 3] = [&[3, 1, 4, 1, 5], &[2], &[7, 7, 7]];
    for order in [[0, 1, 2], [2, 0, 1]] {
        let mut stacks = Vec::new();
        for _ in order {
            stacks.push(new_caches(model, caches)?);
        }
        // The second call finds each sequence at another length.
        for half in 0..2 {
            let cut = |text: &'static [u32]| -> &[u32] { text.split_at(text.len().div_ceil(2)).0 };
            let mut batch: Vec<Segment<'_>> = order
                .iter()
                .zip(&mut stacks)
                .map(|(text, stack)| {
                    let tokens = if half == 0 {
                        cut(texts[*text])
                    } else {
                        texts[*text]
                    };
                    Segment::new(tokens, stack, Rows::All)
                })
                .collect();
            let output = done(law, "forward()", model.forward(&mut batch))?;
            if output.segments.len() != order.len() {
                return Err(broken(law, format!("3 segments gave {}", output.segments.len())));
            }
            for (text, segment) in order.iter().zip(&output.segments) {
                let mut fed = cut(texts[*text]).to_vec();
                let seen = if half == 0 { 0 } else { fed.len() };
                if half == 1 {
                    fed.extend(texts[*text]);
                }
                let (alone, _, _) = run(law, model, caches, &fed, Rows::All)?;
                let logits = done(law, "reading logits", segment.logits())?;
                let found = done(law, "reading logits", rows_of(logits).map_err(Into::into))?;
                if found != alone[seen..] {
                    return Err(broken(
                        law,
                        format!("text {text} of {texts:?}, call {half}, has other logits"),
                    ));
                }
            }
        }
        for (text, stack) in order.iter().zip(&stacks) {
            let mut fed = texts[*text].split_at(texts[*text].len().div_ceil(2)).0.to_vec();
            fed.extend(texts[*text]);
            let (_, _, alone) = run(law, model, caches, &fed, Rows::None)?;
            let held = done(law, "snapshot()", stack.snapshot())?;
            if let Some(difference) = held.difference(&alone) {
                return Err(broken(law, format!("text {text} of {texts:?}: {difference}")));
            }
        }
    }
    Ok(())
}

fn refusals(model: &dyn LanguageModel, caches: &CacheOptions) -> Result<(), Failure> {
    let law = "a call that is refused changes no cache, those of the other sequences included";
    let spec = model.spec();
    let outside = [1, u32::try_from(spec.vocab_size).unwrap_or(u32::MAX)];
    let too_long = vec![0; spec.max_positions.saturating_add(1).min(1 << 20)];
    let mut wrong: Vec<(&str, &[u32])> = vec![("no tokens", &[]), ("an id outside the vocabulary", &outside)];
    if too_long.len() > spec.max_positions {
        wrong.push(("more tokens than the model has positions", &too_long));
    }
    for (what, tokens) in wrong {
        let (mut good, mut bad) = (new_caches(model, caches)?, new_caches(model, caches)?);
        for stack in [&mut good, &mut bad] {
            done(
                law,
                "forward()",
                model.forward(&mut [Segment::new(&[1, 2], stack, Rows::None)]),
            )?;
        }
        let before = done(law, "snapshot()", good.snapshot())?;
        let mut batch = [
            Segment::new(&[3, 4], &mut good, Rows::Last),
            Segment::new(tokens, &mut bad, Rows::Last),
        ];
        if model.forward(&mut batch).is_ok() {
            return Err(broken(law, format!("{what} were taken")));
        }
        for stack in [&good, &bad] {
            let after = done(law, "snapshot() after a refusal", stack.snapshot())?;
            if let Some(difference) = after.difference(&before) {
                return Err(broken(law, format!("after a refusal of {what}: {difference}")));
            }
        }
    }
    Ok(())
}

fn done<T>(law: &'static str, step: &str, result: recant_core::Result<T>) -> Result<T, Failure> {
    result.map_err(|source| Failure::Refused {
        law,
        scene: String::from("a model with new caches"),
        step: step.to_owned(),
        source: Box::new(source),
    })
}

fn broken(law: &'static str, detail: String) -> Failure {
    Failure::Broken {
        law,
        scene: String::from("a model with new caches"),
        detail,
    }
}
