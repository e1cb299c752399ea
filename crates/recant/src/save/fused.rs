//! The input projections of Qwen3-Next's linear layers. GGUF files have them apart; whoever else reads the model knows them fused
//! into two, grouped by key head.

use std::ops::Range;

use recant_layers::Config;

/// Two matrices that are fused, and what of them.
pub(super) struct Pair {
    /// Ends of their names, and of the name that they have together.
    pub(super) parts: [&'static str; 2],
    pub(super) whole: &'static str,
    /// Which of the two, and which of its rows, in order.
    pub(super) rows: Vec<(usize, Range<usize>)>,
}

/// For each key head: its queries, its keys, the values of its value heads, their gates; and b of its value heads, then a.
pub(super) fn pairs(config: &Config) -> [Pair; 2] {
    let heads = config.linear_num_key_heads;
    let each = config.linear_num_value_heads / heads;
    let (keys, values) = (config.linear_key_head_dim, each * config.linear_value_head_dim);
    let run = |start: usize, head: usize, rows: usize| start + head * rows..start + (head + 1) * rows;
    let qkvz = |head| {
        [
            (0, run(0, head, keys)),
            (0, run(heads * keys, head, keys)),
            (0, run(2 * heads * keys, head, values)),
            (1, run(0, head, values)),
        ]
    };
    let ba = |head| [(0, run(0, head, each)), (1, run(0, head, each))];
    [
        Pair {
            parts: ["in_proj_qkv.weight", "in_proj_z.weight"],
            whole: "in_proj_qkvz.weight",
            rows: (0..heads).flat_map(qkvz).collect(),
        },
        Pair {
            parts: ["in_proj_b.weight", "in_proj_a.weight"],
            whole: "in_proj_ba.weight",
            rows: (0..heads).flat_map(ba).collect(),
        },
    ]
}
