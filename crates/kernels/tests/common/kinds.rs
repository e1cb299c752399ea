//! Ways to hold a matrix.
#![allow(dead_code, unreachable_pub)]

use candle_core::{DType, Device, Tensor};
use half::f16;
use recant_kernels::{ActivationPrecision, Coding, GroupFormat, GroupScales, GroupWeights, Weight};

pub const TYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

pub fn whole(bits: usize, zero: u8) -> Coding {
    Coding::Whole { bits, zero }
}

pub const E2M1: Coding = Coding::Table([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]);
pub const IQ4: Coding = Coding::Table([
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
]);

/// E4M3 by its definition; none where a byte is no number.
pub fn e4m3(byte: u8) -> Option<f32> {
    let size = match (i32::from(byte >> 3 & 15), f32::from(byte & 7)) {
        (15, 7.0) => return None,
        (0, mantissa) => mantissa / 512.0,
        (exponent, mantissa) => (1.0 + mantissa / 8.0) * 2.0_f32.powi(exponent - 7),
    };
    Some(if byte < 128 { size } else { -size })
}

/// What each of a table's or E4M3's bit patterns stands for.
pub fn numbers_of(coding: Coding) -> Vec<Option<f32>> {
    match coding {
        Coding::Table(table) => table.map(|number| Some(f32::from(number))).into(),
        _ => (0..=255).map(e4m3).collect(),
    }
}

/// A matrix rounded to what a coding has, with a bias of every group if asked for.
pub fn coded(
    weight: &Tensor,
    coding: Coding,
    group: usize,
    scales: DType,
    bias: Option<f32>,
) -> GroupWeights {
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
    GroupWeights::new(
        coding,
        group,
        quants,
        typed(steps),
        biases.map(|x| typed(x).into()),
    )
    .expect("groups")
}

/// Scales of two levels and the same in one, in f32: `[out, groups]`, in runs of so many groups.
pub fn two_levels(out: usize, groups: usize, run: usize) -> [GroupScales; 2] {
    // All whole numbers, the ends of their range first; factors of either sign, a subnormal one among them.
    let number = |i: usize| {
        [255_u8, 0, 128][..]
            .get(i)
            .copied()
            .unwrap_or((i * 37 % 256) as u8)
    };
    let factor = |i: usize| {
        let size = if i % 5 == 1 {
            3e-7
        } else {
            1e-4 + (i % 13) as f32 * 3e-4
        };
        f16::from_f32(if i.is_multiple_of(3) { -size } else { size })
    };
    let numbers: Vec<u8> = (0..out * groups).map(number).collect();
    let factors: Vec<f16> = (0..out * groups / run).map(factor).collect();
    let products: Vec<f32> = numbers
        .iter()
        .enumerate()
        .map(|(i, number)| factors[i / run].to_f32() * (f32::from(*number) - 128.0))
        .collect();
    let numbers = Tensor::from_vec(numbers, (out, groups), &Device::Cpu).expect("numbers");
    let factors = Tensor::from_vec(factors, (out, groups / run), &Device::Cpu).expect("factors");
    let products = Tensor::from_vec(products, (out, groups), &Device::Cpu).expect("products");
    [GroupScales::TwoLevel { numbers, factors }, products.into()]
}

/// Any bits with scales of two levels, and the same weights with scales in f32.
pub fn in_two_levels(
    [out, features]: [usize; 2],
    coding: Coding,
    [group, run]: [usize; 2],
    biased: bool,
) -> [GroupWeights; 2] {
    let bytes = features * coding.bits() / 8;
    let quants: Vec<u8> = (0..out * bytes).map(|i| (i * 101 % 251) as u8).collect();
    let quants = Tensor::from_vec(quants, (out, bytes), &Device::Cpu).expect("quants");
    two_levels(out, features / group, run).map(|scales| {
        let biases = biased.then(|| scales.clone());
        GroupWeights::new(coding, group, quants.clone(), scales, biases).expect("groups")
    })
}

/// A matrix rounded to whole numbers with scales of two levels, and with biases of them for what stands for zero if asked for.
pub fn levelled(weight: &Tensor, bits: usize, [group, run]: [usize; 2], biased: bool) -> GroupWeights {
    let (out, features) = weight.dims2().expect("a matrix");
    let zero = 1_u8 << (bits - 1);
    let most = f32::from(zero) - 1.0;
    let step = |x: &[f32]| x.iter().fold(0.0, |most: f32, x| most.max(x.abs())) / most;
    let (mut quants, mut numbers, mut factors) = (Vec::new(), Vec::new(), Vec::new());
    for row in weight.to_vec2::<f32>().expect("rows") {
        for shared in row.chunks(group * run) {
            let factor = f16::from_f32(step(shared) / 64.0);
            factors.push(factor);
            for x in shared.chunks(group) {
                let number = (step(x) / factor.to_f32()).round().clamp(1.0, 127.0);
                numbers.push((number + 128.0) as u8);
                let scale = factor.to_f32() * number;
                let code = |x: &f32| ((x / scale).round().clamp(-most, most) + f32::from(zero)) as u8;
                let codes: Vec<u8> = x.iter().map(code).collect();
                match bits {
                    4 => quants.extend(codes.chunks(2).map(|pair| pair[0] | pair[1] << 4)),
                    _ => quants.extend(codes),
                }
            }
        }
    }
    let lows: Vec<f16> = factors
        .iter()
        .map(|x| f16::from_f32(x.to_f32() * -f32::from(zero)))
        .collect();
    let numbers = Tensor::from_vec(numbers, (out, features / group), &Device::Cpu).expect("numbers");
    let levels = |factors| GroupScales::TwoLevel {
        numbers: numbers.clone(),
        factors: Tensor::from_vec(factors, (out, features / group / run), &Device::Cpu).expect("factors"),
    };
    let quants = Tensor::from_vec(quants, (out, features * bits / 8), &Device::Cpu).expect("quants");
    let coding = whole(bits, if biased { 0 } else { zero });
    let biases = biased.then(|| levels(lows));
    GroupWeights::new(coding, group, quants, levels(factors), biases).expect("groups")
}

/// Every way to hold and to multiply a matrix whose input features are a multiple of 64.
pub fn every_kind(weight: &Tensor) -> Vec<(String, Weight)> {
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
    for (bits, levels, biased) in [(4, [32, 2], true), (8, [16, 4], false), (8, [32, 1], true)] {
        let weights = levelled(weight, bits, levels, biased);
        for activations in [ActivationPrecision::Int8, ActivationPrecision::Full] {
            let weights = weights.clone().with_activations(activations);
            kinds.push((
                format!("{bits} bits in two levels {levels:?} {activations:?}"),
                weights.into(),
            ));
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
