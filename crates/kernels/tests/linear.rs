//! Linear layers: the grouping law, the oracle, and what is refused.

mod common;

use candle_core::{DType, Device, Tensor};
use common::{distance, in_pool, rows, same, Numbers};
use recant_kernels::{
    ActivationPrecision, Backend, Coding, Error, GroupFormat, GroupWeights, Linear, Weight,
};

const TYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

fn cpu(parts: &[Tensor], bias: Option<&Tensor>) -> Linear {
    Linear::new(Backend::Cpu, parts, bias).expect("a layer")
}

fn whole(bits: usize, zero: u8) -> Coding {
    Coding::Whole { bits, zero }
}

const E2M1: Coding = Coding::Table([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]);
const IQ4: Coding = Coding::Table([
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
]);

/// E4M3 by its definition; none where a byte is no number.
fn e4m3(byte: u8) -> Option<f32> {
    let size = match (i32::from(byte >> 3 & 15), f32::from(byte & 7)) {
        (15, 7.0) => return None,
        (0, mantissa) => mantissa / 512.0,
        (exponent, mantissa) => (1.0 + mantissa / 8.0) * 2.0_f32.powi(exponent - 7),
    };
    Some(if byte < 128 { size } else { -size })
}

/// What each of a table's or E4M3's bit patterns stands for.
fn numbers_of(coding: Coding) -> Vec<Option<f32>> {
    match coding {
        Coding::Table(table) => table.map(|number| Some(f32::from(number))).into(),
        _ => (0..=255).map(e4m3).collect(),
    }
}

/// A matrix rounded to what a coding has, with a bias of every group if asked for.
fn coded(weight: &Tensor, coding: Coding, group: usize, scales: DType, bias: Option<f32>) -> GroupWeights {
    let (out, features) = weight.dims2().expect("a matrix");
    let numbers = numbers_of(coding);
    let largest = |of: &mut dyn Iterator<Item = f32>| {
        let largest = of.max_by(|a, b| a.abs().total_cmp(&b.abs()));
        largest.expect("a number")
    };
    let most = largest(&mut numbers.iter().copied().flatten());
    let (mut codes, mut steps) = (Vec::new(), Vec::new());
    for row in weight.to_vec2::<f32>().expect("rows") {
        for x in row.chunks(group) {
            let x: Vec<f32> = x.iter().map(|x| x - bias.unwrap_or(0.0)).collect();
            // Of either sign, so that the largest weight is exact.
            let step = largest(&mut x.iter().copied()) / most;
            steps.push(step);
            for x in x {
                let apart = |number: &Option<f32>| number.map_or(f32::MAX, |n| (step * n - x).abs());
                let nearest =
                    (0..numbers.len()).min_by(|a, b| apart(&numbers[*a]).total_cmp(&apart(&numbers[*b])));
                codes.push(nearest.expect("a number") as u8);
            }
        }
    }
    let quants = match coding.bits() {
        4 => codes.chunks(2).map(|pair| pair[0] | pair[1] << 4).collect(),
        _ => codes,
    };
    let quants = Tensor::from_vec(quants, (out, features * coding.bits() / 8), &Device::Cpu).expect("quants");
    let steps = Tensor::from_vec(steps, (out, features / group), &Device::Cpu).expect("steps");
    let biases = bias.map(|bias| Tensor::full(bias, (out, features / group), &Device::Cpu).expect("biases"));
    let typed = |x: Tensor| x.to_dtype(scales).expect("a type");
    GroupWeights::new(coding, group, quants, typed(steps), biases.map(typed)).expect("groups")
}

