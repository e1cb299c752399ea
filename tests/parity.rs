//! Logits, hidden states, caches and greedy tokens against those of transformers in f32.
//!
//! Errors are the largest absolute difference of a tensor over its largest magnitude. Two f32 implementations that sum in
//! other orders differ by some units of 1e-7 in hidden rows and logits and up to 2e-6 in states; the largest seen is printed.

mod common;

use common::{folder_or_skip, relative_error, Golden, Result};
use recant::candle::Tensor;
use recant::core::{
    largest, Cache, CacheOptions, CacheStack, Hidden, LanguageModel, Rows, Segment, Snapshot,
};
use recant::{Backend, LoadOptions};
use recant_layers::{Family, HybridModel};
use recant_qwen3_5::Qwen35;
use recant_qwen3_5_moe::Qwen35Moe;
use recant_qwen3_next::Qwen3Next;
use recant_weights::Folder;

const TOLERANCE: f64 = 1e-5;
/// Steps whose two best logits are closer than this may go either way in another implementation.
const MARGIN: f32 = 1e-3;

#[test]
fn demo_target_agrees_with_transformers() -> Result<()> {
    agrees(&Qwen35, "demo-target", Backend::Cpu)
}

#[test]
fn demo_draft_agrees_with_transformers() -> Result<()> {
    agrees(&Qwen35, "demo-draft", Backend::Cpu)
}

#[test]
fn target_agrees_with_transformers() -> Result<()> {
    agrees(&Qwen35, "target", Backend::Cpu)
}

#[test]
fn draft_agrees_with_transformers() -> Result<()> {
    agrees(&Qwen35, "draft", Backend::Cpu)
}

#[test]
fn moe_agrees_with_transformers() -> Result<()> {
    agrees(&Qwen35Moe, "moe", Backend::Cpu)
}

#[test]
fn next_agrees_with_transformers() -> Result<()> {
    agrees(&Qwen3Next, "next", Backend::Cpu)
}

#[test]
fn the_ops_composed_of_candle_run_a_whole_model() -> Result<()> {
    agrees(&Qwen35, "demo-target", Backend::Composed)
}

#[test]
fn the_ops_composed_of_candle_run_mixtures_of_experts() -> Result<()> {
    agrees(&Qwen35Moe, "moe", Backend::Composed)?;
    agrees(&Qwen3Next, "next", Backend::Composed)
}

fn agrees(family: &dyn Family, name: &str, backend: Backend) -> Result<()> {
    let Some(path) = folder_or_skip(&format!("parity of {name}"), name) else {
        return Ok(());
    };
    let options = LoadOptions {
        backend,
        ..LoadOptions::default()
    };
    let (model, _) = HybridModel::load(family, &Folder::open(path)?, &options, &mut |_, _| {})?;
    let mut worst = Worst::default();
    for n in [1, 7, 64, 300] {
        let golden = Golden::read(name, n)?;
        let prompt = golden.ids("input_ids")?;
        assert_eq!(prompt.len(), n);
        let mut caches = model.new_caches(&CacheOptions::default())?;
        let mut layers: Vec<Tensor> = Vec::new();
        let mut segment = Segment::new(&prompt, &mut caches, Rows::All);
        segment.hidden = Some(Hidden::PostNorm);
        let output = model.forward_observed(&mut [segment], &mut |_, x| layers.push(x.clone()))?;
        let output = &output.segments[0];

        let want = &golden.outputs["logits"];
        let rows = want.dims()[0];
        worst.see("logits", &output.logits()?.narrow(0, n - rows, rows)?, want)?;
        let hidden = output.hidden.as_ref().ok_or("no hidden rows")?;
        worst.see(
            "final hidden",
            &hidden.narrow(0, n - rows, rows)?,
            &golden.outputs["final_hidden"],
        )?;
        if let Some(want) = golden.outputs.get("layer_hidden") {
            worst.see("layer hidden", &Tensor::stack(&layers, 0)?, want)?;
        }
        states(&mut worst, &caches.snapshot()?, &golden)?;
        greedy(&model, caches, output.logits()?, &golden)?;
    }
    println!("{name}, {backend:?}: largest relative errors {worst:?}");
    worst.check()
}

/// Conv windows, recurrent states, and keys and values, in the golden's order of dimensions.
fn states(worst: &mut Worst, snapshot: &Snapshot, golden: &Golden) -> Result<()> {
    let mut seen = 0;
    for (layer, part) in snapshot.parts().iter().enumerate() {
        let want = |what: &str| golden.state.get(&format!("layers.{layer}.{what}"));
        let arrays = part.arrays();
        if let Some(conv) = want("conv_state") {
            // Theirs is [channels, K], ours the newest K - 1 rows, [K - 1, channels].
            let ours = arrays["conv"].t()?.contiguous()?;
            let taps = ours.dims()[1];
            worst.see("conv state", &ours, &conv.narrow(1, conv.dims()[1] - taps, taps)?)?;
            seen += 1;
        }
        if let Some(state) = want("recurrent_state") {
            let scale = arrays["scale"].reshape(((), 1, 1))?;
            let ours = arrays["state"].broadcast_mul(&scale)?;
            worst.see("recurrent state", &ours, state)?;
            seen += 1;
        }
        for (ours, theirs) in [("keys", "keys"), ("values", "values")] {
            if let Some(rows) = want(theirs) {
                worst.see(theirs, &arrays[ours].transpose(0, 1)?.contiguous()?, rows)?;
                seen += 1;
            }
        }
    }
    assert_eq!(seen, golden.state.len(), "every golden state was compared");
    Ok(())
}

/// 48 greedy tokens, up to the first step that is nearly a tie.
fn greedy(model: &HybridModel, mut caches: CacheStack, logits: &Tensor, golden: &Golden) -> Result<()> {
    let want = golden.ids("greedy")?;
    let margins = golden.outputs["greedy_margin"].to_vec1::<f32>()?;
    let sure = margins.iter().take_while(|m| **m >= MARGIN).count();
    let mut row = logits.narrow(0, logits.dims()[0] - 1, 1)?;
    for (step, &want) in want.iter().enumerate().take(sure) {
        let id = largest(&row, 1, usize::MAX)?[0][0].id;
        assert_eq!(id, want, "greedy token {step}");
        let output = model.forward(&mut [Segment::new(&[id], &mut caches, Rows::Last)])?;
        row = output.segments[0].logits()?.clone();
    }
    assert!(sure > 0, "no step was compared");
    Ok(())
}

#[derive(Debug, Default)]
struct Worst(std::collections::BTreeMap<&'static str, f64>);

impl Worst {
    fn see(&mut self, what: &'static str, ours: &Tensor, theirs: &Tensor) -> Result<()> {
        let error = f64::from(relative_error(ours, theirs).map_err(|e| format!("{what}: {e}"))?);
        let worst = self.0.entry(what).or_default();
        *worst = worst.max(error);
        Ok(())
    }

    fn check(&self) -> Result<()> {
        assert!(self.0.len() >= 6, "something was not compared: {self:?}");
        match self.0.iter().find(|(_, error)| **error > TOLERANCE) {
            Some((what, error)) => {
                Err(format!("{what} is off by {error:.2e}, more than {TOLERANCE:.0e}").into())
            }
            None => Ok(()),
        }
    }
}
