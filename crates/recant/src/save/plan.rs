//! Which tensors are written, and of what they are made.

use std::collections::BTreeMap;
use std::ops::Range;

use recant_core::candle::DType;
use recant_layers::{Config, GroupFormat};
use recant_weights::{Dtype, Folder, TensorInfo, Weights};

use super::fused::{self, Pair};
use super::width;
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
/// What the model's tensors are put behind where the source has names of its own.
const MODEL: &str = "model.";
/// What the multi-token-prediction head is put behind.
const MTP: &str = "mtp.";

/// How a tensor is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// With the values it has, in this type, which holds them.
    Kept(DType),
    /// Plus one, in F32.
    OnePlus,
    /// As `weight`, `scales` and `biases`.
    Rounded(GroupFormat),
}

/// Something that a tensor is made of.
#[derive(Debug)]
pub(super) enum Piece<'a> {
    /// Rows of a tensor of floats, which are read a few at a time.
    Rows(&'a TensorInfo, Range<usize>),
    /// What is stored in some other way, and read whole.
    Whole(Whole<'a>),
}

/// A tensor, or a matrix of a stack, by its canonical name, in whatever form it is stored.
#[derive(Debug, Clone)]
pub(super) struct Whole<'a> {
    /// What holds its numbers.
    pub(super) tensor: &'a TensorInfo,
    pub(super) name: String,
    /// That of the tensor of numbers.
    pub(super) shape: Vec<usize>,
    /// The matrix of the stack.
    pub(super) index: Option<usize>,
    /// Those of its rows that are wanted: not all of two projections in one.
    pub(super) rows: Range<usize>,
    /// Whether another piece has other rows of the same.
    pub(super) again: bool,
}

/// A tensor to write, or the three of a rounded matrix.
#[derive(Debug)]
pub(super) struct Unit<'a> {
    /// Its name; of a rounded matrix, the part that `.weight`, `.scales` and `.biases` follow.
    pub(super) name: String,
    pub(super) mtp: bool,
    pub(super) shape: Vec<usize>,
    pub(super) form: Form,
    pub(super) pieces: Vec<Piece<'a>>,
}

/// Everything to write.
pub(super) struct Plan<'a> {
    pub(super) units: Vec<Unit<'a>>,
}

/// A shape, and the pieces that fill it.
type Stack<'a> = (Vec<usize>, Vec<Piece<'a>>);
/// Tensors of the model, or of its head, by canonical name.
type Named<'a> = BTreeMap<String, &'a TensorInfo>;

