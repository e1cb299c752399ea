//! Norm, activation and rotary table.

mod common;

use candle_core::{DType, Device, Tensor};
use common::{distance, in_pool, rows, same, values, Numbers};
use recant_kernels::{add, rms_norm, swiglu, Backend, Error, Rotary};

#[test]
fn a_sum_is_that_of_each_element() {
    let mut numbers = Numbers(9);
    for (count, width) in [(0, 3), (1, 1), (5, 33), (70, 1025)] {
        let (a, b) = (numbers.tensor(&[count, width]), numbers.tensor(&[count, width]));
        let expected = (&a + &b).expect("a sum");
        for threads in [1, 3] {
            for backend in [Backend::Cpu, Backend::Composed] {
                let sum = in_pool(threads, || add(backend, &a, &b).expect("a sum"));
                same(&sum, &expected, &format!("{count} x {width}"));
            }
        }
    }
    let (a, b) = (numbers.tensor(&[2, 3]), numbers.tensor(&[2, 4]));
    assert!(matches!(
        add(Backend::Cpu, &a, &b),
        Err(Error::Shape { operand: "b", .. })
    ));
    let half = numbers.typed(&[2, 3], DType::F16);
    assert!(matches!(
        add(Backend::Cpu, &half, &a),
        Err(Error::DType { operand: "a", .. })
    ));
}

#[test]
fn norm_and_activation_of_a_row_do_not_depend_on_other_rows_or_threads() {
    let mut numbers = Numbers(1);
    for width in [1, 7, 8, 31, 33, 100, 1025, 2050] {
        let x = numbers.tensor(&[64, width]);
        let both = numbers.tensor(&[64, 2 * width]);
        let weight = numbers.tensor(&[width]);
        let norm = |x: &Tensor| rms_norm(Backend::Cpu, x, &weight, 1e-6).expect("normed");
        let act = |x: &Tensor| swiglu(Backend::Cpu, x).expect("activated");
        for threads in [1, 2, 3] {
            let (normed, active) = in_pool(threads, || (norm(&x), act(&both)));
            for row in [0, 1, 17, 63] {
                same(
                    &rows(&normed, row, 1),
                    &norm(&rows(&x, row, 1)),
                    &format!("norm, width {width}"),
                );
                same(
                    &rows(&active, row, 1),
                    &act(&rows(&both, row, 1)),
                    &format!("swiglu, width {width}"),
                );
            }
        }
        for count in 1..=64 {
            same(&norm(&rows(&x, 0, count)), &rows(&norm(&x), 0, count), "norm");
            same(
                &act(&rows(&both, 0, count)),
                &rows(&act(&both), 0, count),
                "swiglu",
            );
        }
    }
}

#[test]
fn norm_and_activation_agree_with_candle() {
    let mut numbers = Numbers(2);
    let mut most = 0.0_f32;
    for width in [1, 9, 64, 1000] {
        let x = (numbers.tensor(&[6, width]) * 3.0).expect("scaled");
        let weight = numbers.tensor(&[width]);
        let norm = |backend| rms_norm(backend, &x, &weight, 1e-6).expect("normed");
        most = most.max(distance(&norm(Backend::Cpu), &norm(Backend::Composed)));
        let both = (numbers.tensor(&[6, 2 * width]) * 20.0).expect("scaled");
        let act = |backend| swiglu(backend, &both).expect("activated");
        most = most.max(distance(&act(Backend::Cpu), &act(Backend::Composed)));
    }
    // Seen: 2.4e-7.
    assert!(most < 2e-6, "{most}");
}

/// C066: the weight is used as it is; whoever holds a zero-centred one adds the 1.
#[test]
fn the_norm_multiplies_by_the_weight_as_it_is() {
    let x = Tensor::new(&[[3.0_f32, 4.0]], &Device::Cpu).expect("a row");
    let weight = Tensor::new(&[0.0_f32, 2.0], &Device::Cpu).expect("a weight");
    let y = values(&rms_norm(Backend::Cpu, &x, &weight, 0.0).expect("normed"));
    assert_eq!(y[0], 0.0);
    assert!((y[1] - 2.0 * 4.0 / 12.5_f32.sqrt()).abs() < 1e-6);
}

#[test]
fn large_gates_saturate_and_do_not_overflow() {
    let x = Tensor::new(
        &[[1000.0_f32, -1000.0, 0.0, 88.0, 2.0, 3.0, 4.0, 5.0]],
        &Device::Cpu,
    )
    .expect("a row");
    let y = values(&swiglu(Backend::Cpu, &x).expect("activated"));
    assert_eq!(y, [2000.0, -0.0, 0.0, 440.0]);
}

#[test]
fn the_rotary_table_is_what_hugging_face_computes() {
    let rotary = Rotary::new(1e7, 64).expect("a rotary");
    let positions = [0, 1, 77, 5000];
    let table = rotary.table(&positions, &Device::Cpu).expect("a table");
    assert_eq!(table.cos.dims(), [4, 32]);
    let (cos, sin) = (values(&table.cos), values(&table.sin));
    for (row, position) in positions.iter().enumerate() {
        for j in 0..32 {
            let inv_freq = (1.0 / 1e7_f64.powf(2.0 * j as f64 / 64.0)) as f32;
            let angle = f64::from(*position as f32 * inv_freq);
            // f32 frequencies may be off by an ulp or two, which large angles multiply.
            let near = 1e-6 + 4e-7 * angle;
            assert!(
                (f64::from(cos[row * 32 + j]) - angle.cos()).abs() < near,
                "{position} {j}"
            );
            assert!(
                (f64::from(sin[row * 32 + j]) - angle.sin()).abs() < near,
                "{position} {j}"
            );
        }
    }
    for (theta, dims) in [(0.0, 64), (f64::NAN, 64), (1e4, 0), (1e4, 7)] {
        assert!(matches!(Rotary::new(theta, dims), Err(Error::Value { .. })));
    }
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let mut numbers = Numbers(3);
    let (x, weight) = (numbers.tensor(&[2, 8]), numbers.tensor(&[7]));
    let found = rms_norm(Backend::Cpu, &x, &weight, 1e-6).expect_err("another width");
    assert_eq!(
        found.to_string(),
        "rms_norm: `x` has shape [2, 8], expected [rows, 7]"
    );
    let half = numbers.typed(&[8], DType::F16);
    assert!(matches!(
        rms_norm(Backend::Cpu, &x, &half, 1e-6),
        Err(Error::DType {
            operand: "weight",
            ..
        })
    ));
    assert!(matches!(
        swiglu(Backend::Cpu, &numbers.tensor(&[2, 7])),
        Err(Error::Shape { .. })
    ));
    let view = numbers.tensor(&[8, 2]).t().expect("a view");
    assert!(matches!(swiglu(Backend::Cpu, &view), Err(Error::Strided { .. })));
}
