//! What ends a run, what a round may not do, and what is left when something fails: the caches always hold the text but its
//! pending token, and going on gives what an unbroken run gives.

mod common;

use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

use common::{assert_same, feed, folder_or_skip, load, text_ids, tiny, Result};
use recant::candle::Tensor;
use recant::core::{
    AttentionCache, AttentionLayout, Cache, CacheOptions, CacheStack, Cancel, Checkpoint, Error as CoreError,
    Footprint, KvCache, KvView, LanguageModel, LayerCache, LayerLayout, ModelSpec, Rows, Segment, Snapshot,
};
use recant::generate::{
    step, CombinedDrafter, Decoder, Depth, Done, DraftVocabulary, Drafter, Error, Finish, Limits,
    ModelDrafter, NgramDrafter, Step,
};
use serde_json::json;

fn prompt(n: u32) -> Vec<u32> {
    (0..n).map(|i| (7 * i + 3) % 250).collect()
}

fn decoder(model: &Arc<dyn LanguageModel>) -> Result<Decoder> {
    Ok(Decoder::new(
        model.clone(),
        model.new_caches(&CacheOptions::default())?,
        usize::MAX,
    )?)
}

/// A decoder that drafts with the target's own weights: everything is accepted.
fn self_drafting(model: &Arc<dyn LanguageModel>, k: usize) -> Result<Decoder> {
    let drafter = ModelDrafter::new(model.clone(), &CacheOptions::default())?;
    Ok(decoder(model)?.with_drafter(Box::new(drafter), k)?)
}

fn limits(max_tokens: usize, draft_tokens: usize, eos: &[u32]) -> Limits {
    Limits {
        max_tokens,
        depth: Depth::Fixed(draft_tokens),
        eos: eos.to_vec(),
    }
}

/// Runs to the end and gives why.
fn run(decoder: &mut Decoder, limits: Limits) -> Result<Finish> {
    let mut generation = decoder.generate(limits);
    for round in generation.by_ref() {
        round?;
    }
    generation.finish().ok_or_else(|| "it did not end".into())
}

fn plain_text(model: &Arc<dyn LanguageModel>, prompt: &[u32], tokens: usize) -> Result<Vec<u32>> {
    let mut plain = decoder(model)?;
    plain.prefill(prompt, &mut |_, _| {})?;
    run(&mut plain, limits(tokens, 0, &[]))?;
    Ok(plain.tokens().to_vec())
}

/// The caches hold the text but the pending token, bit for bit as a plain feed leaves them.
fn in_step(what: &str, decoder: &Decoder) -> Result<()> {
    let held = decoder.tokens().len() - 1;
    assert_eq!(decoder.caches().len(), held, "{what}");
    assert_eq!(decoder.pending(), decoder.tokens().last().copied(), "{what}");
    let mut fresh = decoder.model().new_caches(&CacheOptions::default())?;
    feed(&**decoder.model(), &mut fresh, &decoder.tokens()[..held])?;
    assert_same(what, &fresh, decoder.caches())
}

/// Proposes what it is told to, round by round; nothing when it has no more orders.
struct Told {
    rounds: Vec<Vec<u32>>,
    next: usize,
}

impl Told {
    fn new(rounds: Vec<Vec<u32>>) -> Box<Self> {
        Box::new(Self { rounds, next: 0 })
    }
}

impl Drafter for Told {
    fn attach(&mut self, _target: &ModelSpec, _vocab: usize) -> recant::generate::Result<()> {
        Ok(())
    }

    fn prefill(&mut self, _tokens: &[u32], _hidden: Option<&Tensor>) -> recant::generate::Result<()> {
        Ok(())
    }

    fn propose(&mut self, _k: usize) -> recant::generate::Result<Vec<u32>> {
        self.next += 1;
        Ok(self.rounds.get(self.next - 1).cloned().unwrap_or_default())
    }

    fn observe(&mut self, _tokens: &[u32], _hidden: Option<&Tensor>) {}

    fn reset(&mut self) {}
}

#[test]
fn c088_exactly_as_many_tokens_come_as_asked_for_and_the_session_goes_on() -> Result<()> {
    let model = tiny(|_| {})?;
    let text = plain_text(&model, &prompt(12), 40)?;
    for max in [0, 1, 2, 3, 5, 6, 11] {
        for k in [0, 1, 4, 7] {
            let what = format!("max {max}, k {k}");
            let mut decoder = self_drafting(&model, k)?;
            decoder.prefill(&prompt(12), &mut |_, _| {})?;
            assert_eq!(run(&mut decoder, limits(max, k, &[]))?, Finish::Length, "{what}");
            assert_eq!(decoder.tokens(), &text[..12 + max], "{what}");
            in_step(&what, &decoder)?;
            assert_eq!(run(&mut decoder, limits(20, k, &[]))?, Finish::Length, "{what}");
            assert_eq!(decoder.tokens(), &text[..12 + max + 20], "{what}");
            in_step(&what, &decoder)?;
        }
    }
    Ok(())
}

