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
        let stack = format!("{prefix}.switch_mlp");
        let (gate_up, down) = if self.has(&format!("{stack}.gate_proj.weight")) {
            let mut take = |name, rows, width| {
                self.source
                    .take_stack(&format!("{stack}.{name}.weight"), [count, rows, width])
            };
            let gate_up = vec![take("gate_proj", width, hidden)?, take("up_proj", width, hidden)?];
            (gate_up, take("down_proj", hidden, width)?)
        } else {
            let gate_up = self.source.take_stack(
                &format!("{prefix}.experts.gate_up_proj"),
                [count, 2 * width, hidden],
            )?;
            let down = self
                .source
                .take_stack(&format!("{prefix}.experts.down_proj"), [count, hidden, width])?;
            (vec![gate_up], down)
        };
        let mut gate_up: Vec<_> = gate_up.into_iter().map(Vec::into_iter).collect();
        down.into_iter()
            .map(|down| {
                let gate_up = gate_up
                    .iter_mut()
                    .flat_map(Iterator::next)
                    .map(|weight| self.made(weight))
                    .collect::<recant_core::Result<Vec<_>>>()?;
                Ok(Mlp::new(self.options.backend, gate_up, self.made(down)?)?)
            })
            .map(|expert| expert.map_err(|error: recant_core::Error| Error::part(prefix, error)))
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
