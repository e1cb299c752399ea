//! Mixtures of experts: the grouping law, the choice of experts, the oracle, and what is refused.

mod common;

use candle_core::{DType, Device, Tensor};
use common::{distance, in_pool, rows, same, values, Numbers};
use proptest::prelude::*;
use recant_kernels::{add_gated, route, Backend, Error, Mlp, MoeShape, Routes, SparseExperts};

fn shape(hidden_size: usize, width: usize, experts: usize, top_k: usize) -> MoeShape {
    MoeShape {
        hidden_size,
        width,
        experts,
        top_k,
        renormalize: true,
    }
}

/// Gate and up, and down, of each expert.
fn weights(numbers: &mut Numbers, shape: &MoeShape, dtype: DType) -> Vec<(Tensor, Tensor)> {
    let mut expert = |_| {
        let gate_up = numbers.typed(&[2 * shape.width, shape.hidden_size], dtype);
        (gate_up, numbers.typed(&[shape.hidden_size, shape.width], dtype))
    };
    (0..shape.experts).map(&mut expert).collect()
}

fn layer(backend: Backend, shape: MoeShape, weights: &[(Tensor, Tensor)]) -> SparseExperts {
    let expert = |(gate_up, down): &(Tensor, Tensor)| {
        Mlp::new(backend, std::slice::from_ref(gate_up), down).expect("an expert")
    };
    SparseExperts::new(backend, shape, weights.iter().map(expert).collect()).expect("a layer")
}

fn routes(shape: &MoeShape, logits: &Tensor) -> Routes {
    route(Backend::Cpu, shape, logits).expect("routes")
}

/// Logits that send every row to the same expert first.
fn all_to(numbers: &mut Numbers, count: usize, experts: usize, expert: usize) -> Tensor {
    let noise = values(&numbers.tensor(&[count, experts]));
    let logits: Vec<f32> = noise
        .iter()
        .enumerate()
        .map(|(i, x)| if i % experts == expert { 50.0 } else { *x })
        .collect();
    Tensor::from_vec(logits, (count, experts), &Device::Cpu).expect("logits")
}

/// Every set of rows from a row on, on one thread and more, against rows alone.
fn keeps_the_law(shape: MoeShape, dtype: DType, x: &Tensor, logits: &Tensor, weights: &[(Tensor, Tensor)]) {
    let layer = layer(Backend::Cpu, shape, weights);
    let run = |start: usize, count: usize| {
        let routes = routes(&shape, &rows(logits, start, count));
        layer.forward(&rows(x, start, count), &routes).expect("rows")
    };
    let all = x.dims()[0];
    let alone: Vec<Tensor> = (0..all).map(|row| run(row, 1)).collect();
    let alone = Tensor::cat(&alone, 0).expect("rows");
    for threads in [1, 2, 3] {
        for count in 1..=all {
            let start = all - count;
            let (head, tail) = in_pool(threads, || (run(0, count), run(start, count)));
            let what = format!("{count} rows, {threads} threads, {shape:?}, {dtype:?}");
            same(&head, &rows(&alone, 0, count), &what);
            same(&tail, &rows(&alone, start, count), &what);
        }
    }
}

#[test]
fn every_row_has_the_bits_that_it_has_alone() {
    let mut numbers = Numbers(1);
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for shape in [
            shape(16, 8, 4, 2),
            shape(37, 19, 5, 5),
            shape(33, 17, 64, 3),
            shape(8, 5, 3, 1),
            shape(700, 130, 6, 2),
        ] {
            let weights = weights(&mut numbers, &shape, dtype);
            let x = numbers.tensor(&[20, shape.hidden_size]);
            let logits = (numbers.tensor(&[20, shape.experts]) * 3.0).expect("logits");
            keeps_the_law(shape, dtype, &x, &logits, &weights);
        }
    }
}

#[test]
fn rows_that_all_go_to_one_expert_have_the_bits_that_they_have_alone() {
    let mut numbers = Numbers(2);
    for top_k in [1, 3] {
        let shape = shape(40, 24, 7, top_k);
        let weights = weights(&mut numbers, &shape, DType::BF16);
        let x = numbers.tensor(&[50, shape.hidden_size]);
        let logits = all_to(&mut numbers, 50, shape.experts, 4);
        assert!((0..50).all(|row| routes(&shape, &logits).row(row).any(|(id, _)| id == 4)));
        keeps_the_law(shape, DType::BF16, &x, &logits, &weights);
    }
}