#[test]
fn c089_nothing_comes_after_an_end_token_wherever_it_falls_in_a_block() -> Result<()> {
    let model = tiny(|_| {})?;
    let text = plain_text(&model, &prompt(12), 40)?;
    let mut inside = 0;
    for k in 0..=8 {
        for at in 0..10 {
            let eos = text[12 + at];
            if text[12..12 + at].contains(&eos) {
                continue;
            }
            let what = format!("k {k}, end after {at}");
            let mut decoder = self_drafting(&model, k)?;
            decoder.prefill(&prompt(12), &mut |_, _| {})?;
            let mut generation = decoder.generate(limits(30, k, &[eos]));
            let mut last = None;
            for round in generation.by_ref() {
                last = Some(round?);
            }
            assert_eq!(generation.finish(), Some(Finish::Eos), "{what}");
            let last = last.ok_or("no round")?;
            assert!(last.ended, "{what}");
            inside += usize::from(last.drafted >= last.tokens.len());
            assert_eq!(decoder.tokens(), &text[..12 + at + 1], "{what}");
            in_step(&what, &decoder)?;
            // Going on past the end token gives what a run that did not know of it gives.
            run(&mut decoder, limits(10, k, &[]))?;
            assert_eq!(decoder.tokens(), &text[..12 + at + 11], "{what}");
        }
    }
    assert!(
        inside > 10,
        "the end token fell inside a block {inside} times only"
    );
    Ok(())
}

#[test]
fn c093_prompts_and_drafts_end_at_the_context() -> Result<()> {
    let model = tiny(|text| text["max_position_embeddings"] = json!(32))?;
    let long = plain_text(&tiny(|_| {})?, &prompt(20), 40)?;
    for n in [33, 100] {
        let error = self_drafting(&model, 4)?.prefill(&prompt(n), &mut |_, _| {});
        assert!(error.is_err_and(|e| e.to_string().contains("the model takes 32")));
    }
    for n in [1, 20, 30, 31, 32] {
        for k in [0, 4] {
            let mut decoder = self_drafting(&model, k)?;
            decoder.prefill(&long[..n], &mut |_, _| {})?;
            assert_eq!(
                run(&mut decoder, limits(10_000, k, &[]))?,
                Finish::Context,
                "prompt {n}, k {k}"
            );
            assert_eq!(decoder.caches().len(), 32);
            assert_eq!(
                decoder.tokens().len(),
                33,
                "the last position's token is chosen, and pending"
            );
            if n >= 20 {
                assert_eq!(decoder.tokens(), &long[..33]);
            }
        }
    }
    Ok(())
}

#[test]
fn c094_a_draft_model_with_a_shorter_context_stops_drafting() -> Result<()> {
    let target = tiny(|_| {})?;
    let draft = tiny(|text| text["max_position_embeddings"] = json!(24))?;
    let text = plain_text(&target, &prompt(12), 40)?;
    for start in [12, 23, 24, 30] {
        let drafter = ModelDrafter::new(draft.clone(), &CacheOptions::default())?;
        let mut decoder = decoder(&target)?.with_drafter(Box::new(drafter), 3)?;
        decoder.prefill(&text[..start], &mut |_, _| {})?;
        let (mut drafted, mut late) = (0, 0);
        while decoder.tokens().len() < 40 {
            let held = decoder.caches().len();
            let round = decoder.round(3, 10, &[])?;
            drafted += round.drafted;
            late += if held >= 24 { round.drafted } else { 0 };
        }
        assert_eq!(decoder.tokens(), &text[..decoder.tokens().len()]);
        assert_eq!(late, 0, "nothing is proposed past the draft model's context");
        assert!(drafted > 0 || start >= 24);
    }
    Ok(())
}

#[test]
fn c009_rounds_without_a_proposal_are_plain_steps() -> Result<()> {
    let model = tiny(|_| {})?;
    let text = plain_text(&model, &prompt(12), 30)?;
    let orders = vec![
        vec![],
        vec![],
        vec![text[14]],
        vec![],
        text[17..20].to_vec(),
        vec![],
    ];
    let mut decoder = decoder(&model)?.with_drafter(Told::new(orders), 3)?;
    decoder.prefill(&prompt(12), &mut |_, _| {})?;
    let mut accepted = Vec::new();
    for _ in 0..6 {
        accepted.push(decoder.round(3, 10, &[])?.accepted);
        in_step("after a round", &decoder)?;
    }
    assert_eq!(accepted, [0, 0, 1, 0, 3, 0]);
    assert_eq!(decoder.tokens(), &text[..22]);
    Ok(())
}

