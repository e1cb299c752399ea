//! Linear layers: the grouping law, the oracle, and what is refused.

mod common;

use candle_core::{DType, Device, Tensor};
use common::{distance, in_pool, rows, same, Numbers};
use recant_kernels::{Backend, Error, Linear};

const TYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

fn cpu(parts: &[Tensor], bias: Option<&Tensor>) -> Linear {
    Linear::new(Backend::Cpu, parts, bias).expect("a layer")
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
    // Of different types: as if all were f32.
    let mixed = [parts[0].clone(), parts[1].to_dtype(DType::F32).expect("f32")];
    let mixed = cpu(&mixed, None);
    assert_eq!(mixed.dtype(), DType::F32);
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
    assert_eq!((linear.bytes(), linear.dtype()), (640, DType::BF16));
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
