//! Linear layers: the grouping law, the oracle, and what is refused.

mod common;
#[path = "common/kinds.rs"]
mod kinds;

use candle_core::{DType, Device, Tensor};
use common::{distance, in_pool, rows, same, Numbers};
use kinds::{every_kind, TYPES};
use recant_kernels::{Backend, Error, Linear, Weight};

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

#[test]
fn parts_of_different_kinds_stand_side_by_side() {
    let mut numbers = Numbers(24);
    let kinds = every_kind(&numbers.tensor(&[40, 128]));
    let all = Linear::new(Backend::Cpu, kinds.iter().map(|(_, weight)| weight), None).expect("a layer");
    for rows in [1, 5] {
        let x = numbers.tensor(&[rows, 128]);
        let each: Vec<_> = kinds
            .iter()
            .map(|(_, weight)| {
                Linear::new(Backend::Cpu, [weight], None).and_then(|linear| linear.forward(&x))
            })
            .collect::<Result<_, _>>()
            .expect("rows");
        let each = Tensor::cat(&each, 1).expect("columns");
        for threads in [1, 3] {
            let y = in_pool(threads, || all.forward(&x).expect("rows"));
            same(&y, &each, &format!("{rows} rows of parts"));
        }
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