impl<'a> Plan<'a> {
    /// # Errors
    /// Experts that are incomplete or differ in shape, or a tensor of another number of dimensions than it has anywhere.
    pub(super) fn new(folder: &'a Folder, config: &'a Config, format: GroupFormat) -> Result<Self> {
        let mut units = Vec::new();
        for (mtp, weights) in [(false, Some(folder.weights()?)), (true, folder.mtp()?)] {
            let mut named = Named::new();
            for (name, tensor) in weights.iter().flat_map(Weights::tensors) {
                // Scales belong to the matrix beside them, or to a cache that is not kept in so few bits here.
                if folder.describe(tensor).parameters > 0 && !name.ends_with("_scale") {
                    // Some formats call a packed matrix so.
                    let name = name.strip_suffix("_packed").unwrap_or(name);
                    named.insert(name.to_owned(), tensor);
                }
            }
            let planner = Planner {
                folder,
                config,
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

    /// The plan with norms in the form of a conversion.
    pub(super) fn with_norms_plus_one(mut self) -> Self {
        for unit in &mut self.units {
            let of_head = unit.mtp && unit.name.starts_with("mtp.pre_fc_norm_");
            let of_layer =
                unit.name.ends_with("norm.weight") && !unit.name.ends_with(".linear_attn.norm.weight");
            if unit.shape.len() == 1 && (of_head || of_layer) {
                unit.form = Form::OnePlus;
            }
        }
        self
    }

    /// The plan with convolutions in the form of a conversion, which tells that norms are.
    pub(super) fn with_taps_in_the_middle(mut self) -> Self {
        for unit in &mut self.units {
            // The same bytes in the same order.
            if let ([channels, 1, taps], true) = (&unit.shape[..], unit.name.ends_with(".conv1d.weight")) {
                unit.shape = vec![*channels, *taps, 1];
            }
        }
        self
    }

    /// Bytes that are read.
    pub(super) fn bytes(&self) -> u64 {
        self.units
            .iter()
            .flat_map(|unit| &unit.pieces)
            .map(Piece::bytes)
            .sum()
    }
}

impl Whole<'_> {
    /// Length of a row.
    pub(super) fn width(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }
}

impl Piece<'_> {
    /// Bytes of it, scales aside.
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Self::Rows(tensor, rows) => bytes(tensor, rows),
            Self::Whole(whole) => {
                let [lead @ .., _] = &whole.shape[..] else {
                    return whole.tensor.bytes();
                };
                let all: usize = lead.iter().product();
                whole.tensor.bytes() / all.max(1) as u64 * whole.rows.len() as u64
            }
        }
    }

    fn tensor(&self) -> &TensorInfo {
        match self {
            Self::Rows(tensor, _) => tensor,
            Self::Whole(whole) => whole.tensor,
        }
    }

    /// The type that holds its numbers.
    fn dtype(&self) -> DType {
        match self.tensor().dtype {
            Dtype::BF16 => DType::BF16,
            Dtype::F16 => DType::F16,
            _ => DType::F32,
        }
    }
}

/// Bytes of some rows.
pub(super) fn bytes(tensor: &TensorInfo, rows: &Range<usize>) -> u64 {
    let all = rows_of(&tensor.shape).max(1);
    tensor.bytes() / all as u64 * rows.len() as u64
}

/// All dimensions but the last count as one.
fn rows_of(shape: &[usize]) -> usize {
    let lead = shape.len().saturating_sub(1);
    shape[..lead].iter().product()
}

struct Planner<'a> {
    folder: &'a Folder,
    config: &'a Config,
    format: GroupFormat,
    mtp: bool,
    named: Named<'a>,
}

