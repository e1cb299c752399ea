//! Which tensors are written, and of which rows they are made.

use std::collections::BTreeMap;
use std::ops::Range;

use recant_core::candle::DType;
use recant_layers::GroupFormat;
use recant_weights::{Dtype, Folder, Part, TensorInfo};

use crate::{Error, Result};

/// Ends of the names of small matrices that decide much: gates and routers.
const GATES: [&str; 5] = [
    ".in_proj_a.weight",
    ".in_proj_b.weight",
    ".in_proj_ba.weight",
    ".mlp.gate.weight",
    ".shared_expert_gate.weight",
];
/// A projection of an expert: its name in a stack, and the names it has where each expert is stored on its own.
const PROJECTIONS: [(&str, [&str; 2]); 3] = [
    ("gate_proj", ["gate_proj", "w1"]),
    ("up_proj", ["up_proj", "w3"]),
    ("down_proj", ["down_proj", "w2"]),
];
/// What the multi-token-prediction head is put behind.
const MTP: &str = "mtp.";

/// How a tensor is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// In the type and with the values it has.
    Kept(DType),
    /// Plus one, in F32.
    OnePlus,
    /// As `weight`, `scales` and `biases`.
    Rounded(GroupFormat),
}

/// A tensor to write, or the three of a rounded matrix.
#[derive(Debug)]
pub(super) struct Unit<'a> {
    /// Its name; of a rounded matrix, the part that `.weight`, `.scales` and `.biases` follow.
    pub(super) name: String,
    pub(super) mtp: bool,
    pub(super) shape: Vec<usize>,
    pub(super) form: Form,
    /// The rows it is made of.
    pub(super) pieces: Pieces<'a>,
}

/// Everything to write.
pub(super) struct Plan<'a> {
    pub(super) units: Vec<Unit<'a>>,
}

/// Rows of tensors, in order.
type Pieces<'a> = Vec<(&'a TensorInfo, Range<usize>)>;
/// A shape, and the rows that fill it.
type Stack<'a> = (Vec<usize>, Pieces<'a>);
/// Tensors of the model, or of its head, by canonical name.
type Named<'a> = BTreeMap<&'a str, &'a TensorInfo>;

impl<'a> Plan<'a> {
    /// # Errors
    /// A tensor that is quantized already, or experts that are incomplete or differ in shape.
    pub(super) fn new(folder: &'a Folder, format: GroupFormat) -> Result<Self> {
        let (mut text, mut head) = (Named::new(), Named::new());
        for (tensor, part) in folder.placed() {
            match part {
                Part::Text(name) => text.insert(name, tensor),
                Part::Mtp(name) => head.insert(name, tensor),
                _ => None,
            };
        }
        let mut units = Vec::new();
        for (mtp, named) in [(false, text), (true, head)] {
            let planner = Planner {
                folder,
                format,
                mtp,
                named,
            };
            planner.units(&mut units)?;
        }
        Ok(Self { units })
    }

    /// The plan without the tensors of some canonical names of the model.
    pub(super) fn without(mut self, leave: impl Fn(&str) -> bool) -> Self {
        self.units.retain(|unit| {
            let name = match unit.form {
                Form::Rounded(_) => format!("{}.weight", unit.name),
                _ => unit.name.clone(),
            };
            unit.mtp || !leave(name.strip_prefix("language_model.").unwrap_or(&name))
        });
        self
    }

    /// The plan with norms and convolutions in the form of a conversion, if that is wanted.
    pub(super) fn converted(mut self, wanted: bool) -> Self {
        for unit in self.units.iter_mut().filter(|_| wanted) {
            match unit.shape[..] {
                [_] if unit.name.ends_with("norm.weight")
                    && !unit.name.ends_with(".linear_attn.norm.weight") =>
                {
                    unit.form = Form::OnePlus;
                }
                [_] if unit.mtp && unit.name.starts_with("mtp.pre_fc_norm_") => unit.form = Form::OnePlus,
                // The same bytes in the same order.
                [channels, 1, taps] if unit.name.ends_with(".conv1d.weight") => {
                    unit.shape = vec![channels, taps, 1]
                }
                _ => {}
            }
        }
        self
    }

    /// Bytes that are read.
    pub(super) fn bytes(&self) -> u64 {
        let pieces = self.units.iter().flat_map(|unit| &unit.pieces);
        pieces.map(|(tensor, rows)| bytes(tensor, rows)).sum()
    }
}

/// Bytes of some rows.
pub(super) fn bytes(tensor: &TensorInfo, rows: &Range<usize>) -> u64 {
    let all = row_count(tensor).max(1);
    tensor.bytes() / all as u64 * rows.len() as u64
}

fn row_count(tensor: &TensorInfo) -> usize {
    let lead = tensor.shape.len().saturating_sub(1);
    tensor.shape[..lead].iter().product()
}

struct Planner<'a> {
    folder: &'a Folder,
    format: GroupFormat,
    mtp: bool,
    named: Named<'a>,
}

impl<'a> Planner<'a> {
    fn units(&self, units: &mut Vec<Unit<'a>>) -> Result<()> {
        let mut stacked = Vec::new();
        for (name, tensor) in &self.named {
            match name.split_once(".experts.") {
                // A mixture's names follow one another.
                Some((mixture, _)) if stacked.last() == Some(&mixture) => {}
                Some((mixture, _)) => {
                    stacked.push(mixture);
                    self.experts(mixture, units)?;
                }
                None => units.push(self.single(name, tensor)?),
            }
        }
        Ok(())
    }

