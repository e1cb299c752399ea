//! The gated delta rule: deferred replay, the grouping law, the oracle, and what is refused.

mod common;

use candle_core::{DType, Device, Tensor};
use common::{distance, in_pool, rows, same, values, Numbers};
use recant_core::{RecordSlice, RecurrentStep};
use recant_kernels::{Backend, DeltaSegment, Error, GatedDelta, GatedDeltaShape};

fn shape(
    key_heads: usize,
    group: usize,
    key_dim: usize,
    value_dim: usize,
    conv_kernel: usize,
) -> GatedDeltaShape {
    GatedDeltaShape {
        key_heads,
        value_heads: key_heads * group,
        key_dim,
        value_dim,
        conv_kernel,
        eps: 1e-6,
    }
}

const SHAPES: [(usize, usize, usize, usize, usize); 6] = [
    (2, 1, 8, 8, 4),
    (2, 2, 16, 40, 4),
    (1, 3, 5, 7, 3),
    (2, 4, 12, 33, 2),
    (3, 1, 128, 128, 4),
    (1, 2, 1, 1, 4),
];

fn channels(shape: &GatedDeltaShape) -> usize {
    2 * shape.key_heads * shape.key_dim + shape.value_heads * shape.value_dim
}

fn width(shape: &GatedDeltaShape) -> usize {
    channels(shape) + shape.value_heads * shape.value_dim + 2 * shape.value_heads
}

fn layer(numbers: &mut Numbers, backend: Backend, shape: GatedDeltaShape) -> GatedDelta {
    let conv = numbers.tensor(&[channels(&shape), shape.conv_kernel]);
    // Decays from hardly any to ones that make every second token's scale too small.
    let a_log = (numbers.tensor(&[shape.value_heads]) * 3.0).expect("scaled");
    let dt_bias = numbers.tensor(&[shape.value_heads]);
    let norm = numbers.tensor(&[shape.value_dim]);
    GatedDelta::new(backend, shape, &conv, &a_log, &dt_bias, &norm).expect("a layer")
}

fn zeros(layer: &GatedDelta) -> Vec<Tensor> {
    let arrays = layer.layout().arrays;
    arrays
        .iter()
        .map(|a| Tensor::zeros(a.shape.as_slice(), DType::F32, &Device::Cpu).expect("zeros"))
        .collect()
}

fn copies(arrays: &[Tensor]) -> Vec<Tensor> {
    arrays.iter().map(|array| array.copy().expect("a copy")).collect()
}

fn plain(arrays: &[Tensor]) -> RecurrentStep {
    RecurrentStep {
        arrays: copies(arrays),
        fold: Vec::new(),
        replay: Vec::new(),
        recording: false,
    }
}

/// One segment: mixed rows, arrays and records after it.
fn call(layer: &GatedDelta, x: &Tensor, step: RecurrentStep) -> (Tensor, Vec<Tensor>, Vec<Tensor>) {
    let mut segments = [DeltaSegment {
        rows: x.dims()[0],
        step,
    }];
    let mut out = layer.forward(x, &mut segments).expect("a call");
    let advance = out.segments.remove(0);
    (out.mixed, advance.arrays, advance.records)
}

/// Plain steps of one token: the rows, and the arrays after 0, 1, 2 ... tokens.
fn serial(layer: &GatedDelta, x: &Tensor) -> (Tensor, Vec<Vec<Tensor>>) {
    let mut states = vec![zeros(layer)];
    let mut mixed = Vec::new();
    for row in 0..x.dims()[0] {
        let (out, arrays, records) = call(layer, &rows(x, row, 1), plain(&states[row]));
        assert!(records.is_empty());
        mixed.push(out);
        states.push(arrays);
    }
    (Tensor::cat(&mixed, 0).expect("rows"), states)
}

fn same_arrays(a: &[Tensor], b: &[Tensor], what: &str) {
    assert_eq!(a.len(), b.len());
    same(&a[0], &b[0], &format!("{what}: conv"));
    same(&a[1], &b[1], &format!("{what}: state"));
    same(&a[2], &b[2], &format!("{what}: scale"));
}

