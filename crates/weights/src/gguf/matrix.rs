//! Matrices out of a file's bytes, their rows or columns put in order.

use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;

use super::blocks::{Block, Layout, Levels};
use super::heads::Order;
use super::steps::{Levelled, Row};
use super::types::GgmlType;
use crate::{Factors, Stored, StoredGroups};

/// Why a matrix cannot be given, in words that follow its name.
pub(super) type Reason = String;

/// The floats of a tensor, `[rows, width]` of the given type.
///
/// `order` was made for a matrix of this size, and `data` holds the rows that it names.
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

/// A matrix as it is stored: floats as they are, blocks as groups. `order` and `data` are as in [`floats`]; scales of blocks are
/// multiplied by `factor`, in f32 unless it is 1.
pub(super) fn stored(
    kind: GgmlType,
    data: &[u8],
    [rows, width]: [usize; 2],
    order: &Order,
    factor: f32,
) -> Result<Stored, Reason> {
    let Some(layout) = Layout::of(kind) else {
        return floats(kind, data, [rows, width], order).map(Stored::Float);
    };
    let stride = width / kind.block() * kind.bytes();
    let (groups, bits) = (width / layout.group, layout.coding.bits());
    let columns = group_order(layout, groups, order)?;
    let mut quants = vec![0_u8; rows * width * bits / 8];
    let levels = if factor == 1.0 {
        layout.scales
    } else {
        Levels::One(DType::F32)
    };
    let run = run(kind, order) / layout.group;
    let mut scales = Levelled::new(levels, rows, groups, run);
    // Where there are no biases, one number a row that nobody reads: rows are walked side by side.
    let (biases_a_row, bias_run) = if layout.biased { (groups, run) } else { (1, 1) };
    let mut biases = Levelled::new(levels, rows, biases_a_row, bias_run);

    let (in_block, packed) = (kind.block() / layout.group, layout.group * bits / 8);
    let fill = |row: usize, quants: &mut [u8], mut scales: Row<'_>, mut biases: Row<'_>| {
        let from = match order {
            Order::Rows(order) => order[row],
            _ => row,
        };
        let mut block = Block::default();
        let blocks = data[from * stride..(from + 1) * stride].chunks_exact(kind.bytes());
        for (at, bytes) in blocks.enumerate() {
            layout.decode(bytes, &mut block);
            for i in 0..in_block {
                let group = at * in_block + i;
                let to = columns.as_ref().map_or(group, |columns| columns[group]);
                let scale = block.scales.numbers[i] * block.scales.factor * factor;
                let bias = block.biases.numbers[i] * block.biases.factor;
                if !(scale.is_finite() && bias.is_finite()) {
                    return Some(format!(
                        "row {from}, block {at} has a scale of {scale} and a bias of {bias}; the file is damaged"
                    ));
                }
                scales.put(to, &block.scales, i, scale);
                if layout.biased {
                    biases.put(to, &block.biases, i, bias);
                }
                let numbers = &block.quants[i * layout.group..(i + 1) * layout.group];
                pack(numbers, bits, &mut quants[to * packed..(to + 1) * packed]);
            }
        }
        None
    };
    let damage = quants
        .par_chunks_exact_mut((groups * packed).max(1))
        .zip(scales.by_row())
        .zip(biases.by_row())
        .enumerate()
        .find_map_first(|(row, ((quants, scales), biases))| fill(row, quants, scales, biases));
    if let Some(reason) = damage {
        return Err(reason);
    }

    let told = |error: candle_core::Error| error.to_string();
    let (scales, scale_factors) = scales.tensors().map_err(told)?;
    let (biases, bias_factors) = match layout.biased {
        true => biases
            .tensors()
            .map(|(biases, factors)| (Some(biases), factors))
            .map_err(told)?,
        false => (None, None),
    };
    Ok(Stored::Groups(StoredGroups {
        coding: layout.coding,
        group: layout.group,
        quants: Tensor::from_vec(quants, (rows, width * bits / 8), &Device::Cpu).map_err(told)?,
        scales,
        biases,
        factors: scale_factors.map(|scales| Factors {
            scales,
            biases: bias_factors,
        }),
    }))
}