/// Every way to hold and to multiply a matrix whose input features are a multiple of 64.
fn every_kind(weight: &Tensor) -> Vec<(String, Weight)> {
    let mut kinds: Vec<(String, Weight)> = TYPES
        .map(|dtype| {
            (
                format!("{dtype:?}"),
                weight.to_dtype(dtype).expect("a type").into(),
            )
        })
        .into();
    for bits in [8, 4] {
        for (group, affine, scales) in [
            (32, false, DType::F16),
            (64, true, DType::BF16),
            (32, true, DType::F32),
            (16, false, DType::BF16),
            (16, true, DType::F32),
        ] {
            let format = GroupFormat {
                bits,
                group,
                affine,
                scales,
            };
            let weights = GroupWeights::quantize(weight, format).expect("groups");
            for activations in [ActivationPrecision::Int8, ActivationPrecision::Full] {
                let weights = weights.clone().with_activations(activations);
                kinds.push((format!("{format:?} {activations:?}"), weights.into()));
            }
        }
    }
    let row = weight.dims()[1];
    for (coding, group, scales, bias) in [
        (E2M1, 16, DType::BF16, None),
        (E2M1, 32, DType::F32, Some(0.125)),
        (IQ4, 32, DType::F16, None),
        (IQ4, 64, DType::F32, None),
    ] {
        let weights = coded(weight, coding, group, scales, bias);
        for activations in [ActivationPrecision::Int8, ActivationPrecision::Full] {
            let weights = weights.clone().with_activations(activations);
            kinds.push((format!("{coding:?} of {group} {activations:?}"), weights.into()));
        }
    }
    for (group, scales, bias) in [
        (16, DType::F32, None),
        (32, DType::BF16, None),
        (64, DType::F16, Some(0.125)),
        (row, DType::F32, None),
    ] {
        // Activations are not rounded, although that is what is asked for.
        let weights = coded(weight, Coding::E4m3, group, scales, bias);
        let weights = weights.with_activations(ActivationPrecision::Int8);
        kinds.push((format!("E4M3 of {group} Full"), weights.into()));
    }
    kinds
}

#[test]
fn every_row_has_the_bits_that_it_has_alone() {
    let mut numbers = Numbers(1);
    for dtype in TYPES {
        for (out, width) in [(1, 1), (16, 8), (37, 33), (65, 513), (130, 1100)] {
            let weight = numbers.typed(&[out, width], dtype);
            let bias = numbers.tensor(&[out]);
            let linear = cpu(&[weight], Some(&bias));
            let x = numbers.tensor(&[64, width]);
            let alone: Vec<_> = (0..64)
                .map(|row| linear.forward(&rows(&x, row, 1)).expect("one row"))
                .collect();
            let alone = Tensor::cat(&alone, 0).expect("rows");
            for count in 1..=64 {
                let y = linear.forward(&rows(&x, 0, count)).expect("rows");
                same(
                    &y,
                    &rows(&alone, 0, count),
                    &format!("{count} rows of {out} x {width} {dtype:?}"),
                );
                let y = linear.forward(&rows(&x, 64 - count, count)).expect("rows");
                same(&y, &rows(&alone, 64 - count, count), "the last rows");
            }
        }
    }
}

#[test]
fn every_row_of_every_kind_has_the_bits_that_it_has_alone() {
    let mut numbers = Numbers(21);
    for (out, width) in [(1, 64), (37, 192), (65, 576)] {
        let weight = numbers.tensor(&[out, width]);
        let bias = numbers.tensor(&[out]);
        let x = numbers.tensor(&[64, width]);
        for (kind, weight) in every_kind(&weight) {
            let linear = Linear::new(Backend::Cpu, [weight], Some(&bias)).expect("a layer");
            let alone: Vec<_> = (0..64)
                .map(|row| linear.forward(&rows(&x, row, 1)).expect("one row"))
                .collect();
            let alone = Tensor::cat(&alone, 0).expect("rows");
            for count in (1..=26).chain([47, 48, 49, 64]) {
                let y = linear.forward(&rows(&x, 64 - count, count)).expect("rows");
                let what = format!("{count} rows of {out} x {width} {kind}");
                same(&y, &rows(&alone, 64 - count, count), &what);
            }
            for threads in [2, 3] {
                let y = in_pool(threads, || linear.forward(&x).expect("rows"));
                same(&y, &alone, &format!("{threads} threads, {kind}"));
            }
        }
    }
}

