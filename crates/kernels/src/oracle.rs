//! Every instruction set against the portable one, and the functions against f64.

use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};
use recant_core::{KvBlock, KvView, RecordSlice, RecurrentStep};

use crate::common::{same, Numbers};
use crate::kinds::{self, whole};
use crate::simd::{self, forced, Isa, Kernel, Simd, LANES};
use crate::*;

/// Runs `f` on every set that the machine has, and compares the bits of all tensors with the portable set's.
#[track_caller]
fn same_on_all(what: &str, f: impl Fn() -> Vec<Tensor>) {
    let sets = simd::available();
    assert!(
        cfg!(not(target_arch = "x86_64")) || sets.len() > 1,
        "nothing to compare on this machine"
    );
    let portable = forced::with(Isa::Portable, &f);
    for &isa in sets {
        let own = forced::with(isa, &f);
        assert_eq!(own.len(), portable.len());
        for (i, (own, portable)) in own.iter().zip(&portable).enumerate() {
            same(own, portable, &format!("{what}, {isa:?}: tensor {i}"));
        }
    }
}

#[test]
fn linear_has_the_portable_bits() {
    let mut numbers = Numbers(1);
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for (out, width) in [(1, 1), (7, 3), (16, 16), (33, 129), (70, 1025)] {
            let weight = numbers.typed(&[out, width], dtype);
            let linear = Linear::new(Backend::Cpu, &[weight], None).expect("a layer");
            for rows in [1, 2, 3, 4, 5, 6, 7, 16, 17, 50] {
                let x = numbers.tensor(&[rows, width]);
                same_on_all(&format!("{rows} rows by {out} x {width} {dtype:?}"), || {
                    vec![linear.forward(&x).expect("rows")]
                });
            }
        }
    }
}

#[test]
fn grouped_linear_has_the_portable_bits() {
    let mut numbers = Numbers(12);
    for (bits, group, affine, scales) in [
        (8, 32, false, DType::F16),
        (8, 64, true, DType::BF16),
        (4, 32, false, DType::F16),
        (4, 64, true, DType::F32),
    ] {
        for (out, width) in [(1, 64), (33, 320), (70, 1024)] {
            let weight = numbers.tensor(&[out, width]);
            let format = GroupFormat {
                bits,
                group,
                affine,
                scales,
            };
            let weights = GroupWeights::quantize(&weight, format).expect("groups");
            for activations in [ActivationPrecision::Int8, ActivationPrecision::Full] {
                let weights = weights.clone().with_activations(activations);
                let linear = Linear::new(Backend::Cpu, [weights], None).expect("a layer");
                for rows in [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 50] {
                    let x = numbers.tensor(&[rows, width]);
                    let what = format!("{rows} rows by {out} x {width} {format:?} {activations:?}");
                    same_on_all(&what, || vec![linear.forward(&x).expect("rows")]);
                }
            }
        }
    }
}

#[test]
fn bytes_at_their_ends_have_the_portable_bits() {
    // All weights 255 or 0 and all activations 127 or -127: what overflows 16 bits if anything does.
    for (bits, most) in [(8, 255_u8), (4, 0xff)] {
        let quants: Vec<u8> = (0..64 * 64 * bits / 8)
            .map(|i| if i % 3 == 0 { 0 } else { most })
            .collect();
        let quants = Tensor::from_vec(quants, (64, 64 * bits / 8), &candle_core::Device::Cpu).expect("bytes");
        let scales = Tensor::ones((64, 2), DType::F32, &candle_core::Device::Cpu).expect("scales");
        for zero in [0, 8] {
            let weights = GroupWeights::new(
                Coding::Whole { bits, zero },
                32,
                quants.clone(),
                scales.clone(),
                None,
            );
            let linear = Linear::new(Backend::Cpu, [weights.expect("groups")], None).expect("a layer");
            for sign in [1.0_f32, -1.0] {
                let x = Tensor::full(sign, (5, 64), &candle_core::Device::Cpu).expect("rows");
                same_on_all(&format!("{bits} bits, zero {zero}, {sign}"), || {
                    vec![linear.forward(&x).expect("rows")]
                });
            }
        }
    }
}