#[test]
fn a_neighbour_that_is_no_number_is_not_noticed() {
    let mut numbers = Numbers(3);
    let shape = shape(24, 16, 6, 2);
    let weights = weights(&mut numbers, &shape, DType::F32);
    let layer = layer(Backend::Cpu, shape, &weights);
    let (x, logits) = (numbers.tensor(&[1, 24]), numbers.tensor(&[1, 6]));
    let want = layer.forward(&x, &routes(&shape, &logits)).expect("a row");
    for bad in [f32::NAN, f32::INFINITY] {
        let bad_x = Tensor::full(bad, (1, 24), &Device::Cpu).expect("a row");
        let bad_logits = Tensor::full(bad, (1, 6), &Device::Cpu).expect("a row");
        let x = Tensor::cat(&[&bad_x, &x, &bad_x], 0).expect("rows");
        let logits = Tensor::cat(&[&bad_logits, &logits, &bad_logits], 0).expect("rows");
        let y = layer.forward(&x, &routes(&shape, &logits)).expect("rows");
        same(&rows(&y, 1, 1), &want, "between bad rows");
        assert!(
            values(&rows(&y, 0, 1)).iter().all(|y| y.is_nan()),
            "a bad row stays bad"
        );
    }
}

#[test]
fn the_shared_experts_gate_is_each_rows_own() {
    let mut numbers = Numbers(4);
    for width in [1, 7, 8, 100, 1025] {
        let (sum, x) = (numbers.tensor(&[17, width]), numbers.tensor(&[17, width]));
        let gate = (numbers.tensor(&[17, 1]) * 9.0).expect("gates");
        let run = |backend, start, count| {
            let (sum, x, gate) = (
                rows(&sum, start, count),
                rows(&x, start, count),
                rows(&gate, start, count),
            );
            add_gated(backend, &sum, &x, &gate).expect("a sum")
        };
        let all = in_pool(3, || run(Backend::Cpu, 0, 17));
        for row in 0..17 {
            same(&rows(&all, row, 1), &run(Backend::Cpu, row, 1), "a row alone");
        }
        let far = distance(&all, &run(Backend::Composed, 0, 17));
        // Seen: 1.2e-7.
        assert!(far < 1e-6, "{far}");
    }
}

#[test]
fn agrees_with_candle() {
    let mut numbers = Numbers(5);
    let mut most = 0.0_f32;
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for (shape, count) in [
            (shape(64, 32, 16, 4), 1),
            (shape(100, 70, 40, 8), 5),
            (shape(64, 32, 3, 3), 40),
        ] {
            for renormalize in [true, false] {
                let shape = MoeShape { renormalize, ..shape };
                let weights = weights(&mut numbers, &shape, dtype);
                let x = numbers.tensor(&[count, shape.hidden_size]);
                let logits = (numbers.tensor(&[count, shape.experts]) * 4.0).expect("logits");
                let run = |backend| {
                    let routes = route(backend, &shape, &logits).expect("routes");
                    layer(backend, shape, &weights)
                        .forward(&x, &routes)
                        .expect("rows")
                };
                most = most.max(distance(&run(Backend::Cpu), &run(Backend::Composed)));
            }
        }
    }
    // Seen: 1.4e-5, on sums of 70 products whose factors are sums of 100.
    assert!(most < 1e-4, "{most}");
}

#[test]
fn a_mixture_of_all_experts_is_their_weighted_sum() {
    let mut numbers = Numbers(6);
    let shape = shape(12, 6, 4, 4);
    let weights = weights(&mut numbers, &shape, DType::F32);
    let (x, logits) = (numbers.tensor(&[3, 12]), numbers.tensor(&[3, 4]));
    let y = layer(Backend::Cpu, shape, &weights)
        .forward(&x, &routes(&shape, &logits))
        .expect("rows");
    for row in 0..3 {
        let logits: Vec<f64> = values(&rows(&logits, row, 1))
            .into_iter()
            .map(f64::from)
            .collect();
        let sum: f64 = logits.iter().map(|l| l.exp()).sum();
        let x = rows(&x, row, 1);
        let mut want = vec![0.0_f64; 12];
        for (e, (gate_up, down)) in weights.iter().enumerate() {
            let inner = values(&x.matmul(&gate_up.t().expect("t")).expect("rows"));
            let inner: Vec<f32> = (0..6)
                .map(|i| inner[i] / (1.0 + (-inner[i]).exp()) * inner[6 + i])
                .collect();
            let inner = Tensor::from_vec(inner, (1, 6), &Device::Cpu).expect("a row");
            let part = values(&inner.matmul(&down.t().expect("t")).expect("rows"));
            for (want, part) in want.iter_mut().zip(part) {
                *want += logits[e].exp() / sum * f64::from(part);
            }
        }
        for (found, want) in values(&rows(&y, row, 1)).iter().zip(want) {
            assert!(
                (f64::from(*found) - want).abs() < 1e-5,
                "row {row}: {found} against {want}"
            );
        }
    }
}