/// Largest distance of two tensors over the largest magnitude of the second.
fn relative(a: &Tensor, b: &Tensor) -> f32 {
    let most = b
        .abs()
        .and_then(|b| b.max_all())
        .and_then(|b| b.to_scalar::<f32>());
    distance(a, b) / most.expect("a number")
}

#[test]
fn groups_multiply_as_their_dequantized_weights() {
    let mut numbers = Numbers(22);
    let weight = numbers.tensor(&[70, 1024]);
    let x = numbers.tensor(&[9, 1024]);
    let (mut full, mut rounded) = (0.0_f32, 0.0_f32);
    for (kind, weight) in every_kind(&weight) {
        let Weight::Groups(weights) = &weight else {
            continue;
        };
        let wide = Linear::new(Backend::Composed, [weights.dequantize().expect("f32")], None);
        let expected = wide.and_then(|wide| wide.forward(&x)).expect("rows");
        let own = Linear::new(Backend::Cpu, [weight], None).expect("a layer");
        let apart = relative(&own.forward(&x).expect("rows"), &expected);
        let most = if kind.ends_with("Full") {
            &mut full
        } else {
            &mut rounded
        };
        *most = most.max(apart);
    }
    // Seen: 6.4e-7 and 3.4e-3 of the largest output. Bytes of 127 steps leave an error of a 254th of the largest activation of
    // 32, which random signs take most of.
    assert!(full < 2e-6, "{full}");
    assert!(rounded < 8e-3, "{rounded}");
}

#[test]
fn quantizing_leaves_half_a_step() {
    let weight = Numbers(23).tensor(&[5, 128]);
    for bits in [8, 4] {
        for affine in [true, false] {
            let format = GroupFormat {
                bits,
                group: 64,
                affine,
                scales: DType::F32,
            };
            let weights = GroupWeights::quantize(&weight, format).expect("groups");
            let step = 2.0 / ((1 << bits) - 2) as f32;
            let apart = distance(&weights.dequantize().expect("f32"), &weight);
            assert!(apart <= step / 2.0 * 1.01, "{format:?}: {apart}");
        }
    }
}

#[test]
fn a_stored_zero_a_scale_and_a_bias_mean_what_they_say() {
    let scales = Tensor::new(&[[0.5_f32], [2.0]], &Device::Cpu).expect("scales");
    let biases = Tensor::new(&[[-1.0_f32], [3.0]], &Device::Cpu).expect("biases");
    // Rows of 32 half bytes: the low half first.
    let mut quants = vec![0x21_u8; 32];
    quants[16..].fill(0xf0);
    let quants = Tensor::from_vec(quants, (2, 16), &Device::Cpu).expect("quants");
    let with =
        GroupWeights::new(whole(4, 0), 32, quants.clone(), scales.clone(), Some(biases)).expect("groups");
    let rows = with
        .dequantize()
        .and_then(|x| Ok(x.to_vec2::<f32>()?))
        .expect("rows");
    assert_eq!(
        [rows[0][0], rows[0][1], rows[1][0], rows[1][1]],
        [-0.5, 0.0, 3.0, 33.0]
    );
    let without = GroupWeights::new(whole(4, 8), 32, quants, scales, None).expect("groups");
    let rows = without
        .dequantize()
        .and_then(|x| Ok(x.to_vec2::<f32>()?))
        .expect("rows");
    assert_eq!(
        [rows[0][0], rows[0][1], rows[1][0], rows[1][1]],
        [-3.5, -3.0, -16.0, 14.0]
    );
}