#[test]
fn c013_drafting_after_rounds_without_it_accepts_everything() -> Result<()> {
    let model = tiny(|_| {})?;
    let mut decoder = self_drafting(&model, 3)?;
    decoder.prefill(&prompt(12), &mut |_, _| {})?;
    for k in [3, 0, 0, 0, 3].into_iter().chain([0; 80]).chain([3, 2, 3]) {
        let round = decoder.round(k, 10, &[])?;
        assert_eq!((round.drafted, round.accepted), (k, k));
    }
    in_step("at the end", &decoder)
}

/// A text in which a phrase came before what follows it now, so that the n-gram drafter has guesses, right and wrong.
fn stuttering(text: &[u32]) -> Vec<u32> {
    [&text[12..20], &text[..16], &text[12..24], &text[..12]].concat()
}

#[test]
fn c013_a_draft_model_keeps_up_while_the_text_itself_is_drafted_from() -> Result<()> {
    let model = tiny(|_| {})?;
    let text = plain_text(&model, &prompt(12), 60)?;
    let prompt = stuttering(&text);
    let own = ModelDrafter::new(model.clone(), &CacheOptions::default())?;
    let drafter = CombinedDrafter::new(NgramDrafter::new().with_least(4), Box::new(own));
    let mut decoder = decoder(&model)?.with_drafter(Box::new(drafter), 3)?;
    decoder.prefill(&prompt, &mut |_, _| {})?;
    let mut from_model = 0;
    for k in [3, 1, 0, 3, 2].into_iter().cycle().take(40) {
        let mut alone = NgramDrafter::new().with_least(4);
        alone.prefill(decoder.tokens(), None)?;
        let repeats = !alone.propose(k)?.is_empty();
        let round = decoder.round(k, 10, &[])?;
        if !repeats {
            assert_eq!(
                (round.drafted, round.accepted),
                (k, k),
                "a model with the target's weights is always right"
            );
            from_model += round.drafted;
        }
    }
    assert!(from_model > 10);
    in_step("at the end", &decoder)
}

#[test]
fn c088_no_more_is_drafted_than_a_limit_leaves_room_for() -> Result<()> {
    let model = tiny(|_| {})?;
    let text = plain_text(&model, &prompt(12), 40)?;
    for room in 1..8 {
        // Told proposes six tokens whatever it is asked for.
        let mut told = decoder(&model)?.with_drafter(Told::new(vec![text[12..18].to_vec()]), 6)?;
        told.prefill(&prompt(12), &mut |_, _| {})?;
        let round = told.round(6, room, &[])?;
        assert_eq!(
            (round.asked, round.drafted, round.tokens.len()),
            (6.min(room - 1), 6.min(room - 1), room.min(7))
        );
        in_step("after a round with little room", &told)?;

        let mut repeating = decoder(&model)?.with_drafter(Box::new(NgramDrafter::new()), 6)?;
        repeating.prefill(
            &[text[..18].to_vec(), text[..12].to_vec()].concat(),
            &mut |_, _| {},
        )?;
        let round = repeating.round(6, room, &[])?;
        assert_eq!(round.drafted, 6.min(room - 1));
        in_step("after a look-up with little room", &repeating)?;
    }
    let mut plain = decoder(&model)?;
    plain.prefill(&prompt(12), &mut |_, _| {})?;
    assert_eq!(plain.round(6, 10, &[])?.asked, 0, "there is nobody to ask");
    Ok(())
}

#[test]
fn a_depth_that_adapts_changes_nothing_but_the_speed() -> Result<()> {
    let model = tiny(|_| {})?;
    let other = tiny(|text| text["hidden_size"] = json!(48))?;
    let text = plain_text(&model, &prompt(12), 40)?;
    let start = stuttering(&text);
    let text = plain_text(&model, &start, 300)?;
    let with = |model: &Arc<dyn LanguageModel>| -> Result<Box<dyn Drafter>> {
        Ok(Box::new(ModelDrafter::new(
            model.clone(),
            &CacheOptions::default(),
        )?))
    };
    let drafters: [Box<dyn Drafter>; 4] = [
        with(&model)?,
        with(&other)?,
        Box::new(NgramDrafter::new().with_least(1)),
        Box::new(CombinedDrafter::new(NgramDrafter::new(), with(&model)?)),
    ];
    for (which, drafter) in drafters.into_iter().enumerate() {
        let mut decoder = decoder(&model)?.with_drafter(drafter, 6)?;
        decoder.prefill(&start, &mut |_, _| {})?;
        let mut depths = [0; 7];
        for most in [6, 6, 2] {
            let limits = Limits {
                max_tokens: 100,
                depth: Depth::Auto { most },
                eos: Vec::new(),
            };
            for round in decoder.generate(limits) {
                let round = round?;
                assert!(round.asked <= most);
                depths[round.asked] += 1;
            }
        }
        assert_eq!(decoder.tokens(), text, "drafter {which}");
        assert!(
            depths[0] > 0 && depths[1..].iter().any(|n| *n > 0),
            "drafter {which}: {depths:?}"
        );
        in_step("at the end", &decoder)?;
    }
    Ok(())
}