#[test]
fn coded_linear_has_the_portable_bits() {
    let mut numbers = Numbers(13);
    let table = Coding::Table(std::array::from_fn(|_| (numbers.next() * 128.0) as i8));
    // All positive, and the ends of the range.
    let high = Coding::Table(std::array::from_fn(|i| 127 - i as i8));
    let ends = Coding::Table(std::array::from_fn(|i| [-128, 127][i % 2]));
    for (coding, group, affine, scales) in [
        (table, 16, false, DType::BF16),
        (table, 32, false, DType::F16),
        (high, 64, true, DType::F32),
        (ends, 32, false, DType::F32),
        (Coding::E4m3, 16, false, DType::F32),
        (Coding::E4m3, 32, false, DType::BF16),
        (Coding::E4m3, 64, true, DType::F16),
    ] {
        for (out, width) in [(1, 64), (33, 320), (70, 1024)] {
            let mut byte = || (numbers.next() * 128.0 + 128.0) as u8;
            let shape = (out, width * coding.bits() / 8);
            let quants = (0..shape.0 * shape.1).map(|_| byte()).collect();
            let quants = Tensor::from_vec(quants, shape, &Device::Cpu).expect("bytes");
            let [steps, biases] = [(); 2].map(|()| numbers.typed(&[out, width / group], scales));
            let biases = affine.then_some(biases);
            let weights =
                GroupWeights::new(coding, group, quants, steps, biases.map(Into::into)).expect("groups");
            for activations in [ActivationPrecision::Int8, ActivationPrecision::Full] {
                let weights = weights.clone().with_activations(activations);
                let linear = Linear::new(Backend::Cpu, [weights], None).expect("a layer");
                for rows in [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 50] {
                    let x = numbers.tensor(&[rows, width]);
                    let what =
                        format!("{rows} rows by {out} x {width} {coding:?} of {group} {activations:?}");
                    same_on_all(&what, || vec![linear.forward(&x).expect("rows")]);
                }
            }
        }
    }
}

#[test]
fn scales_of_two_levels_have_the_bits_of_their_products() {
    let mut numbers = Numbers(14);
    for (coding, levels, biased) in [
        (whole(4, 0), [32, 8], true),
        (whole(8, 0), [32, 8], true),
        (whole(8, 32), [16, 16], false),
        (whole(4, 4), [16, 2], false),
        (kinds::IQ4, [32, 1], false),
        (Coding::E4m3, [64, 4], true),
    ] {
        // Of three outputs too, and with an odd number of runs.
        for (out, width) in [(3, 256), (33, 768), (70, 1024)] {
            let weights = kinds::in_two_levels([out, width], coding, levels, biased);
            for activations in [ActivationPrecision::Int8, ActivationPrecision::Full] {
                let [two, one] = weights.clone().map(|weights| {
                    let weights = weights.with_activations(activations);
                    Linear::new(Backend::Cpu, [weights], None).expect("a layer")
                });
                for rows in [1, 2, 3, 4, 5, 6, 7, 8, 12, 17, 50] {
                    let x = numbers.tensor(&[rows, width]);
                    for &isa in simd::available() {
                        let [two, one] = [&two, &one]
                            .map(|linear| forced::with(isa, || linear.forward(&x)).expect("rows"));
                        let what =
                            format!("{rows} rows by {out} x {width} {coding:?} {levels:?} {activations:?}");
                        same(&two, &one, &format!("{what}, {isa:?}"));
                    }
                }
            }
        }
    }
}

#[test]
fn rows_have_the_portable_bits() {
    let mut numbers = Numbers(2);
    for width in 1..=70 {
        let x = numbers.tensor(&[3, 2 * width]);
        let weight = numbers.tensor(&[2 * width]);
        same_on_all(&format!("width {width}"), || {
            let normed = rms_norm(Backend::Cpu, &x, &weight, 1e-6).expect("normed");
            vec![normed, swiglu(Backend::Cpu, &x).expect("activated")]
        });
    }
}

#[test]
fn attention_has_the_portable_bits() {
    let mut numbers = Numbers(3);
    for (heads, kv_heads, head_dim) in [(1, 1, 3), (4, 2, 8), (6, 2, 19), (7, 1, 64), (14, 2, 40)] {
        let shape = AttentionShape {
            heads,
            kv_heads,
            head_dim,
            rotary_dims: head_dim / 2 * 2,
            gated: true,
            eps: 1e-6,
        };
        let norm = numbers.tensor(&[head_dim]);
        let projected = numbers.tensor(&[9, 2 * (heads + kv_heads) * head_dim]);
        let table =
            Rotary::new(1e4, shape.rotary_dims).and_then(|rotary| rotary.table(&[40; 9], &Device::Cpu));
        let table = table.expect("a table");
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let block = KvBlock {
                start: 0,
                rows: 300,
                keys: numbers.typed(&[300, kv_heads, head_dim], dtype),
                values: numbers.typed(&[300, kv_heads, head_dim], dtype),
            };
            for (window, sink) in [(None, 0), (Some(13), 3), (Some(280), 3)] {
                let blocks = vec![block.clone()];
                let view = KvView { blocks, window, sink };
                same_on_all(
                    &format!("{heads}/{kv_heads} heads of {head_dim}, {dtype:?}"),
                    || {
                        let inputs = attention_inputs(Backend::Cpu, &shape, &projected, &norm, &norm, &table);
                        let AttentionInputs { q, gate, k, v } = inputs.expect("inputs");
                        let (rows, position, view) = (9, 291, &view);
                        let segment = [AttentionSegment { rows, position, view }];
                        let out =
                            attention(Backend::Cpu, &shape, &q, gate.as_ref(), &segment).expect("attended");
                        vec![q, k, v, out]
                    },
                );
            }
        }
    }
}

