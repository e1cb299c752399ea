//! Matrices out of a file's bytes, their rows or columns put in order.

use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};

use super::blocks::{Block, Layout};
use super::heads::Order;
use super::types::GgmlType;
use crate::{Stored, StoredGroups};

/// Why a matrix cannot be given, in words that follow its name.
pub(super) type Reason = String;

/// The floats of a tensor, `[rows, width]` of the given type.
///
/// `data` holds at least the rows that `order` names.
pub(super) fn floats(
    kind: GgmlType,
    data: &[u8],
    [rows, width]: [usize; 2],
    order: &Order,
) -> Result<Tensor, Reason> {
    let dtype = match kind.name() {
        "F32" => DType::F32,
        "F16" => DType::F16,
        "BF16" => DType::BF16,
        name => return Err(format!("it is of type {name}; expected F32, F16 or BF16 here")),
    };
    let size = dtype.size_in_bytes();
    check(order, [rows, width], data.len() / (width * size).max(1))?;
    let row = |row: usize| &data[row * width * size..(row + 1) * width * size];
    let bytes: Vec<u8> = match order {
        Order::AsStored => return tensor(&data[..rows * width * size], dtype, [rows, width]),
        Order::Rows(order) => order.iter().flat_map(|from| row(*from)).copied().collect(),
        Order::Columns { width: run, runs } => {
            let run = run * size;
            (0..rows)
                .flat_map(|i| {
                    runs.iter()
                        .flat_map(move |from| &row(i)[from * run..(from + 1) * run])
                })
                .copied()
                .collect()
        }
    };
    tensor(&bytes, dtype, [rows, width])
}

fn tensor(bytes: &[u8], dtype: DType, shape: [usize; 2]) -> Result<Tensor, Reason> {
    Tensor::from_raw_buffer(bytes, dtype, &shape, &Device::Cpu).map_err(|error| error.to_string())
}

/// A matrix as it is stored: floats as they are, blocks as groups.
pub(super) fn stored(
    kind: GgmlType,
    data: &[u8],
    [rows, width]: [usize; 2],
    order: &Order,
) -> Result<Stored, Reason> {
    let Some(layout) = Layout::of(kind) else {
        return floats(kind, data, [rows, width], order).map(Stored::Float);
    };
    let stride = width / kind.block() * kind.bytes();
    check(order, [rows, width], data.len() / stride.max(1))?;
    let groups = width / layout.group;
    let columns = group_order(layout, groups, order)?;
    let mut quants = vec![0_u8; rows * width * layout.bits / 8];
    let mut scales = vec![0.0_f32; rows * groups];
    let mut biases = vec![0.0_f32; if layout.biased { rows * groups } else { 0 }];

    let (in_block, packed) = (kind.block() / layout.group, layout.group * layout.bits / 8);
    let mut block = Block::default();
    for row in 0..rows {
        let from = match order {
            Order::Rows(order) => order[row],
            _ => row,
        };
        let blocks = data[from * stride..(from + 1) * stride].chunks_exact(kind.bytes());
        for (at, bytes) in blocks.enumerate() {
            layout.decode(bytes, &mut block);
            for i in 0..in_block {
                let group = at * in_block + i;
                let to = row * groups + columns.as_ref().map_or(group, |columns| columns[group]);
                scales[to] = block.scales[i];
                if layout.biased {
                    biases[to] = block.biases[i];
                }
                if !(block.scales[i].is_finite() && block.biases[i].is_finite()) {
                    return Err(format!(
                        "row {from}, block {at} has a scale of {} and a bias of {}; the file is damaged",
                        block.scales[i], block.biases[i]
                    ));
                }
                let numbers = &block.quants[i * layout.group..(i + 1) * layout.group];
                pack(numbers, layout.bits, &mut quants[to * packed..(to + 1) * packed]);
            }
        }
    }

    let small = |x: Vec<f32>| match layout.scales {
        DType::F16 => Tensor::from_vec(
            x.into_iter().map(f16::from_f32).collect(),
            (rows, groups),
            &Device::Cpu,
        ),
        DType::BF16 => Tensor::from_vec(
            x.into_iter().map(bf16::from_f32).collect(),
            (rows, groups),
            &Device::Cpu,
        ),
        _ => Tensor::from_vec(x, (rows, groups), &Device::Cpu),
    };
    let told = |error: candle_core::Error| error.to_string();
    Ok(Stored::Groups(StoredGroups {
        bits: layout.bits,
        group: layout.group,
        zero: layout.zero,
        quants: Tensor::from_vec(quants, (rows, width * layout.bits / 8), &Device::Cpu).map_err(told)?,
        scales: small(scales).map_err(told)?,
        biases: layout.biased.then(|| small(biases)).transpose().map_err(told)?,
    }))
}

/// Refuses an order that was made for a matrix of another size.
fn check(order: &Order, shape: [usize; 2], in_file: usize) -> Result<(), Reason> {
    if order.fits(shape, in_file) {
        Ok(())
    } else {
        Err(
            "it has another number of rows or columns than the value heads in the metadata have together"
                .to_owned(),
        )
    }
}

/// Where each group of a row goes, if they move. A group is moved whole: its numbers and its scale.
fn group_order(layout: Layout, groups: usize, order: &Order) -> Result<Option<Vec<usize>>, Reason> {
    let Order::Columns { width, runs } = order else {
        return Ok(None);
    };
    if width % layout.group != 0 {
        return Err(format!(
            "its columns belong to heads of {width}, which groups of {} share; expected heads of whole groups: use a file \
             with this tensor in F16",
            layout.group
        ));
    }
    let each = width / layout.group;
    let mut places = vec![0; groups];
    for (to, from) in runs.iter().enumerate() {
        for i in 0..each {
            places[from * each + i] = to * each + i;
        }
    }
    Ok(Some(places))
}

/// Numbers as a little-endian stream of bits.
fn pack(numbers: &[u8], bits: usize, to: &mut [u8]) {
    if bits == 8 {
        to.copy_from_slice(numbers);
        return;
    }
    for (byte, pair) in to.iter_mut().zip(numbers.as_chunks::<2>().0) {
        *byte = pair[0] | pair[1] << 4;
    }
}