#[test]
fn a_draft_vocabulary_limits_guesses_and_never_the_text() -> Result<()> {
    let model = tiny(|text| text["eos_token_id"] = json!(249))?;
    let text = plain_text(&model, &prompt(12), 120)?;
    let common = DraftVocabulary::most_frequent(text.iter().copied(), 20);
    let with_end = common.clone().with(&[249]);
    let all = DraftVocabulary::from_ids(0..1000);
    for (vocabulary, allowed) in [(&common, &with_end), (&all, &all)] {
        let drafter =
            ModelDrafter::new(model.clone(), &CacheOptions::default())?.with_vocabulary(vocabulary.clone());
        let mut decoder = decoder(&model)?.with_drafter(Box::new(drafter), 3)?;
        decoder.prefill(&prompt(12), &mut |_, _| {})?;
        let (mut drafted, mut accepted) = (0, 0);
        while decoder.tokens().len() < text.len() - 4 {
            let round = decoder.round(3, 4, &[])?;
            let guessed = round.tokens.iter().filter(|token| token.drafted);
            for token in guessed {
                assert!(allowed.ids().any(|id| id == token.id), "guessed {}", token.id);
            }
            drafted += round.drafted;
            accepted += round.accepted;
        }
        assert_eq!(decoder.tokens(), &text[..decoder.tokens().len()]);
        in_step("at the end", &decoder)?;
        let whole = vocabulary.ids().count() == 1000;
        assert!(
            accepted > 0 && (accepted == drafted) == whole,
            "{accepted} of {drafted}"
        );
    }

    // What is proposed is the best of the allowed, whether it is right or not.
    let mut drafter = ModelDrafter::new(model.clone(), &CacheOptions::default())?
        .with_vocabulary(DraftVocabulary::from_ids([7, 3, 100, 31]));
    drafter.attach(model.spec(), usize::MAX)?;
    drafter.prefill(&prompt(12), None)?;
    let mut caches = model.new_caches(&CacheOptions::default())?;
    let mut so_far = prompt(12);
    for id in drafter.propose(4)? {
        caches.reset();
        let rows = feed(&*model, &mut caches, &so_far)?;
        let row: Vec<f32> = rows[rows.len() - 256..]
            .iter()
            .map(|bits| f32::from_bits(*bits))
            .collect();
        let best = [3, 7, 31, 100, 249]
            .into_iter()
            .max_by(|a, b| row[*a].total_cmp(&row[*b]));
        assert_eq!(Some(id as usize), best);
        so_far.push(id);
    }

    let nothing = ModelDrafter::new(model.clone(), &CacheOptions::default())?
        .with_vocabulary(DraftVocabulary::from_ids([256, 1000]));
    let none = tiny(|_| {})?;
    let error = decoder(&none)?
        .with_drafter(Box::new(nothing), 3)
        .err()
        .ok_or("took no ids")?
        .to_string();
    assert!(
        error.contains("no id of its draft vocabulary is below 256"),
        "{error}"
    );
    Ok(())
}

#[test]
fn c014_drafts_that_are_always_wrong_change_nothing() -> Result<()> {
    let model = tiny(|_| {})?;
    let text = plain_text(&model, &prompt(12), 40)?;
    for k in 1..=6 {
        let wrong: Vec<Vec<u32>> = (12..40)
            .map(|at| (0..k).map(|i| (text[(at + i).min(40)] + 1) % 256).collect())
            .collect();
        let mut decoder = decoder(&model)?.with_drafter(Told::new(wrong), k)?;
        decoder.prefill(&prompt(12), &mut |_, _| {})?;
        for _ in 12..34 {
            let round = decoder.round(k, 10, &[])?;
            assert_eq!((round.drafted, round.accepted, round.tokens.len()), (k, 0, 1));
        }
        assert_eq!(decoder.tokens(), &text[..34]);
        in_step("after wrong drafts", &decoder)?;
    }
    Ok(())
}

#[test]
fn c027_ids_outside_the_targets_vocabulary_are_not_fed() -> Result<()> {
    let model = tiny(|_| {})?;
    let text = plain_text(&model, &prompt(12), 10)?;
    let orders = vec![vec![text[12], 256, text[14]], vec![u32::MAX]];
    let mut decoder = decoder(&model)?.with_drafter(Told::new(orders), 3)?;
    decoder.prefill(&prompt(12), &mut |_, _| {})?;
    let round = decoder.round(3, 10, &[])?;
    assert_eq!((round.drafted, round.accepted), (1, 1));
    assert_eq!(decoder.round(3, 10, &[])?.drafted, 0);
    in_step("after foreign ids", &decoder)
}