#[test]
fn gated_delta_has_the_portable_bits() {
    let mut numbers = Numbers(4);
    for (key_heads, group, key_dim, value_dim, conv_kernel) in [
        (1, 1, 1, 1, 2),
        (2, 1, 8, 8, 4),
        (2, 3, 7, 13, 3),
        (1, 2, 16, 70, 4),
    ] {
        let shape = GatedDeltaShape {
            key_heads,
            value_heads: key_heads * group,
            key_dim,
            value_dim,
            conv_kernel,
            eps: 1e-6,
        };
        let conv = numbers.tensor(&[shape.channels(), conv_kernel]);
        let gates = numbers.tensor(&[shape.value_heads]);
        let norm = numbers.tensor(&[value_dim]);
        let layer = GatedDelta::new(Backend::Cpu, shape, &conv, &gates, &gates, &norm).expect("a layer");
        let x = numbers.tensor(&[11, shape.projected()]);
        let start: Vec<_> = layer
            .layout()
            .arrays
            .iter()
            .map(|a| numbers.tensor(&a.shape))
            .collect();
        let call = |fold: Vec<RecordSlice>, replay: Vec<RecordSlice>, recording| {
            let arrays = start.iter().map(|array| array.copy().expect("a copy")).collect();
            let step = RecurrentStep {
                arrays,
                fold,
                replay,
                recording,
            };
            let out = layer
                .forward(&x, &mut [DeltaSegment { rows: 11, step }])
                .expect("a call");
            let advance = out.segments.into_iter().next().expect("one segment");
            ([vec![out.mixed], advance.arrays].concat(), advance.records)
        };
        same_on_all(&format!("{shape:?}"), || {
            let (first, records) = call(Vec::new(), Vec::new(), true);
            let slice = |rows| {
                vec![RecordSlice {
                    arrays: records.clone(),
                    rows,
                }]
            };
            let (second, _) = call(slice(0..4), slice(4..9), true);
            let (third, _) = call(Vec::new(), Vec::new(), false);
            let folded = layer.layout().fold.fold(&start, &slice(0..11)).expect("folded");
            [first, records.clone(), second, third, folded].concat()
        });
    }
}

/// What a function gives for each number, on one instruction set.
fn map(isa: Isa, function: Function, x: &[f32]) -> Vec<f32> {
    let mut y = vec![0.0; x.len()];
    simd::run(
        isa,
        Map {
            function,
            x,
            y: &mut y,
        },
    );
    y
}

#[derive(Debug, Clone, Copy)]
enum Function {
    Exp,
    Sigmoid,
    Silu,
    Bf16,
    F16,
}

struct Map<'a> {
    function: Function,
    x: &'a [f32],
    y: &'a mut [f32],
}

impl Kernel for Map<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (x, y) in self.x.chunks(LANES).zip(self.y.chunks_mut(LANES)) {
            let lanes = s.lanes(s.load_part(x));
            let found = match self.function {
                Function::Exp => simd::exp(s, s.load(&lanes)),
                Function::Sigmoid => simd::sigmoid(s, s.load(&lanes)),
                Function::Silu => simd::silu(s, s.load(&lanes)),
                Function::Bf16 => s.bf16(&lanes.map(bf16::from_f32)),
                Function::F16 => s.f16(&lanes.map(f16::from_f32)),
            };
            s.store_part(found, y);
        }
    }
}

/// Numbers of every size and sign, and the ones at the ends of ranges.
fn sweep() -> Vec<f32> {
    let edges = [
        0.0,
        1e-45,
        1e-38,
        1e-30,
        1.0,
        20.0,
        86.9,
        87.4,
        88.72,
        88.73,
        89.0,
        103.9,
        104.0,
        105.0,
        1e30,
        f32::MAX,
    ];
    let mut x: Vec<f32> = edges.iter().flat_map(|&x| [x, -x]).collect();
    x.extend([f32::INFINITY, f32::NEG_INFINITY, f32::NAN]);
    x.extend((0..400_000).map(|i| (i as f32 - 200_000.0) * 5.3e-4));
    x
}

