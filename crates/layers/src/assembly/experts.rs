//! Mixtures of experts, in every spelling that exporters use.

use recant_kernels::{Mlp, MoeShape};

use super::Assembly;
use crate::{Error, Result, SparseMoe};

/// Names of an expert's gate, up and down projections, in one tensor an expert each.
const APART: [[&str; 3]; 2] = [["gate_proj", "up_proj", "down_proj"], ["w1", "w3", "w2"]];

impl Assembly<'_> {
    /// The mixture of experts whose names begin with `prefix`.
    ///
    /// Its experts are stored together (`experts.gate_up_proj` and `experts.down_proj`, without `.weight`), each on its own
    /// (`experts.0.gate_proj.weight`, `up_proj`, `down_proj`, or `w1`, `w3`, `w2`), or stacked by projection
    /// (`switch_mlp.gate_proj.weight`, `up_proj`, `down_proj`).
    pub fn sparse_moe(&mut self, prefix: &str, shape: MoeShape, shared_width: usize) -> Result<SparseMoe> {
        let hidden = shape.hidden_size;
        let router = self.gate_weight(&format!("{prefix}.gate.weight"), [shape.experts, hidden])?;
        let experts = self.experts(prefix, &shape)?;
        let shared = self.mlp(&format!("{prefix}.shared_expert"), shared_width)?;
        let shared_gate = self.gate_weight(&format!("{prefix}.shared_expert_gate.weight"), [1, hidden])?;
        SparseMoe::new(self.options.backend, shape, router, experts, shared, shared_gate)
            .map_err(|e| Error::part(prefix, e))
    }

    fn experts(&mut self, prefix: &str, shape: &MoeShape) -> Result<Vec<Mlp>> {
        // Any expert shows the spelling, so that one that is missing is missed by its own name.
        let apart = APART.into_iter().find(|[gate, ..]| {
            (0..shape.experts).any(|e| self.has(&format!("{prefix}.experts.{e}.{gate}.weight")))
        });
        if let Some(names) = apart {
            return self.experts_apart(prefix, shape, names);
        }
        let (count, hidden, width) = (shape.experts, shape.hidden_size, shape.width);
        let by_projection = format!("{prefix}.switch_mlp.gate_proj.weight");
        let (gate_up, down) = if self.has(&by_projection) {
            let name = |which| format!("{prefix}.switch_mlp.{which}_proj.weight");
            (vec![(name("gate"), width), (name("up"), width)], name("down"))
        } else {
            let gate_up = vec![(format!("{prefix}.experts.gate_up_proj"), 2 * width)];
            (gate_up, format!("{prefix}.experts.down_proj"))
        };
        (0..count)
            .map(|expert| {
                let mut take = |name: &str, rows, width| {
                    let stored = self.source.take_stacked(name, [count, rows, width], expert)?;
                    self.made(stored).map_err(|error| Error::part(name, error))
                };
                let gate_up = gate_up
                    .iter()
                    .map(|(name, rows)| take(name, *rows, hidden))
                    .collect::<Result<Vec<_>>>()?;
                let down = take(&down, hidden, width)?;
                Mlp::new(self.options.backend, gate_up, down).map_err(|error| Error::part(prefix, error))
            })
            .collect()
    }

    fn experts_apart(&mut self, prefix: &str, shape: &MoeShape, names: [&str; 3]) -> Result<Vec<Mlp>> {
        let (hidden, width) = (shape.hidden_size, shape.width);
        let [gate, up, down] = names;
        (0..shape.experts)
            .map(|e| {
                let prefix = format!("{prefix}.experts.{e}");
                let mut take = |name, shape| self.weight(&format!("{prefix}.{name}.weight"), shape);
                let gate_up = [take(gate, [width, hidden])?, take(up, [width, hidden])?];
                let down = take(down, [hidden, width])?;
                Mlp::new(self.options.backend, gate_up, down).map_err(|e| Error::part(&prefix, e))
            })
            .collect()
    }
}