#[test]
fn c027_a_draft_model_with_a_head_of_another_size_drafts_what_both_know() -> Result<()> {
    let target = tiny(|_| {})?;
    let text = plain_text(&target, &prompt(12), 60)?;
    for vocab in [248, 264] {
        let draft = tiny(|text| text["vocab_size"] = json!(vocab))?;
        let drafter = ModelDrafter::new(draft, &CacheOptions::default())?;
        let mut decoder = Decoder::new(target.clone(), target.new_caches(&CacheOptions::default())?, 256)?
            .with_drafter(Box::new(drafter), 3)?;
        decoder.prefill(&prompt(12), &mut |_, _| {})?;
        run(&mut decoder, limits(60, 3, &[]))?;
        assert_eq!(decoder.tokens(), text);
    }
    Ok(())
}

#[test]
fn c015_c024_a_decoder_can_be_used_again() -> Result<()> {
    let model = tiny(|_| {})?;
    let mut decoder = self_drafting(&model, 4)?;
    for n in [40, 5, 40, 1] {
        let text = plain_text(&model, &prompt(n), 30)?;
        decoder.reset();
        decoder.prefill(&prompt(n), &mut |_, _| {})?;
        let mut accepted = 0;
        for _ in 0..6 {
            accepted += decoder.round(4, 10, &[])?.accepted;
        }
        assert_eq!(accepted, 24, "a used drafter accepts all after a prompt of {n}");
        assert_eq!(decoder.tokens(), &text[..n as usize + 30]);
        in_step("after a reset", &decoder)?;
    }
    Ok(())
}

#[test]
fn a_prompt_is_read_in_chunks_and_a_refused_one_leaves_the_decoder_empty() -> Result<()> {
    let model = tiny(|_| {})?;
    let mut decoder = self_drafting(&model, 4)?;
    assert!(decoder.prefill(&[], &mut |_, _| {}).is_err());
    assert!(
        decoder.round(4, 10, &[]).is_err(),
        "there is nothing to go on from"
    );
    for bad in [0, 300, 599] {
        let mut ids = prompt(600);
        ids[bad] = 256;
        let error = decoder
            .prefill(&ids, &mut |_, _| {})
            .err()
            .ok_or("took an unknown token")?
            .to_string();
        assert!(error.contains(&format!("token 256 at position {bad}")), "{error}");
        assert!(decoder.tokens().is_empty() && decoder.caches().is_empty());
    }
    let mut seen = Vec::new();
    decoder.prefill(&prompt(600), &mut |done, total| seen.push((done, total)))?;
    assert_eq!(seen, [(1, 600), (257, 600), (513, 600), (600, 600)]);
    in_step("after a long prompt", &decoder)?;
    let text = decoder.tokens().to_vec();
    assert!(decoder.prefill(&[256], &mut |_, _| {}).is_err());
    assert_eq!(decoder.tokens(), text, "a refused prompt changes nothing");
    in_step("after a refused prompt", &decoder)?;
    decoder.prefill(&prompt(3), &mut |_, _| {})?;
    assert_eq!(decoder.tokens(), prompt(3), "another prompt begins anew");
    in_step("after another prompt", &decoder)
}

/// Keys and values that fail at the n-th append.
struct Fragile {
    inner: KvCache,
    left: Arc<AtomicUsize>,
    panics: bool,
}

impl Cache for Fragile {
    fn kind(&self) -> &str {
        "kv"
    }
    fn len(&self) -> usize {
        self.inner.len()
    }
    fn trimmable(&self) -> usize {
        self.inner.trimmable()
    }
    fn trim(&mut self, n: usize) -> recant::core::Result<()> {
        self.inner.trim(n)
    }
    fn checkpoint(&mut self) -> recant::core::Result<Checkpoint> {
        self.inner.checkpoint()
    }
    fn restore(&mut self, to: &Checkpoint) -> recant::core::Result<()> {
        self.inner.restore(to)
    }
    fn commit(&mut self, checkpoint: Checkpoint) {
        self.inner.commit(checkpoint);
    }
    fn snapshot(&self) -> recant::core::Result<Snapshot> {
        self.inner.snapshot()
    }
    fn fits(&self, from: &Snapshot) -> recant::core::Result<()> {
        self.inner.fits(from)
    }
    fn load(&mut self, from: &Snapshot) -> recant::core::Result<()> {
        self.inner.load(from)
    }
    fn reset(&mut self) {
        self.inner.reset();
    }
    fn footprint(&self) -> Footprint {
        self.inner.footprint()
    }
}

impl AttentionCache for Fragile {
    fn layout(&self) -> &AttentionLayout {
        self.inner.layout()
    }
    fn append(&mut self, keys: &Tensor, values: &Tensor) -> recant::core::Result<()> {
        if self.left.fetch_sub(1, Ordering::Relaxed) == 1 {
            if self.panics {
                std::panic::panic_any("a cache panicked on purpose");
            }
            return Err(CoreError::other("out of room on purpose"));
        }
        self.inner.append(keys, values)
    }
    fn view(&self) -> recant::core::Result<KvView> {
        self.inner.view()
    }
}

