//! Weights in groups: what their bits stand for, how they multiply, and what is refused.

mod common;
#[path = "common/kinds.rs"]
mod kinds;

use candle_core::{DType, Device, Tensor};
use common::{distance, Numbers};
use kinds::{coded, e4m3, every_kind, in_two_levels, numbers_of, whole, E2M1, IQ4};
use recant_kernels::{
    ActivationPrecision, Backend, Coding, Error, GroupFormat, GroupScales, GroupWeights, Linear, Weight,
};

/// Largest distance of two tensors over the largest magnitude of the second.
fn relative(a: &Tensor, b: &Tensor) -> f32 {
    let most = b
        .abs()
        .and_then(|b| b.max_all())
        .and_then(|b| b.to_scalar::<f32>());
    distance(a, b) / most.expect("a number")
}

/// How far the products of rows with grouped weights are from those with the same weights in f32.
fn apart(weights: &GroupWeights, x: &Tensor) -> f32 {
    let wide = Linear::new(Backend::Composed, [weights.dequantize().expect("f32")], None);
    let expected = wide.and_then(|wide| wide.forward(x)).expect("rows");
    let own = Linear::new(Backend::Cpu, [weights.clone()], None);
    relative(&own.and_then(|own| own.forward(x)).expect("rows"), &expected)
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
        let apart = apart(weights, &x);
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
fn groups_that_do_not_divide_a_block_multiply_as_their_dequantized_weights() {
    let mut numbers = Numbers(24);
    let (weight, x) = (numbers.tensor(&[70, 576]), numbers.tensor(&[9, 576]));
    for bits in [8, 4] {
        for affine in [true, false] {
            let format = GroupFormat {
                bits,
                group: 96,
                affine,
                scales: DType::F32,
            };
            let weights = GroupWeights::quantize(&weight, format).expect("groups");
            for (activations, most) in [
                (ActivationPrecision::Full, 2e-6),
                (ActivationPrecision::Int8, 8e-3),
            ] {
                let apart = apart(&weights.clone().with_activations(activations), &x);
                assert!(apart < most, "{format:?}, {activations:?}: {apart}");
            }
        }
    }
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
    let with = GroupWeights::new(
        whole(4, 0),
        32,
        quants.clone(),
        scales.clone(),
        Some(biases.into()),
    )
    .expect("groups");
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

#[test]
fn scales_of_two_levels_are_those_of_their_products() {
    for (coding, levels, biased) in [
        (whole(4, 0), [32, 8], true),
        (whole(8, 32), [16, 2], false),
        (IQ4, [32, 1], false),
    ] {
        let [two, one] = in_two_levels([70, 768], coding, levels, biased);
        let rows = |x: Tensor| x.to_vec2::<f32>().expect("rows");
        let expected = rows(one.dequantize().expect("f32"));
        assert!(rows(two.dequantize().expect("f32")) == expected, "{coding:?}");
        let linear = Linear::new(Backend::Cpu, [two], None).expect("a layer");
        let all: Vec<u32> = (0..70).collect();
        assert!(rows(linear.gather(&all).expect("rows")) == expected, "{coding:?}");
        let picked = [69, 3, 3, 40];
        let some = linear.select(&picked).expect("a layer");
        let some = rows(some.gather(&[0, 1, 2, 3]).expect("rows"));
        for (found, row) in some.iter().zip(picked) {
            assert!(*found == expected[row as usize], "{coding:?}, row {row}");
        }
    }
}

#[test]
fn scales_of_two_levels_are_held_in_bytes() {
    let [q4_k, _] = in_two_levels([64, 512], whole(4, 0), [32, 8], true);
    let linear = Linear::new(Backend::Cpu, [q4_k], None).expect("a layer");
    assert_eq!(linear.bytes(), 64 * (256 + 2 * (16 + 2 * 2)));
}

#[test]
fn levels_that_do_not_fit_are_refused_by_name() {
    let floats = |out, groups| Tensor::zeros((out, groups), DType::F32, &Device::Cpu).expect("zeros");
    let typed = |x: Tensor, dtype| x.to_dtype(dtype).expect("a type");
    let numbers = || typed(floats(3, 6), DType::U8);
    let factors = |out, runs| typed(floats(out, runs), DType::F16);
    let two = |numbers, factors| GroupScales::TwoLevel { numbers, factors };
    let new = |scales: GroupScales, biases: Option<GroupScales>| {
        let quants = typed(floats(3, 192), DType::U8);
        GroupWeights::new(whole(8, 0), 32, quants, scales, biases)
            .map(|_| ())
            .map_err(|e| e.to_string())
    };
    let fit = two(numbers(), factors(3, 3));
    assert_eq!(new(fit.clone(), Some(two(numbers(), factors(3, 6)))), Ok(()));
    for (scales, biases, said) in [
        (two(floats(3, 6), factors(3, 3)), None, "`scales`"),
        (two(numbers(), floats(3, 3)), None, "`factors`"),
        // Runs of six groups, and of one and a half.
        (two(numbers(), factors(3, 1)), None, "`factors`"),
        (two(numbers(), factors(3, 4)), None, "`factors`"),
        (two(numbers(), factors(3, 0)), None, "`factors`"),
        (two(numbers(), factors(2, 3)), None, "`factors`"),
        (fit.clone(), Some(floats(3, 6).into()), "`biases`"),
        (floats(3, 6).into(), Some(fit.clone()), "`biases`"),
        (fit.clone(), Some(two(numbers(), factors(3, 1))), "`factors`"),
        (
            fit.clone(),
            Some(two(typed(floats(3, 5), DType::U8), factors(3, 3))),
            "`biases`",
        ),
    ] {
        let found = new(scales, biases).expect_err(said);
        assert!(found.contains(said), "{found}");
    }
    let plain = GroupScales::from(factors(3, 6));
    assert!(plain.plain().is_some() && fit.plain().is_none());
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
fn groups_that_do_not_fit_are_refused_by_name() {
    let numbers = |out, features| Tensor::zeros((out, features), DType::F32, &Device::Cpu).expect("zeros");
    let bytes = |out, features| Tensor::zeros((out, features), DType::U8, &Device::Cpu).expect("zeros");
    let new = |bits, group, zero, quants, scales: Tensor, biases: Option<Tensor>| {
        GroupWeights::new(
            whole(bits, zero),
            group,
            quants,
            scales,
            biases.map(GroupScales::Plain),
        )
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
