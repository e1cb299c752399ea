//! From the names of llama.cpp's converter to canonical ones.

use std::collections::{BTreeMap, BTreeSet};

/// Tensors outside the blocks.
const GLOBAL: [(&str, &str); 3] = [
    ("token_embd.weight", "embed_tokens.weight"),
    ("output_norm.weight", "norm.weight"),
    ("output.weight", "lm_head.weight"),
];

/// Tensors of a block, behind `blk.N.`, and what they are called behind `layers.N.`.
const BLOCK: [(&str, &str); 34] = [
    ("attn_norm.weight", "input_layernorm.weight"),
    ("post_attention_norm.weight", "post_attention_layernorm.weight"),
    ("attn_q.weight", "self_attn.q_proj.weight"),
    ("attn_k.weight", "self_attn.k_proj.weight"),
    ("attn_v.weight", "self_attn.v_proj.weight"),
    ("attn_output.weight", "self_attn.o_proj.weight"),
    ("attn_q.bias", "self_attn.q_proj.bias"),
    ("attn_k.bias", "self_attn.k_proj.bias"),
    ("attn_v.bias", "self_attn.v_proj.bias"),
    ("attn_output.bias", "self_attn.o_proj.bias"),
    ("attn_q_norm.weight", "self_attn.q_norm.weight"),
    ("attn_k_norm.weight", "self_attn.k_norm.weight"),
    ("attn_qkv.weight", "linear_attn.in_proj_qkv.weight"),
    ("attn_gate.weight", "linear_attn.in_proj_z.weight"),
    ("ssm_beta.weight", "linear_attn.in_proj_b.weight"),
    ("ssm_alpha.weight", "linear_attn.in_proj_a.weight"),
    ("ssm_in.weight", "linear_attn.in_proj_qkvz.weight"),
    ("ssm_conv1d.weight", "linear_attn.conv1d.weight"),
    ("ssm_a", "linear_attn.A_log"),
    ("ssm_dt.bias", "linear_attn.dt_bias"),
    ("ssm_norm.weight", "linear_attn.norm.weight"),
    ("ssm_out.weight", "linear_attn.out_proj.weight"),
    ("ffn_gate.weight", "mlp.gate_proj.weight"),
    ("ffn_up.weight", "mlp.up_proj.weight"),
    ("ffn_down.weight", "mlp.down_proj.weight"),
    ("ffn_gate_inp.weight", "mlp.gate.weight"),
    ("ffn_gate_exps.weight", "mlp.switch_mlp.gate_proj.weight"),
    ("ffn_up_exps.weight", "mlp.switch_mlp.up_proj.weight"),
    ("ffn_gate_up_exps.weight", "mlp.experts.gate_up_proj"),
    ("ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight"),
    ("ffn_gate_shexp.weight", "mlp.shared_expert.gate_proj.weight"),
    ("ffn_up_shexp.weight", "mlp.shared_expert.up_proj.weight"),
    ("ffn_down_shexp.weight", "mlp.shared_expert.down_proj.weight"),
    ("ffn_down_exps.weight", "mlp.switch_mlp.down_proj.weight"),
];

/// Tensors that only the block of a multi-token-prediction head has.
const HEAD: [(&str, &str); 6] = [
    ("nextn.eh_proj.weight", "fc.weight"),
    ("nextn.enorm.weight", "pre_fc_norm_embedding.weight"),
    ("nextn.hnorm.weight", "pre_fc_norm_hidden.weight"),
    ("nextn.shared_head_norm.weight", "norm.weight"),
    // A head's own copies of what it otherwise shares with the target. No head takes them.
    ("nextn.embed_tokens.weight", "embed_tokens.weight"),
    ("nextn.shared_head_head.weight", "lm_head.weight"),
];