#[test]
fn codes_stand_for_the_numbers_of_their_definition() {
    for coding in [E2M1, IQ4, Coding::E4m3] {
        // Row i is a code again and again; scales are powers of two.
        let numbers = numbers_of(coding);
        let (out, bytes) = (numbers.len(), 32 * coding.bits() / 8);
        let quants = (0..out)
            .flat_map(|code| vec![if out == 16 { code * 17 } else { code } as u8; bytes])
            .collect();
        let quants = Tensor::from_vec(quants, (out, bytes), &Device::Cpu).expect("quants");
        let scales = Tensor::full(0.25_f32, (out, 1), &Device::Cpu).expect("scales");
        let weights = GroupWeights::new(coding, 32, quants, scales, None).expect("groups");
        let weights = weights.with_activations(ActivationPrecision::Full);
        let wide = weights.dequantize().expect("f32");
        let linear = Linear::new(Backend::Cpu, [weights], None).expect("a layer");
        let gathered = linear.gather(&(0..out as u32).collect::<Vec<_>>()).expect("rows");
        let unit = Tensor::eye(32, DType::F32, &Device::Cpu).expect("rows");
        let products = linear.forward(&unit).and_then(|y| Ok(y.t()?)).expect("columns");
        for found in [wide, gathered, products] {
            for (row, number) in found.to_vec2::<f32>().expect("rows").into_iter().zip(&numbers) {
                if let Some(number) = number {
                    assert_eq!(row, [number / 4.0; 32], "{coding:?}");
                }
            }
        }
    }
}

#[test]
fn codes_are_held_in_their_own_bits() {
    let weight = Numbers(28).tensor(&[64, 128]);
    for (coding, group, scales, bytes) in [
        (E2M1, 16, DType::BF16, 64 * 64 + 64 * 8 * 2),
        (IQ4, 32, DType::F16, 64 * 64 + 64 * 4 * 2),
        (Coding::E4m3, 32, DType::BF16, 64 * 128 + 64 * 4 * 2),
        (Coding::E4m3, 128, DType::F32, 64 * 128 + 64 * 4),
    ] {
        let weights = coded(&weight, coding, group, scales, None);
        let linear = Linear::new(Backend::Cpu, [weights], None).expect("a layer");
        assert_eq!(linear.bytes(), bytes, "{coding:?} of {group}");
    }
}

/// Of the largest and the smallest scales there is no product of a scale and a power of two that a kernel needs by itself.
#[test]
fn e4m3_of_any_scale_has_the_products_of_its_weights() {
    for scale in [2.0_f32.powi(127), 2.0_f32.powi(-127), -1.0] {
        for code in [0x01_u8, 0x08, 0x38] {
            let quants = Tensor::full(code, (1, 32), &Device::Cpu).expect("quants");
            let scales = Tensor::full(scale, (1, 1), &Device::Cpu).expect("scales");
            let weights = GroupWeights::new(Coding::E4m3, 32, quants, scales, None).expect("groups");
            let linear = Linear::new(Backend::Cpu, [weights], None).expect("a layer");
            let mut x = vec![0.0_f32; 32];
            x[5] = 1.0;
            let x = Tensor::from_vec(x, (1, 32), &Device::Cpu).expect("a row");
            let y = linear.forward(&x).and_then(|y| Ok(y.to_vec2::<f32>()?));
            let number = e4m3(code).expect("a number");
            assert_eq!(y.expect("a row")[0][0], scale * number, "{scale:e} {code:#04x}");
        }
    }
}

#[test]
fn parts_of_different_kinds_stand_side_by_side() {
    let mut numbers = Numbers(24);
    let x = numbers.tensor(&[5, 128]);
    let kinds = every_kind(&numbers.tensor(&[40, 128]));
    let all = Linear::new(Backend::Cpu, kinds.iter().map(|(_, weight)| weight), None).expect("a layer");
    let each: Vec<_> = kinds
        .iter()
        .map(|(_, weight)| Linear::new(Backend::Cpu, [weight], None).and_then(|linear| linear.forward(&x)))
        .collect::<Result<_, _>>()
        .expect("rows");
    let each = Tensor::cat(&each, 1).expect("columns");
    for threads in [1, 3] {
        let y = in_pool(threads, || all.forward(&x).expect("rows"));
        same(&y, &each, "parts");
    }
    let ids: Vec<u32> = (0..40 * kinds.len() as u32).rev().step_by(7).collect();
    for (i, row) in ids
        .iter()
        .zip(all.gather(&ids).expect("rows").to_vec2::<f32>().expect("rows"))
    {
        let (kind, weight) = &kinds[*i as usize / 40];
        let weight = match weight {
            Weight::Float(weight) => weight.to_dtype(DType::F32).expect("f32"),
            Weight::Groups(weights) => weights.dequantize().expect("f32"),
        };
        let expected = weight.get(*i as usize % 40).and_then(|row| row.to_vec1::<f32>());
        assert_eq!(row, expected.expect("a row"), "row {i}, {kind}");
    }
}