#[test]
fn equally_probable_experts_are_taken_from_the_lowest_id_on() {
    let logits = Tensor::new(&[[1.0_f32, 2.0, 1.0, 2.0, 1.0, 2.0], [0.0; 6]], &Device::Cpu).expect("logits");
    for backend in [Backend::Cpu, Backend::Composed] {
        for (top_k, first, second) in [
            (1, vec![1], vec![0]),
            (2, vec![1, 3], vec![0, 1]),
            (4, vec![0, 1, 3, 5], vec![0, 1, 2, 3]),
        ] {
            let routes = route(backend, &shape(1, 1, 6, top_k), &logits).expect("routes");
            let ids = |row| routes.row(row).map(|(id, _)| id).collect::<Vec<_>>();
            assert_eq!((ids(0), ids(1)), (first, second), "{backend:?}, top {top_k}");
        }
    }
}

#[test]
fn weights_are_shares_of_all_experts_unless_they_are_renormalized() {
    let logits = Tensor::new(&[[2.0_f32, -1.0, 0.5, 0.0]], &Device::Cpu).expect("logits");
    let sum: f64 = [2.0_f64, -1.0, 0.5, 0.0].iter().map(|l| l.exp()).sum();
    let shares = [2.0_f64.exp() / sum, 0.5_f64.exp() / sum];
    for backend in [Backend::Cpu, Backend::Composed] {
        for (renormalize, by) in [(false, 1.0), (true, shares[0] + shares[1])] {
            let shape = MoeShape {
                renormalize,
                ..shape(1, 1, 4, 2)
            };
            let found: Vec<_> = route(backend, &shape, &logits).expect("routes").row(0).collect();
            for ((id, weight), (want_id, share)) in found.into_iter().zip([0, 2].into_iter().zip(shares)) {
                assert_eq!(id, want_id);
                assert!(
                    (f64::from(weight) - share / by).abs() < 1e-6,
                    "{weight} of {renormalize}"
                );
            }
        }
    }
}

#[test]
fn logits_of_any_size_are_routed() {
    let wild = [
        f32::MAX,
        f32::MIN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        0.0,
    ];
    for a in wild {
        for b in wild {
            let logits = Tensor::new(&[[a, b, 0.0]], &Device::Cpu).expect("logits");
            let routes = routes(&shape(1, 1, 3, 2), &logits);
            let (ids, weights): (Vec<u32>, Vec<f32>) = routes.row(0).unzip();
            assert!(ids[0] < ids[1] && ids[1] < 3, "{a} {b}: {ids:?}");
            if a.is_finite() && b.is_finite() {
                assert!(
                    (weights[0] + weights[1] - 1.0).abs() < 1e-6,
                    "{a} {b}: {weights:?}"
                );
            }
        }
    }
}

proptest! {
    #[test]
    fn the_chosen_experts_are_those_of_a_full_sort(
        logits in prop::collection::vec(-4i8..4, 1..80),
        top_k in 1usize..80,
    ) {
        let experts = logits.len();
        let top_k = top_k.min(experts);
        let logits: Vec<f32> = logits.into_iter().map(f32::from).collect();
        let mut order: Vec<u32> = (0..experts as u32).collect();
        order.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b)));
        let mut want = order[..top_k].to_vec();
        want.sort_unstable();
        let logits = Tensor::from_vec(logits, (1, experts), &Device::Cpu).expect("logits");
        let routes = routes(&shape(1, 1, experts, top_k), &logits);
        let (ids, weights): (Vec<u32>, Vec<f32>) = routes.row(0).unzip();
        prop_assert_eq!(ids, want);
        prop_assert!((weights.iter().sum::<f32>() - 1.0).abs() < 1e-5);
    }
}