/// Features that share a factor: a block, or what of it stays together where columns move. Blocks of two levels and what they are
/// cut into are powers of two.
fn run(kind: GgmlType, order: &Order) -> usize {
    match order {
        Order::Columns { width, .. } => {
            let aligned = 1_usize.checked_shl(width.trailing_zeros());
            kind.block().min(aligned.unwrap_or(usize::MAX))
        }
        _ => kind.block(),
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use candle_core::quantized::{GgmlDType, QStorage, QTensor};
    use candle_core::safetensors;

    use super::*;
    use crate::Coding;

    const KINDS: [(&str, Option<GgmlDType>); 14] = [
        ("Q4_0", Some(GgmlDType::Q4_0)),
        ("Q4_1", Some(GgmlDType::Q4_1)),
        ("Q5_0", Some(GgmlDType::Q5_0)),
        ("Q5_1", Some(GgmlDType::Q5_1)),
        ("Q8_0", Some(GgmlDType::Q8_0)),
        ("Q2_K", Some(GgmlDType::Q2K)),
        ("Q3_K", Some(GgmlDType::Q3K)),
        ("Q4_K", Some(GgmlDType::Q4K)),
        ("Q5_K", Some(GgmlDType::Q5K)),
        ("Q6_K", Some(GgmlDType::Q6K)),
        ("IQ4_NL", None),
        ("IQ4_XS", None),
        ("MXFP4", None),
        ("NVFP4", None),
    ];

    /// Three rows of 512 elements: bytes, and what the gguf package makes of them.
    fn rows(kind: &str) -> (Vec<u8>, Vec<f32>) {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/gguf/blocks.safetensors");
        let golden = safetensors::load(golden, &Device::Cpu).expect("golden blocks");
        let flat = |what: &str| golden[&format!("{kind}.{what}")].flatten_all().expect("a tensor");
        (
            flat("bytes").to_vec1().expect("bytes"),
            flat("values").to_vec1().expect("values"),
        )
    }

    fn numbers(x: &Tensor) -> Vec<f32> {
        let x = x.to_dtype(DType::F32).and_then(|x| x.flatten_all());
        x.and_then(|x| x.to_vec1()).expect("numbers")
    }

    /// Scales and biases in one level.
    fn steps(groups: &StoredGroups) -> (Vec<f32>, Option<Vec<f32>>) {
        let times = |whole: &Tensor, factors: Option<&Tensor>| {
            let Some(factors) = factors else {
                return numbers(whole);
            };
            let (whole, factors) = (numbers(whole), numbers(factors));
            let run = whole.len() / factors.len();
            let product = |(i, number): (usize, &f32)| factors[i / run] * (number - 128.0);
            whole.iter().enumerate().map(product).collect()
        };
        let factors = groups.factors.as_ref();
        let biases = groups.biases.as_ref();
        (
            times(&groups.scales, factors.map(|factors| &factors.scales)),
            biases.map(|biases| times(biases, factors.and_then(|factors| factors.biases.as_ref()))),
        )
    }

    /// What groups stand for, by their definition.
    fn values(stored: &Stored) -> Vec<f32> {
        let Stored::Groups(groups) = stored else {
            panic!("groups were expected");
        };
        let quants: Vec<u8> = groups
            .quants
            .flatten_all()
            .and_then(|x| x.to_vec1())
            .expect("quants");
        let (scales, biases) = steps(groups);
        let bits = groups.coding.bits();
        let count = quants.len() * 8 / bits;
        let value = |i: usize| {
            let q = quants[i * bits / 8] >> (i * bits % 8) & (0xff >> (8 - bits));
            let group = i / groups.group;
            let number = match groups.coding {
                Coding::Whole { zero, .. } => f32::from(q) - f32::from(zero),
                Coding::Table(table) => f32::from(table[usize::from(q)]),
                Coding::E4m3 => panic!("no type of GGUF has such bytes"),
            };
            let product = scales[group] * number;
            product + biases.as_ref().map_or(0.0, |biases| biases[group])
        };
        (0..count).map(value).collect()
    }

    fn read(kind: &str, data: &[u8], order: &Order) -> Result<Stored, Reason> {
        stored(GgmlType::named(kind).expect("a type"), data, [3, 512], order, 1.0)
    }

    #[test]
    fn every_type_stands_for_what_the_gguf_package_reads_bit_for_bit() {
        for (kind, _) in KINDS {
            let (data, expected) = rows(kind);
            let found = values(&read(kind, &data, &Order::AsStored).expect(kind));
            assert!(found == expected, "{kind}");
        }
    }

    #[test]
    fn the_types_that_candle_knows_stand_for_what_it_reads_bit_for_bit() {
        for (kind, dtype) in KINDS {
            let Some(dtype) = dtype else { continue };
            let (data, _) = rows(kind);
            let expected = QStorage::from_data(data.clone().into(), &Device::Cpu, dtype)
                .and_then(|storage| QTensor::new(storage, (3, 512)))
                .and_then(|tensor| tensor.dequantize(&Device::Cpu))
                .expect(kind);
            let found = values(&read(kind, &data, &Order::AsStored).expect(kind));
            assert!(found == numbers(&expected), "{kind}");
        }
    }

    #[test]
    fn columns_and_rows_that_move_keep_their_values_in_every_type() {
        // Two and three value heads a key head, of 128 and 32 columns: a block of 256 lies across heads.
        for (width, runs) in [
            (128, vec![0, 2, 1, 3]),
            (32, (0..16).map(|i| i * 7 % 16).collect()),
        ] {
            let order = Order::Columns {
                width,
                runs: runs.clone(),
            };
            for (kind, _) in KINDS {
                let (data, flat) = rows(kind);
                let moved = values(&read(kind, &data, &order).expect(kind));
                for (row, found) in moved.chunks_exact(512).enumerate() {
                    for (to, found) in found.chunks_exact(width).enumerate() {
                        let from = row * 512 + runs[to] * width;
                        assert!(*found == flat[from..from + width], "{kind}, heads of {width}");
                    }
                }
            }
        }
        for (kind, _) in KINDS {
            let (data, flat) = rows(kind);
            let moved = values(&read(kind, &data, &Order::Rows(vec![2, 0, 1])).expect(kind));
            assert!(moved == [&flat[1024..], &flat[..1024]].concat(), "{kind}");
        }
    }

    #[test]
    fn factors_are_shared_by_a_block_or_by_what_of_it_stays_together() {
        let (data, _) = rows("Q6_K");
        let moved = |width| Order::Columns {
            width,
            runs: (0..512 / width).rev().collect(),
        };
        for (order, runs) in [
            (Order::AsStored, 2),
            (moved(256), 2),
            (moved(128), 4),
            (moved(32), 16),
        ] {
            let Ok(Stored::Groups(groups)) = read("Q6_K", &data, &order) else {
                panic!("groups were expected");
            };
            let factors = groups.factors.expect("factors");
            assert_eq!(
                (groups.scales.dtype(), groups.scales.dims()),
                (DType::U8, &[3, 32][..])
            );
            assert_eq!(factors.scales.dims(), [3, runs], "{order:?}");
        }
    }

    #[test]
    fn floats_move_as_blocks_do() {
        let numbers: Vec<f32> = (0..12).map(|i| i as f32).collect();
        let data: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
        let kind = GgmlType::named("F32").expect("a type");
        let read = |order| {
            floats(kind, &data, [3, 4], &order).and_then(|x| x.to_vec2::<f32>().map_err(|e| e.to_string()))
        };
        let columns = read(Order::Columns {
            width: 2,
            runs: vec![1, 0],
        });
        assert_eq!(columns.expect("columns")[1], [6.0, 7.0, 4.0, 5.0]);
        assert_eq!(
            read(Order::Rows(vec![2, 0, 1])).expect("rows")[0],
            [8.0, 9.0, 10.0, 11.0]
        );
    }

    #[test]
    fn heads_that_share_a_group_are_not_moved() {
        let (data, _) = rows("Q6_K");
        let order = Order::Columns {
            width: 8,
            runs: (0..64).rev().collect(),
        };
        let error = read("Q6_K", &data, &order).expect_err("a refusal");
        assert!(error.contains("heads of 8, which groups of 16 share"), "{error}");
    }

    #[test]
    fn a_scale_that_is_no_number_is_named_by_its_block() {
        for (kind, at) in [("Q8_0", 0), ("Q4_K", 2), ("Q6_K", 208), ("Q4_1", 2)] {
            let (mut data, _) = rows(kind);
            // The second row's first block.
            let start = data.len() / 3 + at;
            data[start..start + 2].copy_from_slice(&[0, 0x7e]);
            let error = read(kind, &data, &Order::AsStored).expect_err("a refusal");
            assert!(error.contains("row 1, block 0 has"), "{kind}: {error}");
        }
        for (kind, at, byte) in [
            ("MXFP4", 17 * 5, 253),
            ("NVFP4", 36 * 5 + 3, 0x7f),
            ("NVFP4", 36 * 5, 0x81),
        ] {
            let (mut data, _) = rows(kind);
            data[at] = byte;
            let error = read(kind, &data, &Order::AsStored).expect_err("a refusal");
            assert!(
                error.contains("row 0, block 5 has a scale of inf"),
                "{kind}: {error}"
            );
        }
    }

    #[test]
    fn a_factor_beside_a_matrix_multiplies_its_scales() {
        let (data, _) = rows("NVFP4");
        let kind = GgmlType::named("NVFP4").expect("a type");
        let scales = |factor| match stored(kind, &data, [3, 512], &Order::AsStored, factor) {
            Ok(Stored::Groups(groups)) => (groups.scales.dtype(), numbers(&groups.scales)),
            other => panic!("{other:?}"),
        };
        let (plain, times) = (scales(1.0), scales(0.3));
        assert_eq!((plain.0, times.0), (DType::F16, DType::F32));
        for (plain, times) in plain.1.iter().zip(&times.1) {
            assert_eq!(plain * 0.3, *times);
        }
        assert!(stored(kind, &data, [3, 512], &Order::AsStored, f32::MAX).is_err());

        // Scales of two levels come in one then.
        let (data, _) = rows("Q4_K");
        let kind = GgmlType::named("Q4_K").expect("a type");
        let scales = |factor| match stored(kind, &data, [3, 512], &Order::AsStored, factor) {
            Ok(Stored::Groups(groups)) => (groups.factors.is_some(), steps(&groups).0),
            other => panic!("{other:?}"),
        };
        let (plain, times) = (scales(1.0), scales(0.3));
        assert_eq!((plain.0, times.0), (true, false));
        for (plain, times) in plain.1.iter().zip(&times.1) {
            assert_eq!(plain * 0.3, *times);
        }
    }
}