/// Caches of which the last attention layer fails once, at its `at`-th append from when `armed` is set.
fn fragile(model: &Arc<dyn LanguageModel>, panics: bool) -> Result<(CacheStack, Arc<AtomicUsize>)> {
    let left = Arc::new(AtomicUsize::new(usize::MAX));
    let layout = model.spec().layout.clone();
    let last = layout.layers.len() - 1;
    let layers = layout
        .layers
        .iter()
        .enumerate()
        .map(|(index, layer)| match layer {
            LayerLayout::Attention(attention) if index == last => {
                Ok(LayerCache::Attention(Box::new(Fragile {
                    inner: KvCache::new(attention.clone(), &layout.device),
                    left: left.clone(),
                    panics,
                })))
            }
            other => LayerCache::standard(other, &CacheOptions::default(), &layout.device),
        })
        .collect::<recant::core::Result<Vec<_>>>()?;
    Ok((CacheStack::new(layout, layers)?, left))
}

#[test]
fn c012_an_error_in_mid_round_leaves_text_and_caches_as_they_were() -> Result<()> {
    fails_and_goes_on(false)
}

#[test]
fn c012_a_panic_in_mid_round_leaves_text_and_caches_as_they_were() -> Result<()> {
    fails_and_goes_on(true)
}

fn fails_and_goes_on(panics: bool) -> Result<()> {
    let model = tiny(|text| text["num_hidden_layers"] = json!(8))?;
    let text = plain_text(&model, &prompt(12), 60)?;
    for (k, drafting) in [(0, false), (4, true)] {
        let (caches, left) = fragile(&model, panics)?;
        let mut decoder = Decoder::new(model.clone(), caches, usize::MAX)?;
        if drafting {
            let drafter = ModelDrafter::new(model.clone(), &CacheOptions::default())?;
            decoder = decoder.with_drafter(Box::new(drafter), k)?;
        }
        decoder.prefill(&prompt(12), &mut |_, _| {})?;
        for round in 0..6 {
            let before = decoder.tokens().to_vec();
            left.store(1, Ordering::Relaxed);
            let result = catch_unwind(AssertUnwindSafe(|| {
                decoder.round(k, 10, &[]).map_err(|e| e.to_string())
            }));
            match result {
                Ok(Err(error)) if !panics => {
                    assert!(error.contains("layer 7 (kv): out of room on purpose"), "{error}");
                }
                Err(_) if panics => {}
                other => return Err(format!("round {round} did not fail: {other:?}").into()),
            }
            assert_eq!(decoder.tokens(), before);
            in_step("after a failed round", &decoder)?;
            let done = decoder.round(k, 10, &[])?;
            assert_eq!(
                (done.drafted, done.accepted),
                (k, k),
                "the drafter is in step after a failed round"
            );
            in_step("after the round that followed", &decoder)?;
        }
        assert_eq!(decoder.tokens(), &text[..decoder.tokens().len()]);
    }
    Ok(())
}

/// A step of each, with up to 4 drafts a round and 5 tokens of a prompt.
fn step_all(decoders: &mut [Decoder]) -> Vec<recant::generate::Result<Done>> {
    let mut never = vec![|_| Ok(false); decoders.len()];
    let mut steps: Vec<Step<'_>> = decoders
        .iter_mut()
        .zip(&mut never)
        .map(|(decoder, ends)| Step {
            decoder,
            depth: Depth::Fixed(4),
            room: 100,
            chunk: 5,
            ends,
            cancel: None,
        })
        .collect();
    step(&mut steps)
}

#[test]
fn a_sequence_that_fails_in_a_shared_call_does_not_stop_the_others() -> Result<()> {
    let model = tiny(|text| text["num_hidden_layers"] = json!(8))?;
    for guilty in 0..4 {
        // Two that generate, with drafts and without, and two that read a prompt; one of the four has a cache that fails.
        let mut lefts = Vec::new();
        let mut decoders = Vec::new();
        for number in 0..4 {
            let (caches, left) = fragile(&model, false)?;
            let mut decoder = Decoder::new(model.clone(), caches, usize::MAX)?;
            if number % 2 == 1 {
                let drafter = ModelDrafter::new(model.clone(), &CacheOptions::default())?;
                decoder = decoder.with_drafter(Box::new(drafter), 4)?;
            }
            match number < 2 {
                true => drop(decoder.prefill(&prompt(12), &mut |_, _| {})?),
                false => drop(decoder.begin(&prompt(31))?),
            }
            decoders.push(decoder);
            lefts.push(left);
        }
        step_all(&mut decoders);
        let before: Vec<Vec<u32>> = decoders.iter().map(|d| d.tokens().to_vec()).collect();
        lefts[guilty].store(1, Ordering::Relaxed);
        let results = step_all(&mut decoders);
        lefts[guilty].store(usize::MAX, Ordering::Relaxed);
        // The failure took the shared call back; alone, each step goes through.
        for (number, result) in results.into_iter().enumerate() {
            result.map_err(|error| format!("{guilty} failed, and {number} with it: {error}"))?;
            in_step("after a shared call failed", &decoders[number])?;
        }
        assert!(decoders[0].tokens().len() > before[0].len());
        for _ in 0..12 {
            step_all(&mut decoders)
                .into_iter()
                .try_for_each(|done| done.map(drop))?;
        }
        for (decoder, length) in decoders.iter().zip([12, 12, 31, 31]) {
            let made = decoder.tokens().len() - length as usize;
            assert!(made > 4);
            assert_eq!(decoder.tokens(), plain_text(&model, &prompt(length), made)?);
        }
    }
    Ok(())
}