#[test]
fn gate_and_up_may_come_as_one_matrix_or_two() {
    let mut numbers = Numbers(7);
    let shape = shape(10, 6, 2, 1);
    let weights = weights(&mut numbers, &shape, DType::BF16);
    let split = |(gate_up, down): &(Tensor, Tensor)| {
        let parts = [rows(gate_up, 0, 6), rows(gate_up, 6, 6)];
        Mlp::new(Backend::Cpu, &parts, down).expect("an expert")
    };
    let apart =
        SparseExperts::new(Backend::Cpu, shape, weights.iter().map(split).collect()).expect("a layer");
    let (x, logits) = (numbers.tensor(&[4, 10]), numbers.tensor(&[4, 2]));
    let routes = routes(&shape, &logits);
    let whole = layer(Backend::Cpu, shape, &weights);
    same(
        &whole.forward(&x, &routes).expect("rows"),
        &apart.forward(&x, &routes).expect("rows"),
        "two matrices",
    );
    // Held in their own type: a tile of 32 by 10, and one of 32 by 6, an expert.
    assert_eq!(whole.bytes(), 2 * 2 * (32 * 10 + 32 * 6));
}

#[test]
fn no_rows_give_no_rows() {
    let mut numbers = Numbers(8);
    let shape = shape(4, 3, 2, 1);
    let weights = weights(&mut numbers, &shape, DType::F32);
    let none = |width| Tensor::zeros((0, width), DType::F32, &Device::Cpu).expect("none");
    let routes = routes(&shape, &none(2));
    assert_eq!(routes.rows(), 0);
    let y = layer(Backend::Cpu, shape, &weights)
        .forward(&none(4), &routes)
        .expect("none");
    assert_eq!(y.dims(), [0, 4]);
}

#[test]
fn c060_what_does_not_fit_is_refused_by_name() {
    let mut numbers = Numbers(9);
    let good = shape(4, 3, 2, 1);
    let weights = weights(&mut numbers, &good, DType::F32);
    let logits = numbers.tensor(&[5, 2]);
    for (top_k, experts) in [(3, 2), (0, 2), (1, 0)] {
        let found = route(Backend::Cpu, &shape(4, 3, experts, top_k), &logits).expect_err("a bad shape");
        assert!(
            found
                .to_string()
                .contains(&format!("top_k is {top_k} of {experts} experts")),
            "{found}"
        );
    }
    assert!(matches!(
        route(Backend::Cpu, &good, &numbers.tensor(&[5, 3])),
        Err(Error::Shape {
            operand: "logits",
            ..
        })
    ));
    assert!(matches!(
        route(Backend::Cpu, &good, &numbers.typed(&[5, 2], DType::F16)),
        Err(Error::DType {
            operand: "logits",
            ..
        })
    ));

    let expert =
        |i: usize| Mlp::new(Backend::Cpu, &[weights[i].0.clone()], &weights[i].1).expect("an expert");
    let found = SparseExperts::new(Backend::Cpu, good, vec![expert(0)]).expect_err("one of two");
    assert_eq!(found.to_string(), "experts: 1 experts were given, expected 2");
    let other = Mlp::new(Backend::Cpu, &[numbers.tensor(&[8, 4])], numbers.tensor(&[4, 4]));
    let given = vec![expert(0), other.expect("an expert")];
    let found = SparseExperts::new(Backend::Cpu, good, given).expect_err("one is wider");
    assert!(
        found.to_string().contains("expert 1 has gate and up of [8, 4]"),
        "{found}"
    );

    let layer = layer(Backend::Cpu, good, &weights);
    let x = numbers.tensor(&[4, 4]);
    let found = layer
        .forward(&x, &routes(&good, &logits))
        .expect_err("five routes");
    assert!(found.to_string().contains("the routes are of 5 rows"), "{found}");
    let routes = routes(&good, &rows(&logits, 0, 4));
    assert!(matches!(
        layer.forward(&numbers.tensor(&[4, 5]), &routes),
        Err(Error::Shape { operand: "x", .. })
    ));
    assert!(matches!(
        layer.forward(&x.t().expect("a view"), &routes),
        Err(Error::Strided { operand: "x", .. })
    ));
    assert!(matches!(
        add_gated(Backend::Cpu, &x, &x, &numbers.tensor(&[4])),
        Err(Error::Shape { operand: "gate", .. })
    ));
}