#[test]
fn selected_outputs_have_the_bits_of_the_whole() {
    let mut numbers = Numbers(25);
    let x = numbers.tensor(&[4, 192]);
    let bias = numbers.tensor(&[75]);
    let ids = [3_u32, 74, 74, 0, 31, 32, 64];
    let index = Tensor::new(&ids, &Device::Cpu).expect("ids");
    for (kind, weight) in every_kind(&numbers.tensor(&[75, 192])) {
        for backend in [Backend::Cpu, Backend::Composed] {
            let whole = Linear::new(backend, [&weight], Some(&bias)).expect("a layer");
            let some = whole.select(&ids).expect("a layer");
            let expected = whole
                .forward(&x)
                .and_then(|y| Ok(y.index_select(&index, 1)?))
                .expect("columns");
            let y = some.forward(&x).expect("rows");
            match backend {
                Backend::Cpu => same(&y, &expected, &kind),
                // candle orders sums by the size of the matrix.
                Backend::Composed => assert!(distance(&y, &expected) < 1e-4, "{kind}"),
            }
            assert!(matches!(whole.select(&[75]), Err(Error::Id { id: 75, rows: 75 })));
            assert!(matches!(whole.select(&[]), Err(Error::Value { .. })));
        }
    }
}

#[test]
fn the_largest_outputs_are_those_of_the_sorted_rows() {
    let mut numbers = Numbers(26);
    let x = numbers.tensor(&[7, 64]);
    for out in [1, 31, 700] {
        for (kind, weight) in every_kind(&numbers.tensor(&[out, 64])) {
            let linear = Linear::new(Backend::Cpu, [weight], None).expect("a layer");
            let y = linear.forward(&x).expect("rows").to_vec2::<f32>().expect("rows");
            for (count, among) in [(1, out), (5, out), (3, out / 2 + 1), (out, out), (0, out)] {
                for threads in [1, 3] {
                    let found = in_pool(threads, || linear.largest(&x, count, among).expect("rows"));
                    for (found, y) in found.iter().zip(&y) {
                        let mut expected: Vec<(usize, f32)> =
                            y[..among].iter().copied().enumerate().collect();
                        expected.sort_by(|a, b| b.1.total_cmp(&a.1));
                        expected.truncate(count);
                        let found: Vec<_> = found.iter().map(|c| (c.id as usize, c.logit)).collect();
                        assert_eq!(found, expected, "{count} of {among} of {kind}");
                    }
                }
            }
        }
    }
}

#[test]
fn equal_outputs_go_by_index_and_none_is_no_number() {
    let mut rows = vec![[1.0_f32, 0.0]; 100];
    rows[40][0] = 3.0;
    rows[70][0] = 3.0;
    rows[90][0] = f32::NAN;
    rows[91][0] = f32::NEG_INFINITY;
    let weight = Tensor::from_vec(rows.concat(), (100, 2), &Device::Cpu).expect("a weight");
    let x = Tensor::new(&[[1.0_f32, 0.0], [f32::NAN, 0.0]], &Device::Cpu).expect("rows");
    for backend in [Backend::Cpu, Backend::Composed] {
        let linear = Linear::new(backend, [&weight], None).expect("a layer");
        let found = linear.largest(&x, 100, 100).expect("rows");
        let first: Vec<_> = found[0].iter().take(4).map(|c| c.id).collect();
        assert_eq!((first, found[0].len()), (vec![40, 70, 0, 1], 99));
        assert_eq!(found[0][98].id, 91);
        assert!(found[1].is_empty());
    }
}