/// The tensors of a file: canonical name to the name in the file.
#[derive(Debug, Default)]
pub(super) struct Names {
    pub(super) model: BTreeMap<String, String>,
    /// Those of a multi-token-prediction head.
    pub(super) head: BTreeMap<String, String>,
    /// Factors of whole matrices: the name of a weight in the file to that of its factor.
    pub(super) factors: BTreeMap<String, String>,
    /// Names that mean nothing here.
    pub(super) unknown: Vec<String>,
}

impl Names {
    /// Sorts out the names of a file. Blocks from `trunk` on, up to `blocks`, are a head's.
    pub(super) fn sort(names: &BTreeSet<&str>, trunk: usize, blocks: usize) -> Self {
        let mut sorted = Self::default();
        for &name in names {
            if let Some(canonical) = find(&GLOBAL, name) {
                sorted.model.insert(canonical.to_owned(), name.to_owned());
                continue;
            }
            if let Some(weight) = beside(names, name, ".scale") {
                sorted.factors.insert(weight, name.to_owned());
                continue;
            }
            // Of activations, which are not rounded as it says.
            if beside(names, name, ".input_scale").is_some() {
                continue;
            }
            match block(name).filter(|(number, _)| *number < blocks) {
                Some((number, part)) if number < trunk => {
                    let canonical = in_block(names, number, part);
                    sorted.keep(true, number, &canonical, name);
                }
                Some((number, part)) => match find(&HEAD, part) {
                    Some(canonical) if number == trunk => {
                        sorted.head.insert(canonical.to_owned(), name.to_owned());
                    }
                    Some(canonical) => sorted.keep(false, number - trunk, &[canonical], name),
                    None => sorted.keep(false, number - trunk, &in_block(names, number, part), name),
                },
                None => sorted.unknown.push(name.to_owned()),
            }
        }
        if let (false, true) = (sorted.head.is_empty(), names.contains("output_norm.weight")) {
            // A head without a norm of its own ends with the model's.
            sorted
                .head
                .entry("norm.weight".to_owned())
                .or_insert_with(|| "output_norm.weight".to_owned());
        }
        sorted
    }

    /// Notes a tensor of layer `layer` under each of some names; unknown if there are none.
    fn keep(&mut self, model: bool, layer: usize, canonical: &[&str], name: &str) {
        if canonical.is_empty() {
            self.unknown.push(name.to_owned());
        }
        let to = if model { &mut self.model } else { &mut self.head };
        for canonical in canonical {
            to.insert(format!("layers.{layer}.{canonical}"), name.to_owned());
        }
    }
}

/// The weight that something with this end in its name belongs to.
fn beside(names: &BTreeSet<&str>, name: &str, end: &str) -> Option<String> {
    let weight = format!("{}.weight", name.strip_suffix(end)?);
    names.contains(weight.as_str()).then_some(weight)
}