#[test]
fn sequences_of_two_models_and_one_without_a_prompt_are_refused_alone() -> Result<()> {
    let (model, other) = (tiny(|_| {})?, tiny(|text| text["num_hidden_layers"] = json!(8))?);
    let mut decoders = [decoder(&model)?, decoder(&other)?, decoder(&model)?];
    for decoder in &mut decoders[..2] {
        decoder.prefill(&prompt(12), &mut |_, _| {})?;
    }
    let results = step_all(&mut decoders);
    assert!(matches!(
        &results[..],
        [
            Ok(Done::Round(_)),
            Err(Error::OtherModel),
            Err(Error::EmptyPrompt)
        ]
    ));
    Ok(())
}

#[test]
fn c113_a_call_that_nobody_waits_for_stops_between_two_layers() -> Result<()> {
    let model = common::seeded::model(
        &common::seeded::dense(|text| text["num_hidden_layers"] = json!(8)),
        7,
        recant::candle::DType::F32,
    )?;
    let (cancelled, wanted) = (Cancel::new(), Cancel::new());
    for others in [false, true] {
        cancelled.clear();
        let mut caches = [(); 2].map(|()| model.new_caches(&CacheOptions::default()));
        let [Ok(first), Ok(second)] = &mut caches else {
            return Err("no caches".into());
        };
        let ids = prompt(6);
        let mut batch = vec![Segment::new(&ids, first, Rows::All)];
        batch[0].cancel = Some(&cancelled);
        if others {
            batch.push(Segment::new(&ids, second, Rows::All));
            batch[1].cancel = Some(&wanted);
        }
        let mut layers = 0;
        let output = model.forward_observed(&mut batch, &mut |layer, _| {
            layers += 1;
            if layer == 2 {
                cancelled.cancel();
            }
        });
        match others {
            // Somebody waits for another sequence of the call.
            true => assert!(output.is_ok() && layers == 8),
            false => assert!(matches!(output, Err(CoreError::Cancelled)) && layers == 3),
        }
    }
    Ok(())
}

#[test]
fn a_prompt_that_fails_midway_leaves_the_decoder_empty_and_usable() -> Result<()> {
    let model = tiny(|_| {})?;
    let (caches, left) = fragile(&model, false)?;
    let mut decoder = Decoder::new(model.clone(), caches, usize::MAX)?;
    left.store(2, Ordering::Relaxed);
    assert!(decoder.prefill(&prompt(600), &mut |_, _| {}).is_err());
    assert!(decoder.tokens().is_empty() && decoder.caches().is_empty());
    decoder.prefill(&prompt(12), &mut |_, _| {})?;
    run(&mut decoder, limits(10, 0, &[]))?;
    assert_eq!(decoder.tokens(), plain_text(&model, &prompt(12), 10)?);
    Ok(())
}

#[test]
fn a_failed_call_without_a_checkpoint_leaves_a_stack_that_says_so() -> Result<()> {
    let model = tiny(|_| {})?;
    let (mut caches, left) = fragile(&model, false)?;
    feed(&*model, &mut caches, &prompt(5))?;
    left.store(1, Ordering::Relaxed);
    assert!(feed(&*model, &mut caches, &prompt(2)).is_err());
    let error = feed(&*model, &mut caches, &prompt(2))
        .err()
        .ok_or("took an uneven stack")?
        .to_string();
    assert!(error.contains("layer 0 has 7, layer 3 has 5"), "{error}");
    caches.reset();
    feed(&*model, &mut caches, &prompt(2))?;
    Ok(())
}