#[test]
fn an_activation_that_is_no_number_makes_its_row_none() {
    let mut numbers = Numbers(27);
    let weight = numbers.tensor(&[33, 64]);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut x = numbers.tensor(&[3, 64]).to_vec2::<f32>().expect("rows");
        x[1][40] = bad;
        let x = Tensor::new(x, &Device::Cpu).expect("rows");
        for (kind, weight) in every_kind(&weight) {
            let linear = Linear::new(Backend::Cpu, [weight], None).expect("a layer");
            let y = linear.forward(&x).expect("rows").to_vec2::<f32>().expect("rows");
            assert!(y[1].iter().all(|y| !y.is_finite()), "{kind}");
            assert!(y[0].iter().chain(&y[2]).all(|y| y.is_finite()), "{kind}");
        }
    }
}

#[test]
fn activations_of_all_sizes_can_be_rounded() {
    let weight = Tensor::ones((1, 64), DType::F32, &Device::Cpu).expect("a weight");
    for (kind, weight) in every_kind(&weight) {
        let linear = Linear::new(Backend::Cpu, [weight], None).expect("a layer");
        for size in [0.0_f32, f32::MIN_POSITIVE / 64.0, 1e-30, 1.0, 1e30] {
            let x = Tensor::full(size, (1, 64), &Device::Cpu).expect("rows");
            let y = linear.forward(&x).expect("rows").to_vec2::<f32>().expect("rows")[0][0];
            // Below the normal numbers a byte's scale has few digits or none.
            let error = if size < 1e-37 { f32::MIN_POSITIVE } else { size };
            assert!((y - 64.0 * size).abs() <= error, "{kind}: {size} gives {y}");
        }
    }
}

#[test]
fn groups_that_do_not_fit_are_refused_by_name() {
    let numbers = |out, features| Tensor::zeros((out, features), DType::F32, &Device::Cpu).expect("zeros");
    let bytes = |out, features| Tensor::zeros((out, features), DType::U8, &Device::Cpu).expect("zeros");
    let new = |bits, group, zero, quants, scales, biases| {
        GroupWeights::new(whole(bits, zero), group, quants, scales, biases)
            .map(|_| ())
            .map_err(|e| e.to_string())
    };
    let new_coded = |coding, width| {
        GroupWeights::new(coding, 32, bytes(3, width), numbers(3, 2), None)
            .map(|_| ())
            .map_err(|e| e.to_string())
    };
    assert_eq!(new_coded(E2M1, 32), Ok(()));
    assert_eq!(new_coded(Coding::E4m3, 64), Ok(()));
    assert_eq!(new(8, 32, 128, bytes(3, 64), numbers(3, 2), None), Ok(()));
    assert_eq!(new(8, 16, 128, bytes(3, 64), numbers(3, 4), None), Ok(()));
    for (result, said) in [
        (new(5, 32, 0, bytes(3, 64), numbers(3, 2), None), "5 bits"),
        (new(8, 8, 0, bytes(3, 64), numbers(3, 8), None), "groups of 8"),
        (
            new(8, 16, 0, bytes(3, 48), numbers(3, 3), None),
            "3 groups of 16 features; expected a multiple of 32",
        ),
        (new(8, 0, 0, bytes(3, 32), numbers(3, 2), None), "groups of 0"),
        (new(4, 32, 16, bytes(3, 32), numbers(3, 2), None), "zero of 16"),
        (new(4, 32, 8, bytes(3, 64), numbers(3, 2), None), "`quants`"),
        (new(8, 32, 8, numbers(3, 64), numbers(3, 2), None), "`quants`"),
        (new_coded(E2M1, 64), "`quants`"),
        (new_coded(Coding::E4m3, 32), "`quants`"),
        (new(8, 32, 8, bytes(3, 64), bytes(3, 2), None), "`scales`"),
        (new(8, 32, 8, bytes(3, 0), numbers(3, 0), None), "`scales`"),
        (
            new(8, 32, 8, bytes(3, 64), numbers(3, 2), Some(numbers(3, 3))),
            "`biases`",
        ),
        (
            new(8, usize::MAX & !31, 8, bytes(3, 64), numbers(3, 2), None),
            "too many",
        ),
    ] {
        let found = result.expect_err(said);
        assert!(found.contains(said), "{found}");
    }
    let format = GroupFormat {
        bits: 8,
        group: 32,
        affine: true,
        scales: DType::F32,
    };
    for (weight, format, said) in [
        (numbers(2, 48), format, "multiple of 32"),
        (
            numbers(2, 48),
            GroupFormat { group: 16, ..format },
            "multiple of 16 and of 32",
        ),
        (bytes(2, 64), format, "`weight`"),
        (
            numbers(2, 64),
            GroupFormat {
                scales: DType::U8,
                ..format
            },
            "scales of u8",
        ),
        ((numbers(2, 64) / 0.0).expect("NaN"), format, "damaged"),
    ] {
        let found = GroupWeights::quantize(&weight, format)
            .expect_err(said)
            .to_string();
        assert!(found.contains(said), "{found}");
    }
    let groups = GroupWeights::quantize(&numbers(2, 64), format).expect("groups");
    let mixed: [Weight; 2] = [numbers(3, 32).into(), groups.into()];
    assert!(matches!(
        Linear::new(Backend::Cpu, mixed, None),
        Err(Error::Value { .. })
    ));
}