    /// A tensor on its own.
    fn single(&self, name: &str, tensor: &'a TensorInfo) -> Result<Unit<'a>> {
        let is_matrix = match tensor.shape.len() {
            2 => true,
            3 => name.contains(".switch_mlp."),
            _ => false,
        };
        let is_weight = name.ends_with(".weight") && !GATES.iter().any(|gate| name.ends_with(gate));
        let written = if self.mtp {
            format!("{MTP}{name}")
        } else {
            tensor.name.clone()
        };
        let pieces = vec![(tensor, 0..row_count(tensor))];
        self.unit(written, tensor.shape.clone(), is_matrix && is_weight, pieces)
    }

    /// The experts of a mixture, stacked by projection.
    fn experts(&self, mixture: &str, units: &mut Vec<Unit<'a>>) -> Result<()> {
        let prefix = format!("{mixture}.experts.");
        let fused = |name: &str| self.named.get(format!("{prefix}{name}").as_str()).copied();
        let stacks: Vec<Stack<'a>> = if let Some(gate_up) = fused("gate_up_proj") {
            let down =
                fused("down_proj").ok_or_else(|| self.refuse(&format!("there is no {prefix}down_proj")))?;
            let [experts, rows, hidden] = gate_up.shape[..] else {
                return Err(self.refuse(&format!(
                    "{} has shape {:?}; expected three dimensions",
                    gate_up.name, gate_up.shape
                )));
            };
            let width = rows / 2;
            let half = |which: usize| {
                let pieces = (0..experts).map(|e| {
                    let start = e * rows + which * width;
                    (gate_up, start..start + width)
                });
                (vec![experts, width, hidden], pieces.collect())
            };
            let all = (down.shape.clone(), vec![(down, 0..row_count(down))]);
            vec![half(0), half(1), all]
        } else {
            PROJECTIONS
                .iter()
                .map(|(_, names)| self.stack(&prefix, names))
                .collect::<Result<_>>()?
        };
        // Of any tensor of the mixture, what stands before its canonical name.
        let (canonical, tensor) = self
            .named
            .range(prefix.as_str()..)
            .next()
            .ok_or_else(|| self.refuse(&format!("there are no {prefix}")))?;
        let before = match self.mtp {
            true => MTP,
            false => tensor.name.strip_suffix(canonical).unwrap_or_default(),
        };
        for ((name, _), (shape, pieces)) in PROJECTIONS.iter().zip(stacks) {
            let name = format!("{before}{mixture}.switch_mlp.{name}.weight");
            units.push(self.unit(name, shape, true, pieces)?);
        }
        Ok(())
    }

    /// One projection of experts that are stored each on its own.
    fn stack(&self, prefix: &str, names: &[&str; 2]) -> Result<Stack<'a>> {
        let find = |e: usize| {
            let mut spelled = names.iter().map(|name| format!("{prefix}{e}.{name}.weight"));
            spelled.find_map(|name| self.named.get(name.as_str()).copied())
        };
        let experts: Vec<&TensorInfo> = (0..).map_while(find).collect();
        let counted = self.named.keys().filter(|name| {
            let name = name.strip_prefix(prefix).unwrap_or_default();
            names.iter().any(|end| name.ends_with(&format!(".{end}.weight")))
        });
        let shape = match experts.first() {
            Some(first) if counted.count() == experts.len() => &first.shape,
            _ => {
                return Err(self.refuse(&format!(
                    "{prefix}{}.{}.weight is missing",
                    experts.len(),
                    names[0]
                )))
            }
        };
        if let Some(other) = experts
            .iter()
            .find(|expert| expert.shape != *shape || shape.len() != 2)
        {
            return Err(self.refuse(&format!(
                "{} has shape {:?}, and the first expert {shape:?}",
                other.name, other.shape
            )));
        }
        let stacked = [&[experts.len()], shape.as_slice()].concat();
        let pieces = experts.into_iter().map(|expert| (expert, 0..expert.shape[0]));
        Ok((stacked, pieces.collect()))
    }

    fn unit(&self, name: String, shape: Vec<usize>, rounded: bool, pieces: Pieces<'a>) -> Result<Unit<'a>> {
        let mut dtypes = Vec::new();
        for (tensor, _) in &pieces {
            dtypes.push(match tensor.dtype {
                Dtype::F32 => DType::F32,
                Dtype::BF16 => DType::BF16,
                Dtype::F16 => DType::F16,
                _ => {
                    return Err(self.refuse(&format!(
                        "tensor {} is of type {}: it is quantized already",
                        tensor.name, tensor.dtype
                    )))
                }
            });
        }
        let features = shape.last().copied().unwrap_or(0);
        // As the loader has it: kernels read features in chunks of 32.
        let fits = features > 0 && features.is_multiple_of(self.format.group) && features.is_multiple_of(32);
        let module = name.strip_suffix(".weight");
        let (name, form) = match module {
            Some(module) if rounded && fits => (module.to_owned(), Form::Rounded(self.format)),
            _ => {
                // Experts that differ in type are kept in one that holds all of them.
                let same = dtypes.windows(2).all(|pair| pair[0] == pair[1]);
                let dtype = dtypes.first().copied().filter(|_| same).unwrap_or(DType::F32);
                (name, Form::Kept(dtype))
            }
        };
        Ok(Unit {
            name,
            mtp: self.mtp,
            shape,
            form,
            pieces,
        })
    }

    fn refuse(&self, reason: &str) -> Error {
        Error::Quantize {
            folder: self.folder.path().to_owned(),
            reason: reason.to_owned(),
        }
    }
}