#[test]
fn functions_have_the_portable_bits() {
    let x = sweep();
    for function in [
        Function::Exp,
        Function::Sigmoid,
        Function::Silu,
        Function::Bf16,
        Function::F16,
    ] {
        let best = map(simd::isa(), function, &x);
        for ((x, best), portable) in x.iter().zip(best).zip(map(Isa::Portable, function, &x)) {
            let same = best.to_bits() == portable.to_bits() || (best.is_nan() && portable.is_nan());
            assert!(same, "{function:?} of {x:?}: {best:?} against {portable:?}");
        }
    }
}

/// Distance in units of the last place of the right answer.
fn ulps(found: f32, right: f64) -> f64 {
    let near = right as f32;
    if found == near {
        return 0.0;
    }
    let unit = f64::from(f32::from_bits(near.abs().to_bits() + 1)) - f64::from(near.abs());
    (f64::from(found) - right).abs() / unit
}

/// Eight sums at once, and one at a time.
struct Sums<'a> {
    x: &'a [[f32; LANES]; LANES],
    together: &'a mut [f32; LANES],
    alone: &'a mut [f32; LANES],
}

impl Kernel for Sums<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let x = std::array::from_fn(|i| s.load(&self.x[i]));
        s.store(s.sums(x), self.together);
        *self.alone = x.map(|x| s.sum(x));
    }
}

#[test]
fn eight_sums_at_once_have_the_bits_of_each_alone() {
    let mut numbers = Numbers(6);
    for _ in 0..1000 {
        let x = std::array::from_fn(|_| std::array::from_fn(|_| numbers.next() * 10.0));
        for isa in simd::available() {
            let (mut together, mut alone) = ([0.0; LANES], [0.0; LANES]);
            simd::run(
                *isa,
                Sums {
                    x: &x,
                    together: &mut together,
                    alone: &mut alone,
                },
            );
            assert_eq!(together.map(f32::to_bits), alone.map(f32::to_bits), "{isa:?}");
        }
    }
}

#[test]
fn exp_is_within_two_units_in_the_last_place() {
    let x = sweep();
    let mut most = 0.0_f64;
    for (x, found) in x.iter().zip(map(simd::isa(), Function::Exp, &x)) {
        let right = f64::from(*x).exp();
        if x.is_nan() {
            assert!(found.is_nan());
        } else if right > f64::from(f32::MAX) {
            assert_eq!(found, f32::INFINITY, "exp of {x}");
        } else {
            most = most.max(ulps(found, right));
            assert!(ulps(found, right) <= 2.0, "exp of {x} is {right}, found {found}");
        }
    }
    // Seen: 1.0.
    assert!(most <= 2.0, "{most}");
    let ends = map(
        simd::isa(),
        Function::Exp,
        &[0.0, f32::NEG_INFINITY, f32::MIN, -105.0],
    );
    assert_eq!(ends, [1.0, 0.0, 0.0, 0.0]);
}

#[test]
fn sigmoid_and_silu_are_right_at_both_ends() {
    let x = sweep();
    for (x, found) in x.iter().zip(map(simd::isa(), Function::Sigmoid, &x)) {
        let right = 1.0 / (1.0 + (-f64::from(*x)).exp());
        assert!(found.is_nan() == x.is_nan());
        assert!(
            x.is_nan() || *x < -88.0 || ulps(found, right) <= 4.0,
            "sigmoid of {x} is {right}, found {found}"
        );
        assert!(x.is_nan() || (0.0..=1.0).contains(&found));
    }
    for (x, found) in x.iter().zip(map(simd::isa(), Function::Silu, &x)) {
        let right = f64::from(*x) / (1.0 + (-f64::from(*x)).exp());
        assert!(
            !x.is_finite() || *x < -88.0 || ulps(found, right) <= 4.0,
            "silu of {x} is {right}, found {found}"
        );
        assert!(!x.is_finite() || found.is_finite());
    }
}

#[test]
fn the_bits_of_an_element_do_not_depend_on_where_it_lies() {
    let mut numbers = Numbers(5);
    let x: Vec<f32> = (0..61).map(|_| 10.0 * numbers.next()).collect();
    for function in [Function::Exp, Function::Sigmoid, Function::Silu] {
        let all = map(simd::isa(), function, &x);
        for start in 0..x.len() {
            let part = map(simd::isa(), function, &x[start..]);
            assert_eq!(part, all[start..], "{function:?} from {start}");
        }
    }
}