fn find(table: &[(&str, &'static str)], name: &str) -> Option<&'static str> {
    let found = table.iter().find(|(file, _)| *file == name);
    found.map(|(_, canonical)| *canonical)
}

/// `blk.12.attn_q.weight` is part `attn_q.weight` of block 12.
fn block(name: &str) -> Option<(usize, &str)> {
    let (number, part) = name.strip_prefix("blk.")?.split_once('.')?;
    // No other spelling of a number is a converter's.
    let parsed: usize = number.parse().ok()?;
    (parsed.to_string() == number).then_some((parsed, part))
}

/// What a tensor of a block is called: two names where it is two tensors in one, none if it is unknown.
fn in_block(names: &BTreeSet<&str>, number: usize, part: &str) -> Vec<&'static str> {
    let beside = |part: &str| names.contains(format!("blk.{number}.{part}").as_str());
    match part {
        // Fused with the gates of old Qwen3-Next files, whose other projections are fused likewise; else on its own.
        "ssm_ba.weight" if beside("ssm_in.weight") => vec!["linear_attn.in_proj_ba.weight"],
        "ssm_ba.weight" => vec!["linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight"],
        "ffn_down_exps.weight" if beside("ffn_gate_up_exps.weight") => vec!["mlp.experts.down_proj"],
        _ => find(&BLOCK, part).into_iter().collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sort(names: &[&str], trunk: usize, blocks: usize) -> Names {
        Names::sort(&names.iter().copied().collect(), trunk, blocks)
    }

    #[test]
    fn the_last_block_is_a_head_and_ends_with_the_models_norm_if_it_has_none() {
        let names = [
            "output_norm.weight",
            "blk.0.ssm_a",
            "blk.1.attn_q.weight",
            "blk.1.nextn.eh_proj.weight",
        ];
        let sorted = sort(&names, 1, 2);
        assert_eq!(sorted.model["layers.0.linear_attn.A_log"], "blk.0.ssm_a");
        assert_eq!(
            sorted.head["layers.0.self_attn.q_proj.weight"],
            "blk.1.attn_q.weight"
        );
        assert_eq!(sorted.head["fc.weight"], "blk.1.nextn.eh_proj.weight");
        assert_eq!(sorted.head["norm.weight"], "output_norm.weight");
        assert!(sorted.unknown.is_empty());
        let own = sort(
            &["output_norm.weight", "blk.0.nextn.shared_head_norm.weight"],
            0,
            1,
        );
        assert_eq!(own.head["norm.weight"], "blk.0.nextn.shared_head_norm.weight");
    }

    #[test]
    fn names_of_no_block_and_no_tensor_are_unknown() {
        for name in [
            "blk.2.attn_q.weight",
            "blk.01.attn_q.weight",
            "blk.+1.attn_q.weight",
            "blk.0.attn_q",
            "blk.0.nextn.eh_proj.weight",
            "blk.0.attn_q.weight.scale",
            "blk.0.attn_q.scale",
            "blk.0.attn_q.input_scale",
            "rope_freqs.weight",
            "blk.",
        ] {
            let sorted = sort(&[name], 2, 2);
            assert_eq!(sorted.unknown, [name], "{name}");
        }
    }

    #[test]
    fn factors_are_those_of_weights_and_no_tensors_of_the_model() {
        let names = [
            "blk.0.attn_q.weight",
            "blk.0.attn_q.scale",
            "blk.0.attn_q.input_scale",
        ];
        let sorted = sort(&names, 1, 1);
        assert_eq!(sorted.factors["blk.0.attn_q.weight"], "blk.0.attn_q.scale");
        assert_eq!(sorted.model.len(), 1);
        assert!(sorted.unknown.is_empty());
    }

    #[test]
    fn experts_whose_gates_and_inputs_are_one_tensor_are_stacked_as_on_the_hub() {
        let apart = sort(
            &["blk.0.ffn_gate_exps.weight", "blk.0.ffn_down_exps.weight"],
            1,
            1,
        )
        .model;
        assert!(apart.contains_key("layers.0.mlp.switch_mlp.down_proj.weight"));
        let fused = sort(
            &["blk.0.ffn_gate_up_exps.weight", "blk.0.ffn_down_exps.weight"],
            1,
            1,
        )
        .model;
        assert_eq!(
            fused["layers.0.mlp.experts.gate_up_proj"],
            "blk.0.ffn_gate_up_exps.weight"
        );
        assert_eq!(
            fused["layers.0.mlp.experts.down_proj"],
            "blk.0.ffn_down_exps.weight"
        );
    }

    #[test]
    fn a_fused_pair_is_two_tensors_unless_the_other_projections_are_fused_too() {
        let apart = sort(&["blk.0.ssm_ba.weight"], 1, 1).model;
        assert_eq!(
            apart["layers.0.linear_attn.in_proj_a.weight"],
            "blk.0.ssm_ba.weight"
        );
        assert_eq!(
            apart["layers.0.linear_attn.in_proj_b.weight"],
            "blk.0.ssm_ba.weight"
        );
        let fused = sort(&["blk.0.ssm_ba.weight", "blk.0.ssm_in.weight"], 1, 1).model;
        assert_eq!(
            fused["layers.0.linear_attn.in_proj_ba.weight"],
            "blk.0.ssm_ba.weight"
        );
    }
}