fn slice(records: &[Tensor], rows: std::ops::Range<usize>) -> RecordSlice {
    RecordSlice {
        arrays: records.to_vec(),
        rows,
    }
}

#[test]
fn any_number_of_rows_leaves_what_single_steps_leave() {
    let mut numbers = Numbers(1);
    for (key_heads, group, key_dim, value_dim, kernel) in SHAPES {
        let shape = shape(key_heads, group, key_dim, value_dim, kernel);
        let layer = layer(&mut numbers, Backend::Cpu, shape);
        let x = numbers.tensor(&[64, width(&shape)]);
        let (mixed, states) = serial(&layer, &x);
        for count in 1..=64 {
            let (out, arrays, _) = call(&layer, &rows(&x, 0, count), plain(&states[0]));
            same(
                &out,
                &rows(&mixed, 0, count),
                &format!("{count} rows of {shape:?}"),
            );
            same_arrays(&arrays, &states[count], &format!("{count} rows of {shape:?}"));
            let (out, arrays, _) = call(&layer, &rows(&x, 64 - count, count), plain(&states[64 - count]));
            same(&out, &rows(&mixed, 64 - count, count), "the last rows");
            same_arrays(&arrays, &states[64], "the last rows");
        }
    }
}

/// Every way to keep some of eight recorded tokens for good, replay more of them, and drop the rest.
#[test]
fn folded_and_replayed_records_are_the_tokens_themselves() {
    let mut numbers = Numbers(2);
    for (key_heads, group, key_dim, value_dim, kernel) in SHAPES {
        let shape = shape(key_heads, group, key_dim, value_dim, kernel);
        let layer = layer(&mut numbers, Backend::Cpu, shape);
        let x = numbers.tensor(&[16, width(&shape)]);
        let (mixed, states) = serial(&layer, &x);
        let base = &states[3];
        let step = RecurrentStep {
            recording: true,
            ..plain(base)
        };
        let (out, arrays, records) = call(&layer, &rows(&x, 3, 8), step);
        same(&out, &rows(&mixed, 3, 8), "recorded rows");
        same_arrays(&arrays, base, "a recorded call leaves the arrays as they were");
        for fold in 0..=8 {
            for replay in 0..=8 - fold {
                for (count, recording) in [(1, true), (1, false), (4, true), (4, false)] {
                    let kept = fold + replay;
                    let slices = |range: std::ops::Range<usize>| match range.len() {
                        0 => vec![],
                        1 => vec![slice(&records, range)],
                        _ => vec![
                            slice(&records, range.start..range.start + 1),
                            slice(&records, range.start + 1..range.end),
                        ],
                    };
                    let step = RecurrentStep {
                        fold: slices(0..fold),
                        replay: slices(fold..kept),
                        recording,
                        ..plain(base)
                    };
                    let what = format!(
                        "{shape:?}: {fold} folded, {replay} replayed, {count} rows, recording {recording}"
                    );
                    let (out, arrays, again) = call(&layer, &rows(&x, 3 + kept, count), step);
                    same(&out, &rows(&mixed, 3 + kept, count), &what);
                    let tokens = if recording { 3 + fold } else { 3 + kept + count };
                    same_arrays(&arrays, &states[tokens], &what);
                    if recording {
                        let overlap = count.min(8 - kept);
                        for (first, again) in records.iter().zip(&again) {
                            same(&rows(first, kept, overlap), &rows(again, 0, overlap), &what);
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn the_fold_of_the_layout_leaves_what_the_step_leaves() {
    let mut numbers = Numbers(3);
    for backend in [Backend::Cpu, Backend::Composed] {
        for (key_heads, group, key_dim, value_dim, kernel) in SHAPES {
            let shape = shape(key_heads, group, key_dim, value_dim, kernel);
            let layer = layer(&mut numbers, backend, shape);
            let x = numbers.tensor(&[9, width(&shape)]);
            let (_, states) = serial(&layer, &x);
            let step = RecurrentStep {
                recording: true,
                ..plain(&states[2])
            };
            let (_, _, records) = call(&layer, &rows(&x, 2, 7), step);
            let base = copies(&states[2]);
            for kept in 0..=7 {
                let cut = kept / 2;
                let slices = [slice(&records, 0..cut), slice(&records, cut..kept)];
                let folded = layer.layout().fold.fold(&base, &slices).expect("folded");
                same_arrays(
                    &folded,
                    &states[2 + kept],
                    &format!("{backend:?}, {kept} of {shape:?}"),
                );
                same_arrays(&base, &states[2], "the arrays are not written to");
            }
        }
    }
}

#[test]
fn segments_in_one_call_have_the_bits_that_they_have_alone() {
    let mut numbers = Numbers(4);
    let shape = shape(2, 2, 16, 24, 4);
    let layer = layer(&mut numbers, Backend::Cpu, shape);
    let x = numbers.tensor(&[20, width(&shape)]);
    let (_, states) = serial(&layer, &x);
    let (_, _, records) = call(
        &layer,
        &rows(&x, 5, 6),
        RecurrentStep {
            recording: true,
            ..plain(&states[5])
        },
    );
    let steps = || {
        [
            (0, 3, plain(&states[0])),
            (
                8,
                2,
                RecurrentStep {
                    fold: vec![slice(&records, 0..3)],
                    recording: true,
                    ..plain(&states[5])
                },
            ),
            (7, 0, plain(&states[7])),
            (
                9,
                5,
                RecurrentStep {
                    replay: vec![slice(&records, 0..4)],
                    recording: true,
                    ..plain(&states[5])
                },
            ),
            (11, 9, plain(&states[11])),
        ]
    };
    let each = steps().map(|(start, count, _)| rows(&x, start, count));
    let all = Tensor::cat(&each.iter().filter(|x| x.dims()[0] > 0).collect::<Vec<_>>(), 0).expect("rows");
    for threads in [1, 2, 3] {
        let mut segments = steps().map(|(_, rows, step)| DeltaSegment { rows, step });
        let out = in_pool(threads, || layer.forward(&all, &mut segments)).expect("a call");
        let mut row = 0;
        for (i, ((_, count, step), x)) in steps().into_iter().zip(&each).enumerate() {
            let (mixed, arrays, records) = call(&layer, x, step);
            same(&rows(&out.mixed, row, count), &mixed, &format!("segment {i}"));
            same_arrays(&out.segments[i].arrays, &arrays, &format!("segment {i}"));
            assert_eq!(out.segments[i].records.len(), records.len());
            for (together, alone) in out.segments[i].records.iter().zip(&records) {
                same(together, alone, &format!("records of segment {i}"));
            }
            row += count;
        }
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let mut numbers = Numbers(5);
    let shape = shape(8, 2, 64, 64, 4);
    let layer = layer(&mut numbers, Backend::Cpu, shape);
    let x = numbers.tensor(&[30, width(&shape)]);
    let start = zeros(&layer);
    let (mixed, arrays, _) = in_pool(1, || call(&layer, &x, plain(&start)));
    for threads in [2, 3] {
        let more = in_pool(threads, || call(&layer, &x, plain(&start)));
        same(&more.0, &mixed, "rows");
        same_arrays(&more.1, &arrays, "arrays");
    }
}

#[test]
fn the_state_is_written_in_place_and_only_where_the_step_writes() {
    let mut numbers = Numbers(6);
    let shape = shape(1, 2, 8, 8, 4);
    let layer = layer(&mut numbers, Backend::Cpu, shape);
    let x = numbers.tensor(&[2, width(&shape)]);
    let arrays = zeros(&layer);
    let step = |recording| RecurrentStep {
        arrays: arrays.clone(),
        fold: Vec::new(),
        replay: Vec::new(),
        recording,
    };
    call(&layer, &x, step(true));
    same_arrays(&arrays, &zeros(&layer), "after a recorded call");
    let (_, after, _) = call(&layer, &x, step(false));
    same(&arrays[1], &after[1], "the state that came in");
    assert!(values(&arrays[1]).iter().any(|x| *x != 0.0));
    same(&arrays[0], &zeros(&layer)[0], "the window that came in");
}

#[test]
fn agrees_with_candle() {
    let mut numbers = Numbers(7);
    let mut most = 0.0_f32;
    for (key_heads, group, key_dim, value_dim, kernel) in SHAPES {
        let shape = shape(key_heads, group, key_dim, value_dim, kernel);
        let seed = numbers.0;
        let own = layer(&mut numbers, Backend::Cpu, shape);
        let composed = layer(&mut Numbers(seed), Backend::Composed, shape);
        let x = (numbers.tensor(&[40, width(&shape)]) * 2.0).expect("scaled");
        let start = zeros(&own);
        let record = |layer: &GatedDelta| {
            let (first, arrays, _) = call(layer, &rows(&x, 0, 20), plain(&start));
            let step = RecurrentStep {
                recording: true,
                ..plain(&arrays)
            };
            let (second, _, records) = call(layer, &rows(&x, 20, 8), step);
            let step = RecurrentStep {
                fold: vec![slice(&records, 0..3)],
                replay: vec![slice(&records, 3..5)],
                recording: true,
                ..plain(&arrays)
            };
            let (third, arrays, _) = call(layer, &rows(&x, 25, 15), step);
            let scale = arrays[2].reshape(((), 1, 1)).expect("a scale a head");
            let state = arrays[1].broadcast_mul(&scale).expect("a state");
            [vec![first, second, third, arrays[0].clone(), state], records].concat()
        };
        for (a, b) in record(&own).iter().zip(&record(&composed)) {
            most = most.max(distance(a, b));
        }
    }
    // Seen: 2.5e-6.
    assert!(most < 2e-5, "{most}");
}

fn with_gates(backend: Backend, a_log: f32, a: f32, b: f32) -> (Vec<f32>, Vec<f32>) {
    let shape = shape(1, 1, 4, 4, 2);
    let mut numbers = Numbers(8);
    let conv = numbers.tensor(&[channels(&shape), 2]);
    let number = |x: f32| Tensor::new(&[x], &Device::Cpu).expect("a number");
    let norm = numbers.tensor(&[4]);
    let layer = GatedDelta::new(backend, shape, &conv, &number(a_log), &number(0.0), &norm).expect("a layer");
    let x = numbers.tensor(&[3, width(&shape) - 2]);
    let gates = Tensor::new(&[[b, a]; 3], &Device::Cpu).expect("gates");
    let x = Tensor::cat(&[x, gates], 1).expect("rows");
    let step = RecurrentStep {
        recording: true,
        ..plain(&zeros(&layer))
    };
    let (mixed, _, records) = call(&layer, &x, step);
    (values(&mixed), values(&records[1]))
}

/// C099, C100: no gate makes a decay that is not in [0, 1], nor a row that is not finite.
#[test]
fn decays_stay_between_nought_and_one() {
    for backend in [Backend::Cpu, Backend::Composed] {
        for a_log in [f32::NEG_INFINITY, -100.0, 0.0, 12.0, 100.0, f32::INFINITY] {
            for a in [
                -1e30,
                -1000.0,
                -200.0,
                -20.0,
                0.0,
                20.0,
                20.1,
                90.0,
                1000.0,
                f32::MAX,
            ] {
                for b in [-1000.0, 0.0, 1000.0] {
                    let (mixed, decay) = with_gates(backend, a_log, a, b);
                    let what = format!("{backend:?}, a_log {a_log}, a {a}, b {b}: {decay:?} {mixed:?}");
                    assert!(decay.iter().all(|g| (0.0..=1.0).contains(g)), "{what}");
                    assert!(mixed.iter().all(|x| x.is_finite()), "{what}");
                }
            }
        }
        let (_, decay) = with_gates(backend, 0.0, 0.0, 0.0);
        assert!((decay[0] - 0.5).abs() < 1e-6, "exp(-ln 2) is {}", decay[0]);
        let (_, decay) = with_gates(backend, 0.0, 30.0, 0.0);
        assert!((decay[0] / (-30.0_f32).exp() - 1.0).abs() < 1e-5);
    }
}

/// C101: epsilon is added to the sum of squares, not to their mean.
#[test]
fn keys_are_normed_with_epsilon_on_the_sum() {
    for dim in [16, 128] {
        for scale in [1.0_f32, 1e-2, 1e-4, 0.0] {
            for backend in [Backend::Cpu, Backend::Composed] {
                let shape = shape(1, 1, dim, 4, 2);
                let mut numbers = Numbers(9);
                // The newest tap is 1: SiLU of the row itself.
                let taps = [[0.0_f32, 1.0]; 1].repeat(channels(&shape)).concat();
                let conv = Tensor::from_vec(taps, (channels(&shape), 2), &Device::Cpu).expect("taps");
                let one = Tensor::ones(1, DType::F32, &Device::Cpu).expect("one");
                let norm = numbers.tensor(&[4]);
                let layer = GatedDelta::new(backend, shape, &conv, &one, &one, &norm).expect("a layer");
                let x = (numbers.tensor(&[1, width(&shape)]) * f64::from(scale)).expect("scaled");
                let step = RecurrentStep {
                    recording: true,
                    ..plain(&zeros(&layer))
                };
                let (_, _, records) = call(&layer, &x, step);
                let silu = |x: &f32| f64::from(*x) / (1.0 + (-f64::from(*x)).exp());
                let k: Vec<f64> = values(&x)[dim..2 * dim].iter().map(silu).collect();
                let root = (k.iter().map(|k| k * k).sum::<f64>() + 1e-6).sqrt();
                for (found, k) in values(&records[0]).iter().zip(&k) {
                    assert!(
                        (f64::from(*found) - k / root).abs() < 1e-6,
                        "{backend:?}, {dim}, {scale}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_state_that_shares_storage_is_refused_and_nothing_is_written() {
    let mut numbers = Numbers(10);
    let shape = shape(1, 1, 4, 4, 2);
    let layer = layer(&mut numbers, Backend::Cpu, shape);
    let x = numbers.tensor(&[2, width(&shape)]);
    let arrays = zeros(&layer);
    let refused = |recording: [bool; 2]| {
        let mut segments = recording.map(|recording| DeltaSegment {
            rows: 1,
            step: RecurrentStep {
                arrays: arrays.clone(),
                fold: Vec::new(),
                replay: Vec::new(),
                recording,
            },
        });
        layer.forward(&x, &mut segments)
    };
    for recording in [[false, false], [true, false], [false, true]] {
        let found = refused(recording).expect_err("an alias");
        assert!(matches!(found, Error::Aliased { .. }), "{found}");
        assert!(
            found
                .to_string()
                .contains("`state` of segment 0 and `state` of segment 1"),
            "{found}"
        );
    }
    same_arrays(&arrays, &zeros(&layer), "after refusals");
    // Two that only read it may share it.
    refused([true, true]).expect("two readers");
    // One state as two views of one tensor.
    let both = numbers.tensor(&[2, 4, 4]);
    let start = zeros(&layer);
    let mut segments = [0, 1].map(|i| DeltaSegment {
        rows: 1,
        step: RecurrentStep {
            arrays: vec![
                start[0].clone(),
                both.narrow(0, i, 1).expect("a view"),
                start[2].clone(),
            ],
            ..plain(&arrays)
        },
    });
    assert!(matches!(
        layer.forward(&x, &mut segments),
        Err(Error::Aliased { .. })
    ));
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let mut numbers = Numbers(11);
    let good = shape(2, 2, 8, 8, 4);
    let layer = layer(&mut numbers, Backend::Cpu, good);
    let x = numbers.tensor(&[2, width(&good)]);
    let refuse = |x: &Tensor, rows: usize, step: RecurrentStep| {
        layer
            .forward(x, &mut [DeltaSegment { rows, step }])
            .expect_err("no fit")
    };
    let start = zeros(&layer);
    assert!(matches!(
        refuse(&x, 3, plain(&start)),
        Error::Shape {
            operand: "projected",
            ..
        }
    ));
    assert!(matches!(
        refuse(&numbers.tensor(&[2, 5]), 2, plain(&start)),
        Error::Shape {
            operand: "projected",
            ..
        }
    ));
    let half = x.to_dtype(DType::BF16).expect("a type");
    assert!(matches!(
        refuse(&half, 2, plain(&start)),
        Error::DType {
            operand: "projected",
            ..
        }
    ));
    let view = numbers.tensor(&[width(&good), 2]).t().expect("a view");
    assert!(matches!(
        refuse(&view, 2, plain(&start)),
        Error::Strided {
            operand: "projected",
            ..
        }
    ));
    assert!(matches!(refuse(&x, 2, plain(&start[..1])), Error::Value { .. }));
    assert!(matches!(
        refuse(
            &x,
            2,
            plain(&[start[1].clone(), start[0].clone(), start[2].clone()])
        ),
        Error::Shape { operand: "conv", .. }
    ));
    assert!(matches!(
        refuse(
            &x,
            2,
            plain(&[start[0].clone(), start[1].clone(), rows(&start[2], 0, 1)])
        ),
        Error::Shape { operand: "scale", .. }
    ));
    let strided = start[1].transpose(1, 2).expect("a view");
    let step = RecurrentStep {
        arrays: vec![start[0].clone(), strided, start[2].clone()],
        ..plain(&start)
    };
    assert!(matches!(
        refuse(&x, 2, step),
        Error::Strided { operand: "state", .. }
    ));
    let (_, _, records) = call(
        &layer,
        &x,
        RecurrentStep {
            recording: true,
            ..plain(&start)
        },
    );
    let step = RecurrentStep {
        fold: vec![slice(&records, 1..3)],
        ..plain(&start)
    };
    assert!(matches!(refuse(&x, 2, step), Error::Value { .. }));
    let step = RecurrentStep {
        replay: vec![slice(&records[..3], 0..1)],
        ..plain(&start)
    };
    assert!(matches!(refuse(&x, 2, step), Error::Value { .. }));
    let mut wrong = records.clone();
    wrong.swap(0, 2);
    let step = RecurrentStep {
        fold: vec![slice(&wrong, 0..1)],
        ..plain(&start)
    };
    assert!(matches!(refuse(&x, 2, step), Error::Shape { operand: "key", .. }));
    assert!(layer
        .layout()
        .fold
        .fold(&start, &[slice(&records, 0..3)])
        .is_err());
    assert!(layer.layout().fold.fold(&start[..1], &[]).is_err());

    let weights = |shape: GatedDeltaShape, a_log: &Tensor| {
        let conv = Tensor::zeros((channels(&good), 4), DType::F32, &Device::Cpu).expect("taps");
        let eight = Tensor::zeros(8, DType::F32, &Device::Cpu).expect("a norm");
        GatedDelta::new(Backend::Cpu, shape, &conv, a_log, &rows(&eight, 0, 4), &eight).map(|_| ())
    };
    let four = numbers.tensor(&[4]);
    weights(good, &four).expect("a layer");
    assert!(matches!(
        weights(
            GatedDeltaShape {
                value_heads: 3,
                ..good
            },
            &four
        ),
        Err(Error::Value { .. })
    ));
    assert!(matches!(
        weights(
            GatedDeltaShape {
                conv_kernel: 1,
                ..good
            },
            &four
        ),
        Err(Error::Value { .. })
    ));
    assert!(matches!(
        weights(
            GatedDeltaShape {
                conv_kernel: 3,
                ..good
            },
            &four
        ),
        Err(Error::Shape { .. })
    ));
    let nan = Tensor::full(f32::NAN, 4, &Device::Cpu).expect("not a number");
    assert!(matches!(weights(good, &nan), Err(Error::Value { .. })));
}