impl<'a> Planner<'a> {
    fn units(&self, units: &mut Vec<Unit<'a>>) -> Result<()> {
        let mut stacked = Vec::new();
        for (name, tensor) in &self.named {
            if let Some(fused) = self.fused(name)? {
                units.extend(fused);
                continue;
            }
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

    /// What is written for one of two matrices that are to be fused: both, for the first, and nothing for the second.
    fn fused(&self, name: &str) -> Result<Option<Option<Unit<'a>>>> {
        if !self.folder.is_gguf() || self.folder.config()["model_type"] != "qwen3_next" {
            return Ok(None);
        }
        for Pair { parts, whole, rows } in fused::pairs(self.config) {
            if name.ends_with(parts[1]) {
                return Ok(Some(None));
            }
            let Some(prefix) = name.strip_suffix(parts[0]) else {
                continue;
            };
            let mut found = Vec::new();
            for part in parts {
                let name = format!("{prefix}{part}");
                let tensor = self.named.get(&name).copied();
                let tensor = tensor.ok_or_else(|| self.refuse(&format!("there is no {name}")))?;
                let shape = self.shape(&name, tensor);
                found.push((name, tensor, shape));
            }
            let pieces = rows.into_iter().map(|(which, rows)| {
                let (name, tensor, shape) = &found[which];
                self.whole(name, tensor, shape, None, rows, false)
            });
            let pieces: Vec<Piece<'a>> = pieces.collect();
            let mut shape = found[0].2.clone();
            shape[0] += found[1].2[0];
            let rounded = !GATES.iter().any(|gate| gate.ends_with(whole));
            let (first, tensor, _) = &found[0];
            let name = self.before(first, tensor) + prefix + whole;
            return Ok(Some(Some(self.unit(name, shape, rounded, pieces)?)));
        }
        Ok(None)
    }

    /// A tensor on its own.
    fn single(&self, name: &str, tensor: &'a TensorInfo) -> Result<Unit<'a>> {
        let shape = self.shape(name, tensor);
        let is_matrix = match shape.len() {
            2 => true,
            3 => name.contains(".switch_mlp."),
            _ => false,
        };
        let is_weight = name.ends_with(".weight") && !GATES.iter().any(|gate| name.ends_with(gate));
        let written = self.before(name, tensor) + name;
        self.unit(
            written,
            shape.clone(),
            is_matrix && is_weight,
            self.all(name, tensor, shape),
        )
    }

    /// All of a tensor, or of a stack.
    fn all(&self, name: &str, tensor: &'a TensorInfo, shape: Vec<usize>) -> Vec<Piece<'a>> {
        if self.is_plain(tensor) {
            return vec![Piece::Rows(tensor, 0..rows_of(&shape))];
        }
        match shape[..] {
            [count, rows, _] if !name.ends_with(".conv1d.weight") => (0..count)
                .map(|index| self.whole(name, tensor, &shape, Some(index), 0..rows, false))
                .collect(),
            _ => vec![self.whole(name, tensor, &shape, None, 0..rows_of(&shape), false)],
        }
    }

    fn whole(
        &self,
        name: &str,
        tensor: &'a TensorInfo,
        shape: &[usize],
        index: Option<usize>,
        rows: Range<usize>,
        again: bool,
    ) -> Piece<'a> {
        Piece::Whole(Whole {
            tensor,
            name: name.to_owned(),
            shape: shape.to_vec(),
            index,
            rows,
            again,
        })
    }

    /// Whether a tensor's bytes are floats in the order of its rows.
    fn is_plain(&self, tensor: &TensorInfo) -> bool {
        !self.folder.is_gguf() && !matches!(tensor.dtype, Dtype::Other(_))
    }

    /// The shape of the numbers that a tensor holds, whatever it holds them in.
    fn shape(&self, name: &str, tensor: &TensorInfo) -> Vec<usize> {
        let mut shape = tensor.shape.clone();
        if self.is_plain(tensor) {
            return shape;
        }
        if !self.folder.is_gguf() {
            if let Some(last) = shape.last_mut() {
                *last = width::of(self.config, self.mtp, name);
            }
            return shape;
        }
        match shape[..] {
            [channels, taps] if name.ends_with(".conv1d.weight") => vec![channels, 1, taps],
            [features] if name.ends_with(".shared_expert_gate.weight") => vec![1, features],
            // Two matrices in one.
            [rows, features] if tensor.name.ends_with(".ssm_ba.weight") && !name.ends_with("_ba.weight") => {
                vec![rows / 2, features]
            }
            _ => shape,
        }
    }

    /// What is written before a canonical name.
    fn before(&self, name: &str, tensor: &TensorInfo) -> String {
        if self.mtp {
            return MTP.to_owned();
        }
        if self.folder.is_gguf() {
            return if name.starts_with("lm_head.") { "" } else { MODEL }.to_owned();
        }
        let stored = tensor.name.strip_suffix("_packed").unwrap_or(&tensor.name);
        stored.strip_suffix(name).unwrap_or_default().to_owned()
    }

    /// The experts of a mixture, stacked by projection.
    fn experts(&self, mixture: &str, units: &mut Vec<Unit<'a>>) -> Result<()> {
        let prefix = format!("{mixture}.experts.");
        let fused = |name: &str| {
            let name = format!("{prefix}{name}");
            let tensor = self.named.get(&name).copied()?;
            Some((name, tensor))
        };
        let stacks: Vec<Stack<'a>> = if let Some((gate_up, tensor)) = fused("gate_up_proj") {
            let (down, down_tensor) =
                fused("down_proj").ok_or_else(|| self.refuse(&format!("there is no {prefix}down_proj")))?;
            let shape = self.shape(&gate_up, tensor);
            let [experts, rows, hidden] = shape[..] else {
                return Err(self.refuse(&format!(
                    "{} has shape {:?}; expected three dimensions",
                    tensor.name, tensor.shape
                )));
            };
            let width = rows / 2;
            let half = |which: usize| {
                let piece = |e: usize| {
                    let half = which * width..(which + 1) * width;
                    if self.is_plain(tensor) {
                        return Piece::Rows(tensor, e * rows + half.start..e * rows + half.end);
                    }
                    self.whole(&gate_up, tensor, &shape, Some(e), half, which > 0)
                };
                (vec![experts, width, hidden], (0..experts).map(piece).collect())
            };
            let down_shape = self.shape(&down, down_tensor);
            let all = self.all(&down, down_tensor, down_shape.clone());
            vec![half(0), half(1), (down_shape, all)]
        } else {
            PROJECTIONS
                .iter()
                .map(|(_, names)| self.stack(&prefix, names))
                .collect::<Result<_>>()?
        };
        // Of any tensor of the mixture, what stands before its canonical name.
        let (canonical, tensor) = self
            .named
            .range(prefix.clone()..)
            .next()
            .ok_or_else(|| self.refuse(&format!("there are no {prefix}")))?;
        let before = self.before(canonical, tensor);
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
            spelled.find_map(|name| self.named.get_key_value(&name))
        };
        let experts: Vec<(&String, &&TensorInfo)> = (0..).map_while(find).collect();
        let counted = self.named.keys().filter(|name| {
            let name = name.strip_prefix(prefix).unwrap_or_default();
            names.iter().any(|end| name.ends_with(&format!(".{end}.weight")))
        });
        let shape = match experts.first() {
            Some((name, tensor)) if counted.count() == experts.len() => self.shape(name, tensor),
            _ => {
                return Err(self.refuse(&format!(
                    "{prefix}{}.{}.weight is missing",
                    experts.len(),
                    names[0]
                )))
            }
        };
        let differs =
            |(name, tensor): &&(&String, &&TensorInfo)| shape.len() != 2 || self.shape(name, tensor) != shape;
        if let Some((_, other)) = experts.iter().find(differs) {
            return Err(self.refuse(&format!(
                "{} has shape {:?}, and the first expert {shape:?}",
                other.name, other.shape
            )));
        }
        let stacked = [&[experts.len()], shape.as_slice()].concat();
        let pieces = experts
            .into_iter()
            .flat_map(|(name, tensor)| self.all(name, tensor, shape.clone()));
        Ok((stacked, pieces.collect()))
    }

    fn unit(
        &self,
        name: String,
        shape: Vec<usize>,
        rounded: bool,
        pieces: Vec<Piece<'a>>,
    ) -> Result<Unit<'a>> {
        let features = shape.last().copied().unwrap_or(0);
        // As the loader has it: kernels read features in chunks of 32.
        let fits = features > 0 && features.is_multiple_of(self.format.group) && features.is_multiple_of(32);
        let module = name.strip_suffix(".weight");
        let (name, form) = match module {
            Some(module) if rounded && fits => (module.to_owned(), Form::Rounded(self.format)),
            _ => {
                // Experts that differ in type are kept in one that holds all of them.
                let mut dtypes = pieces.iter().map(Piece::dtype);
                let first = dtypes.next().unwrap_or(DType::F32);
                let same = dtypes.all(|dtype| dtype == first);
                // What is stored as a power is kept as its logarithm.
                let logarithm = self.folder.is_gguf() && name.ends_with(".A_log");
                let dtype = if same && !logarithm { first } else { DType::F32 };
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
        Error::Save {
            folder: self.folder.path().to_owned(),
            reason: reason.to_owned(),
        }
    }
}