/// Keys and values that cannot be taken back.
#[test]
fn c002_caches_that_cannot_be_rewound_are_refused_when_the_session_is_built() -> Result<()> {
    let model = tiny(|_| {})?;
    let options = CacheOptions {
        record_limit: 2,
        ..CacheOptions::default()
    };
    let drafter = || ModelDrafter::new(model.clone(), &CacheOptions::default());
    let small = Decoder::new(model.clone(), model.new_caches(&options)?, usize::MAX)?;
    let error = small
        .with_drafter(Box::new(drafter()?), 4)
        .err()
        .ok_or("took caches without room")?
        .to_string();
    assert!(
        error.contains("layer 0 (arrays)") && error.contains("the limit is 2"),
        "{error}"
    );
    let one = CacheOptions {
        record_limit: 1,
        ..CacheOptions::default()
    };
    let drafter = ModelDrafter::new(model.clone(), &one)?;
    assert!(decoder(&model)?.with_drafter(Box::new(drafter), 4).is_err());
    Ok(())
}

#[test]
fn c025_caches_of_another_model_are_refused() -> Result<()> {
    let (target, draft) = (load("demo-target")?, load("demo-draft")?);
    let wrong = draft.model().new_caches(&CacheOptions::default())?;
    let error = target
        .session()
        .caches(wrong)
        .build()
        .err()
        .ok_or("took another model's caches")?
        .to_string();
    assert!(
        error.contains("the model that the caches were made for"),
        "{error}"
    );
    Ok(())
}

#[test]
fn c107_speculation_is_exact_on_twenty_held_out_texts() -> Result<()> {
    for name in ["target", "draft"] {
        if folder_or_skip("twenty held-out texts", name).is_none() {
            return Ok(());
        }
    }
    let (target, draft) = (load("target")?, load("draft")?);
    let texts = common::heldout()?;
    let threads = recant::Threads::new(2)?;
    let session = |k: usize| target.session().threads(&threads).draft_tokens(k);
    let mut plain = session(0).build()?;
    let mut speculative = session(4).draft(&draft).build()?;
    let (mut drafted, mut accepted) = (0, 0);
    for (index, text) in texts.iter().take(20).enumerate() {
        let mut prompt = target.text().encode(text)?;
        prompt.truncate(100);
        for session in [&mut plain, &mut speculative] {
            session.start_tokens(&prompt, &mut |_, _| {})?;
            session.generate(64).try_for_each(|event| event.map(|_| ()))?;
        }
        assert_eq!(plain.tokens(), speculative.tokens(), "text {index}");
        assert_same(&format!("text {index}"), plain.caches(), speculative.caches())?;
        drafted += speculative.stats().drafted;
        accepted += speculative.stats().accepted;
    }
    println!("accepted {accepted} of {drafted} drafted tokens");
    assert!(
        accepted * 3 > drafted,
        "a draft model that agrees so rarely tests nothing"
    );
    assert!(
        accepted < drafted,
        "a draft model that always agrees tests no rollback"
    );
    Ok(())
}

#[test]
fn threads_never_change_a_text() -> Result<()> {
    let (target, draft) = (load("demo-target")?, load("demo-draft")?);
    let prompt = text_ids(50)?;
    let mut texts = Vec::new();
    for threads in [1, 2, 3] {
        let mut session = target
            .session()
            .threads(&recant::Threads::new(threads)?)
            .draft(&draft)
            .draft_tokens(5)
            .build()?;
        session.start_tokens(&prompt, &mut |_, _| {})?;
        session.generate(150).try_for_each(|event| event.map(|_| ()))?;
        texts.push((session.tokens().to_vec(), session.caches().snapshot()?));
    }
    for (text, snapshot) in &texts[1..] {
        assert_eq!(*text, texts[0].0);
        assert_eq!(snapshot.difference(&texts[0].1), None);
    }
    Ok(())
}

/// A model from elsewhere that gives a row of logits too few.
struct Short(Arc<dyn LanguageModel>);

impl LanguageModel for Short {
    fn spec(&self) -> &ModelSpec {
        self.0.spec()
    }

    fn forward(&self, batch: &mut [recant::core::Segment<'_>]) -> recant::core::Result<recant::core::Output> {
        let mut output = self.0.forward(batch)?;
        for segment in &mut output.segments {
            if let Some(largest) = segment.largest.as_mut().filter(|rows| rows.len() > 1) {
                largest.pop();
            }
        }
        Ok(output)
    }
}

#[test]
fn a_model_that_gives_too_few_rows_is_refused_and_nothing_is_changed() -> Result<()> {
    let model = tiny(|_| {})?;
    let text = plain_text(&model, &prompt(12), 20)?;
    let short: Arc<dyn LanguageModel> = Arc::new(Short(model.clone()));
    let mut decoder = decoder(&short)?.with_drafter(Told::new(vec![text[12..15].to_vec()]), 3)?;
    decoder.prefill(&prompt(12), &mut |_, _| {})?;
    let error = decoder
        .round(3, 10, &[])
        .err()
        .ok_or("took too few rows")?
        .to_string();
    assert!(error.contains("rows of logits: expected 4, found 3"), "{error}");
    in_step("after a refused output", &decoder)
}