#[test]
fn prefill_of_many_panels_has_the_bits_of_single_rows() {
    let mut numbers = Numbers(2);
    let linear = cpu(&[numbers.typed(&[70, 600], DType::BF16)], None);
    let x = numbers.tensor(&[131, 600]);
    let y = linear.forward(&x).expect("rows");
    for row in [0, 47, 48, 95, 96, 130] {
        same(
            &rows(&y, row, 1),
            &linear.forward(&rows(&x, row, 1)).expect("one row"),
            &format!("row {row}"),
        );
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let mut numbers = Numbers(3);
    for dtype in TYPES {
        let linear = cpu(&[numbers.typed(&[300, 700], dtype)], None);
        for count in [1, 5, 16, 50] {
            let x = numbers.tensor(&[count, 700]);
            let one = in_pool(1, || linear.forward(&x).expect("rows"));
            for threads in [2, 3] {
                let more = in_pool(threads, || linear.forward(&x).expect("rows"));
                same(
                    &one,
                    &more,
                    &format!("{threads} threads, {count} rows, {dtype:?}"),
                );
            }
        }
    }
}

#[test]
fn agrees_with_candle() {
    let mut numbers = Numbers(4);
    let mut most = 0.0_f32;
    for dtype in TYPES {
        for (count, out, width) in [(1, 37, 33), (5, 200, 1024), (70, 50, 2000)] {
            let parts = [
                numbers.typed(&[out, width], dtype),
                numbers.typed(&[3, width], dtype),
            ];
            let bias = numbers.tensor(&[out + 3]);
            let x = numbers.tensor(&[count, width]);
            let own = cpu(&parts, Some(&bias)).forward(&x).expect("rows");
            let composed = Linear::new(Backend::Composed, &parts, Some(&bias)).expect("a layer");
            most = most.max(distance(&own, &composed.forward(&x).expect("rows")));
        }
    }
    // Seen: 3.5e-5, on sums of 2000 products of numbers up to 1.
    assert!(most < 1e-4, "{most}");
}

#[test]
fn stacked_parts_are_the_parts_side_by_side() {
    let mut numbers = Numbers(5);
    let x = numbers.tensor(&[3, 40]);
    let parts = [
        numbers.typed(&[5, 40], DType::BF16),
        numbers.typed(&[30, 40], DType::BF16),
    ];
    let both = cpu(&parts, None).forward(&x).expect("rows");
    let each = parts
        .iter()
        .map(|part| cpu(std::slice::from_ref(part), None).forward(&x).expect("rows"));
    same(
        &both,
        &Tensor::cat(&each.collect::<Vec<_>>(), 1).expect("columns"),
        "stacked",
    );
    // Of different types: each is held in its own.
    let mixed = [parts[0].clone(), parts[1].to_dtype(DType::F32).expect("f32")];
    let mixed = cpu(&mixed, None);
    assert_eq!(mixed.bytes(), 32 * 40 * 2 + 32 * 40 * 4);
    same(&both, &mixed.forward(&x).expect("rows"), "mixed types");
}

#[test]
fn gather_gives_the_weight_exactly_and_refuses_an_id_out_of_range() {
    let mut numbers = Numbers(6);
    for dtype in TYPES {
        let weight = numbers.typed(&[21, 9], dtype);
        for backend in [Backend::Cpu, Backend::Composed] {
            let linear = Linear::new(backend, std::slice::from_ref(&weight), None).expect("a layer");
            let ids: Vec<u32> = (0..21).rev().collect();
            let found = linear.gather(&ids).expect("rows");
            let index = Tensor::new(ids.as_slice(), &Device::Cpu).expect("ids");
            same(&found, &weight.index_select(&index, 0).expect("rows"), "gathered");
            assert!(matches!(
                linear.gather(&[3, 21]),
                Err(Error::Id { id: 21, rows: 21 })
            ));
            assert_eq!(linear.gather(&[]).expect("none").dims(), [0, 9]);
        }
    }
}

#[test]
fn weights_are_held_in_their_own_type() {
    let weight = Numbers(7).typed(&[32, 10], DType::BF16);
    let linear = cpu(&[weight], None);
    assert_eq!(linear.bytes(), 640);
    assert_eq!((linear.in_features(), linear.out_features()), (10, 32));
}

#[test]
fn no_rows_give_no_rows() {
    let linear = cpu(&[Numbers(8).tensor(&[4, 3])], None);
    let none = Tensor::zeros((0, 3), DType::F32, &Device::Cpu).expect("none");
    assert_eq!(linear.forward(&none).expect("none").dims(), [0, 4]);
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let mut numbers = Numbers(9);
    let weight = numbers.tensor(&[6, 4]);
    let new = |parts: &[Tensor], bias: Option<&Tensor>| Linear::new(Backend::Cpu, parts, bias).map(|_| ());
    assert!(matches!(new(&[], None), Err(Error::Value { .. })));
    let other = numbers.tensor(&[6, 5]);
    let found = new(&[weight.clone(), other.clone()], None).expect_err("another width");
    assert_eq!(
        found.to_string(),
        "linear: `weight` has shape [6, 5], expected [rows, 4]"
    );
    assert!(matches!(
        new(&[numbers.tensor(&[6])], None),
        Err(Error::Shape { .. })
    ));
    let none = Tensor::zeros((0, 4), DType::F32, &Device::Cpu).expect("none");
    assert!(matches!(new(&[none], None), Err(Error::Shape { .. })));
    assert!(matches!(
        new(&[weight.t().expect("a view")], None),
        Err(Error::Strided {
            operand: "weight",
            ..
        })
    ));
    let ids = weight.to_dtype(DType::U32).expect("ids");
    assert!(matches!(
        new(&[ids], None),
        Err(Error::DType {
            operand: "weight",
            ..
        })
    ));
    let bias = numbers.tensor(&[5]);
    assert!(matches!(
        new(std::slice::from_ref(&weight), Some(&bias)),
        Err(Error::Shape { operand: "bias", .. })
    ));

    let linear = cpu(&[weight], None);
    assert!(matches!(
        linear.forward(&other),
        Err(Error::Shape { operand: "x", .. })
    ));
    let half = numbers.typed(&[2, 4], DType::F16);
    assert!(matches!(
        linear.forward(&half),
        Err(Error::DType { operand: "x", .. })
    ));
    let view = numbers.tensor(&[4, 2]).t().expect("a view");
    assert!(matches!(
        linear.forward(&view),
        Err(Error::Strided { operand: "x", .. })
    ));
}

#[test]
fn a_view_into_a_larger_tensor_is_read_where_it_lies() {
    let mut numbers = Numbers(10);
    let (weight, x) = (numbers.tensor(&[9, 7]), numbers.tensor(&[5, 7]));
    let linear = cpu(&[weight.narrow(0, 2, 6).expect("rows")], None);
    let whole = cpu(&[rows(&weight, 2, 6)], None);
    let y = linear.forward(&x.narrow(0, 1, 3).expect("rows")).expect("rows");
    same(&y, &whole.forward(&rows(&x, 1, 3)).expect("rows"), "views");
}
