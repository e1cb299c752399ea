//! Attention: the grouping law, what is seen, the oracle, and what is refused.

mod common;

use candle_core::{DType, Device, Tensor};
use common::{distance, in_pool, rows, same, values, Numbers};
use recant_core::{KvBlock, KvView};
use recant_kernels::{
    attention, attention_inputs, AttentionSegment, AttentionShape, Backend, Error, Rotary, RotaryTable,
};

fn shape(heads: usize, kv_heads: usize, head_dim: usize) -> AttentionShape {
    AttentionShape {
        heads,
        kv_heads,
        head_dim,
        rotary_dims: head_dim / 4 * 2,
        gated: true,
        eps: 1e-6,
    }
}

/// Keys and values of a whole sequence, and queries and gates for its positions.
struct Sequence {
    shape: AttentionShape,
    keys: Tensor,
    values: Tensor,
    q: Tensor,
    gate: Tensor,
}

impl Sequence {
    fn new(numbers: &mut Numbers, shape: AttentionShape, len: usize, dtype: DType) -> Self {
        let AttentionShape {
            heads,
            kv_heads,
            head_dim,
            ..
        } = shape;
        Self {
            shape,
            keys: numbers.typed(&[len, kv_heads, head_dim], dtype),
            values: numbers.typed(&[len, kv_heads, head_dim], dtype),
            q: (numbers.tensor(&[len, heads, head_dim]) * 4.0).expect("scaled"),
            gate: numbers.tensor(&[len, heads * head_dim]),
        }
    }

    /// Blocks that end at `cuts`, each in a tensor with two more rows of NaN.
    fn view(&self, cuts: &[usize], window: Option<usize>, sink: usize) -> KvView {
        let mut blocks = Vec::new();
        let mut start = 0;
        for &end in cuts {
            let cut = |x: &Tensor| {
                let (_, heads, width) = x.dims3().expect("three dimensions");
                let nan = Tensor::full(f32::NAN, (2, heads, width), &Device::Cpu).expect("filler");
                let nan = nan.to_dtype(x.dtype()).expect("a type");
                Tensor::cat(&[x.narrow(0, start, end - start).expect("rows"), nan], 0).expect("a block")
            };
            blocks.push(KvBlock {
                start,
                rows: end - start,
                keys: cut(&self.keys),
                values: cut(&self.values),
            });
            start = end;
        }
        KvView { blocks, window, sink }
    }

    fn attend(&self, backend: Backend, start: usize, count: usize, view: &KvView) -> Tensor {
        let segment = AttentionSegment {
            rows: count,
            position: start,
            view,
        };
        let (q, gate) = (rows(&self.q, start, count), rows(&self.gate, start, count));
        attention(backend, &self.shape, &q, Some(&gate), &[segment]).expect("attended")
    }

    /// Row by row, each with no more than it may see.
    fn alone(&self, len: usize, window: Option<usize>, sink: usize) -> Tensor {
        let each = (0..len).map(|p| self.attend(Backend::Cpu, p, 1, &self.view(&[p + 1], window, sink)));
        Tensor::cat(&each.collect::<Vec<_>>(), 0).expect("rows")
    }
}

const SIGHTS: [(Option<usize>, usize); 6] = [
    (None, 0),
    (Some(1), 0),
    (Some(5), 0),
    (Some(9), 3),
    (Some(20), 11),
    (Some(1000), 4),
];

#[test]
fn a_row_has_the_same_bits_alone_and_among_others_however_blocks_are_cut() {
    let mut numbers = Numbers(1);
    for (heads, kv_heads, head_dim) in [(1, 1, 8), (4, 1, 16), (6, 2, 20), (3, 3, 5), (14, 2, 64)] {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let sequence = Sequence::new(&mut numbers, shape(heads, kv_heads, head_dim), 75, dtype);
            for (window, sink) in SIGHTS {
                let alone = sequence.alone(75, window, sink);
                for cuts in [
                    &[75][..],
                    &[1, 2, 3, 40, 75],
                    &[16, 32, 48, 64, 75],
                    &[7, 41, 42, 75],
                ] {
                    let view = sequence.view(cuts, window, sink);
                    for (start, count) in [(0, 75), (0, 1), (11, 64), (70, 5), (33, 3), (59, 16), (74, 1)] {
                        let out = sequence.attend(Backend::Cpu, start, count, &view);
                        let what = format!("{heads}/{kv_heads} heads of {head_dim}, {dtype:?}, {count} from {start}, window {window:?}, sink {sink}, cuts {cuts:?}");
                        same(&out, &rows(&alone, start, count), &what);
                    }
                }
            }
        }
    }
}

#[test]
fn blocks_of_any_number_of_rows_up_to_64_have_the_bits_of_single_rows() {
    let mut numbers = Numbers(2);
    let sequence = Sequence::new(&mut numbers, shape(8, 2, 32), 100, DType::F32);
    let alone = sequence.alone(100, None, 0);
    let view = sequence.view(&[64, 100], None, 0);
    for count in 1..=64 {
        let out = sequence.attend(Backend::Cpu, 100 - count, count, &view);
        same(&out, &rows(&alone, 100 - count, count), &format!("{count} rows"));
    }
}

#[test]
fn what_no_row_sees_may_be_anything() {
    let mut numbers = Numbers(10);
    for head_dim in [16, 20] {
        let mut sequence = Sequence::new(&mut numbers, shape(6, 2, head_dim), 60, DType::F32);
        let (window, sink) = (Some(9), 3);
        let clean = sequence.attend(Backend::Cpu, 40, 5, &sequence.view(&[30, 60], window, sink));
        for array in [&mut sequence.keys, &mut sequence.values] {
            let nan = Tensor::full(f32::NAN, array.shape(), &Device::Cpu).expect("filler");
            let parts = [
                rows(array, 0, 3),
                rows(&nan, 3, 29),
                rows(array, 32, 13),
                rows(&nan, 45, 15),
            ];
            *array = Tensor::cat(&parts, 0).expect("rows");
        }
        let poisoned = sequence.attend(Backend::Cpu, 40, 5, &sequence.view(&[30, 60], window, sink));
        same(&clean, &poisoned, "rows that none sees");
        // 32 is seen by the first of these rows only, 44 by the last only.
        for array in [&mut sequence.keys, &mut sequence.values] {
            let nan = Tensor::full(f32::NAN, array.shape(), &Device::Cpu).expect("filler");
            let parts = [
                rows(array, 0, 32),
                rows(&nan, 32, 1),
                rows(array, 33, 11),
                rows(&nan, 44, 16),
            ];
            *array = Tensor::cat(&parts, 0).expect("rows");
        }
        let poisoned = sequence.attend(Backend::Cpu, 40, 5, &sequence.view(&[30, 60], window, sink));
        same(
            &rows(&clean, 1, 3),
            &rows(&poisoned, 1, 3),
            "rows that another sees",
        );
        assert!(values(&poisoned)[0].is_nan());
    }
}

/// C106: several new rows on a cache that is not empty.
#[test]
fn new_rows_see_the_cache_and_each_other() {
    let mut numbers = Numbers(3);
    let sequence = Sequence::new(&mut numbers, shape(4, 2, 16), 9, DType::F32);
    let out = sequence.attend(Backend::Cpu, 5, 4, &sequence.view(&[5, 9], None, 0));
    same(
        &out,
        &rows(&sequence.alone(9, None, 0), 5, 4),
        "five cached, four new",
    );
}

#[test]
fn a_long_sequence_and_several_threads_change_no_bit() {
    let mut numbers = Numbers(4);
    let sequence = Sequence::new(&mut numbers, shape(4, 2, 32), 700, DType::F32);
    for (window, sink) in [(None, 0), (Some(300), 4)] {
        let view = sequence.view(&[512, 700], window, sink);
        let one = in_pool(1, || sequence.attend(Backend::Cpu, 600, 100, &view));
        for threads in [2, 3] {
            same(
                &one,
                &in_pool(threads, || sequence.attend(Backend::Cpu, 600, 100, &view)),
                "threads",
            );
        }
        let last = sequence.attend(Backend::Cpu, 699, 1, &view);
        same(&rows(&one, 99, 1), &last, "the last row");
    }
}

/// Contexts of several spans of 256, cut in blocks that know nothing of spans.
#[test]
fn spans_are_cut_at_absolute_positions_whatever_the_blocks_and_the_rows() {
    let mut numbers = Numbers(11);
    let len = 1100;
    for (heads, kv_heads, head_dim, dtype) in [
        (4, 2, 16, DType::F32),
        (3, 1, 20, DType::BF16),
        (2, 2, 32, DType::F16),
    ] {
        let sequence = Sequence::new(&mut numbers, shape(heads, kv_heads, head_dim), len, dtype);
        for (window, sink) in [
            (None, 0),
            (Some(300), 0),
            (Some(257), 5),
            (Some(500), 300),
            (Some(40), 260),
        ] {
            let whole = sequence.view(&[len], window, sink);
            let starts = [0, 1, 254, 255, 256, 257, 300, 511, 512, 599, 767, 768, 1024, 1099];
            let alone = starts.map(|start| {
                let view = sequence.view(&[start + 1], window, sink);
                in_pool(1, || sequence.attend(Backend::Cpu, start, 1, &view))
            });
            for cuts in [
                &[len][..],
                &[256, 512, 768, 1024, len],
                &[100, 301, 555, 1000, len],
                &[1, 700, len],
            ] {
                let view = sequence.view(cuts, window, sink);
                for (start, alone) in starts.into_iter().zip(&alone) {
                    for count in [1, 2, 16, 150] {
                        let count = count.min(len - start);
                        let out = sequence.attend(Backend::Cpu, start, count, &view);
                        let what = format!("{dtype:?}, {count} rows from {start}, window {window:?}, sink {sink}, cuts {cuts:?}");
                        same(&rows(&out, 0, 1), alone, &what);
                    }
                }
            }
            let (start, count) = (800, 300);
            let own = sequence.attend(Backend::Cpu, start, count, &whole);
            let clean = KvView {
                blocks: vec![KvBlock {
                    keys: rows(&whole.blocks[0].keys, 0, len),
                    values: rows(&whole.blocks[0].values, 0, len),
                    ..whole.blocks[0].clone()
                }],
                ..whole
            };
            let far = distance(&own, &sequence.attend(Backend::Composed, start, count, &clean));
            // Seen: 7e-7.
            assert!(far < 3e-6, "{far}");
        }
    }
}

/// The shape of Qwen3.5-0.8B: sixteen rows' partials of a context this long take two waves on two threads.
#[test]
fn work_that_is_split_by_spans_and_waves_has_the_bits_of_work_that_is_not() {
    let mut numbers = Numbers(12);
    let len = 17 * 256 + 9;
    let sequence = Sequence::new(&mut numbers, shape(8, 2, 256), len, DType::BF16);
    let view = sequence.view(&[len], None, 0);
    // So many rows that each of the two threads has enough without splitting.
    let whole = in_pool(2, || sequence.attend(Backend::Cpu, len - 64, 64, &view));
    let whole = rows(&whole, 48, 16);
    for threads in [1, 2, 3, 9] {
        let split = in_pool(threads, || sequence.attend(Backend::Cpu, len - 16, 16, &view));
        same(&whole, &split, &format!("{threads} threads"));
        let last = in_pool(threads, || sequence.attend(Backend::Cpu, len - 1, 1, &view));
        same(
            &rows(&whole, 15, 1),
            &last,
            &format!("one row, {threads} threads"),
        );
    }
}

/// Keys whose scores are infinite or no number, in one of two spans: what other spans hold does not hide them.
#[test]
fn scores_that_are_no_numbers_count_in_whichever_span_they_are() {
    let shape = AttentionShape {
        gated: false,
        ..shape(1, 1, 8)
    };
    let len = 600;
    let q = Tensor::ones((1, 1, 8), DType::F32, &Device::Cpu).expect("a query");
    let attend = |at: usize, key: f32, value: f32| -> [f32; 3] {
        let (mut keys, mut vs) = (vec![0.0_f32; len * 8], vec![2.0_f32; len * 8]);
        keys[at * 8..][..8].fill(key);
        vs[at * 8..][..8].fill(value);
        let [keys, vs] = [keys, vs].map(|x| Tensor::from_vec(x, (len, 1, 8), &Device::Cpu).expect("rows"));
        let view = KvView {
            blocks: vec![KvBlock {
                start: 0,
                rows: len,
                keys,
                values: vs,
            }],
            window: None,
            sink: 0,
        };
        let backends = [(Backend::Cpu, 1), (Backend::Cpu, 2), (Backend::Composed, 1)];
        backends.map(|(backend, threads)| {
            let segment = [AttentionSegment {
                rows: 1,
                position: len - 1,
                view: &view,
            }];
            let out = in_pool(threads, || attention(backend, &shape, &q, None, &segment));
            values(&out.expect("attended"))[0]
        })
    };
    let near =
        |found: [f32; 3], expected: f32| found[..2] == [expected; 2] && (found[2] - expected).abs() < 1e-4;
    for at in [3, 255, 256, 590] {
        let found = attend(at, f32::NEG_INFINITY, 7.0);
        assert!(near(found, 2.0), "minus infinity at {at}: {found:?}");
        let found = attend(at, 100.0, 5.0);
        assert!(near(found, 5.0), "the greatest by far at {at}: {found:?}");
        for (key, value) in [
            (f32::INFINITY, 2.0),
            (f32::NAN, 2.0),
            (f32::NEG_INFINITY, f32::NAN),
            (0.0, f32::NAN),
        ] {
            let found = attend(at, key, value);
            assert!(
                found.iter().all(|x| x.is_nan()),
                "key {key}, value {value} at {at}: {found:?}"
            );
        }
    }
}

/// A span in which every score is minus infinity weighs nothing beside others.
#[test]
fn a_span_of_scores_that_are_all_minus_infinity_weighs_nothing() {
    let shape = AttentionShape {
        gated: false,
        ..shape(1, 1, 8)
    };
    let q = Tensor::ones((1, 1, 8), DType::F32, &Device::Cpu).expect("a query");
    for lost in [0..256, 256..512, 512..600, 0..600] {
        let mut keys = vec![0.0_f32; 600 * 8];
        let mut vs = vec![2.0_f32; 600 * 8];
        keys[8 * lost.start..8 * lost.end].fill(f32::NEG_INFINITY);
        vs[8 * lost.start..8 * lost.end].fill(9.0);
        let [keys, vs] = [keys, vs].map(|x| Tensor::from_vec(x, (600, 1, 8), &Device::Cpu).expect("rows"));
        let view = KvView {
            blocks: vec![KvBlock {
                start: 0,
                rows: 600,
                keys,
                values: vs,
            }],
            window: None,
            sink: 0,
        };
        let segment = [AttentionSegment {
            rows: 1,
            position: 599,
            view: &view,
        }];
        let out = attention(Backend::Cpu, &shape, &q, None, &segment).expect("attended");
        let found = values(&out)[0];
        if lost.len() == 600 {
            assert!(found.is_nan(), "{found}");
        } else {
            assert_eq!(found, 2.0, "{lost:?}");
        }
    }
}

#[test]
fn positions_near_the_greatest_number_are_read_like_others() {
    let mut numbers = Numbers(13);
    let sequence = Sequence::new(&mut numbers, shape(2, 1, 8), 20, DType::F32);
    let near = |last: usize| {
        let mut view = sequence.view(&[20], Some(20), 0);
        view.blocks[0].start = last - 19;
        let segment = [AttentionSegment {
            rows: 1,
            position: last,
            view: &view,
        }];
        let (q, gate) = (rows(&sequence.q, 19, 1), rows(&sequence.gate, 19, 1));
        attention(Backend::Cpu, &sequence.shape, &q, Some(&gate), &segment).expect("attended")
    };
    // The same place in a span, the first and the last one.
    same(&near(254), &near(usize::MAX - 1), "the end of the last span");
}

#[test]
fn segments_in_one_call_have_the_bits_that_they_have_alone() {
    let mut numbers = Numbers(5);
    let shape = shape(6, 2, 24);
    let sequences: Vec<_> = (0..3)
        .map(|_| Sequence::new(&mut numbers, shape, 60, DType::F32))
        .collect();
    let parts = [(0, 17, 20), (1, 0, 60), (2, 59, 1)];
    let views: Vec<_> = parts
        .iter()
        .map(|&(i, _, _)| sequences[i].view(&[31, 60], None, 0))
        .collect();
    let take = |x: fn(&Sequence) -> &Tensor| {
        let each = parts
            .iter()
            .map(|&(i, start, count)| rows(x(&sequences[i]), start, count));
        Tensor::cat(&each.collect::<Vec<_>>(), 0).expect("rows")
    };
    let segments: Vec<_> = parts
        .iter()
        .zip(&views)
        .map(|(&(_, position, rows), view)| AttentionSegment { rows, position, view })
        .collect();
    let (q, gate) = (take(|s| &s.q), take(|s| &s.gate));
    let together = attention(Backend::Cpu, &shape, &q, Some(&gate), &segments).expect("attended");
    let mut row = 0;
    for (&(i, start, count), view) in parts.iter().zip(&views) {
        let alone = sequences[i].attend(Backend::Cpu, start, count, view);
        same(&rows(&together, row, count), &alone, &format!("segment {i}"));
        row += count;
    }
}

#[test]
fn agrees_with_candle() {
    let mut numbers = Numbers(6);
    let mut most = 0.0_f32;
    for (heads, kv_heads, head_dim) in [(4, 1, 16), (6, 2, 20), (8, 2, 64)] {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let sequence = Sequence::new(&mut numbers, shape(heads, kv_heads, head_dim), 90, dtype);
            for (window, sink) in SIGHTS {
                let view = sequence.view(&[33, 90], window, sink);
                let own = sequence.attend(Backend::Cpu, 40, 50, &view);
                let clean = KvView {
                    blocks: view
                        .blocks
                        .iter()
                        .map(|block| KvBlock {
                            keys: rows(&block.keys, 0, block.rows),
                            values: rows(&block.values, 0, block.rows),
                            ..block.clone()
                        })
                        .collect(),
                    ..view
                };
                most = most.max(distance(
                    &own,
                    &sequence.attend(Backend::Composed, 40, 50, &clean),
                ));
            }
        }
    }
    // Seen: 4e-7.
    assert!(most < 3e-6, "{most}");
}

fn inputs(
    backend: Backend,
    shape: &AttentionShape,
    x: &Tensor,
    norm: &Tensor,
    table: &RotaryTable,
) -> Vec<Tensor> {
    let inputs = attention_inputs(backend, shape, x, norm, norm, table).expect("inputs");
    let mut all = vec![inputs.q, inputs.k, inputs.v];
    all.extend(inputs.gate);
    all
}

#[test]
fn inputs_of_a_row_do_not_depend_on_others_and_agree_with_candle() {
    let mut numbers = Numbers(7);
    let mut most = 0.0_f32;
    for (heads, kv_heads, head_dim, rotary_dims, gated) in [
        (4, 2, 32, 16, true),
        (3, 1, 20, 6, true),
        (2, 2, 9, 0, false),
        (2, 1, 24, 24, false),
    ] {
        let shape = AttentionShape {
            rotary_dims,
            gated,
            ..shape(heads, kv_heads, head_dim)
        };
        let width = heads * head_dim * if gated { 2 } else { 1 } + 2 * kv_heads * head_dim;
        let x = numbers.tensor(&[40, width]);
        let norm = numbers.tensor(&[head_dim]);
        let table = |range: std::ops::Range<usize>| match rotary_dims {
            0 => {
                let none = Tensor::zeros((range.len(), 0), DType::F32, &Device::Cpu).expect("none");
                RotaryTable {
                    cos: none.clone(),
                    sin: none,
                }
            }
            dims => {
                let rotary = Rotary::new(1e4, dims).expect("a rotary");
                rotary
                    .table(&range.map(|row| row + 100).collect::<Vec<_>>(), &Device::Cpu)
                    .expect("a table")
            }
        };
        let all = in_pool(2, || inputs(Backend::Cpu, &shape, &x, &norm, &table(0..40)));
        for row in 0..40 {
            let one = inputs(
                Backend::Cpu,
                &shape,
                &rows(&x, row, 1),
                &norm,
                &table(row..row + 1),
            );
            for (all, one) in all.iter().zip(&one) {
                same(&rows(all, row, 1), one, &format!("row {row}"));
            }
        }
        let composed = inputs(Backend::Composed, &shape, &x, &norm, &table(0..40));
        for (own, composed) in all.iter().zip(&composed) {
            most = most.max(distance(own, composed));
        }
    }
    // Seen: 3e-7.
    assert!(most < 3e-6, "{most}");
}

/// C065: the projection of queries holds, for each head, its query and then its gate.
#[test]
fn the_gate_follows_the_query_of_its_head() {
    let shape = AttentionShape {
        rotary_dims: 0,
        ..shape(2, 1, 2)
    };
    let x = Tensor::new(
        &[[
            1.0_f32, 1.0, 10.0, 11.0, -1.0, 1.0, 12.0, 13.0, 1.0, 1.0, 7.0, 8.0,
        ]],
        &Device::Cpu,
    );
    let one = Tensor::ones(2, DType::F32, &Device::Cpu).expect("ones");
    let none = Tensor::zeros((1, 0), DType::F32, &Device::Cpu).expect("none");
    let table = RotaryTable {
        cos: none.clone(),
        sin: none,
    };
    for backend in [Backend::Cpu, Backend::Composed] {
        let all = inputs(backend, &shape, x.as_ref().expect("a row"), &one, &table);
        assert_eq!(values(&all[3]), [10.0, 11.0, 12.0, 13.0]);
        assert_eq!(values(&all[2]), [7.0, 8.0]);
        let q: Vec<f32> = values(&all[0]).iter().map(|x| x.signum()).collect();
        assert_eq!(q, [1.0, 1.0, -1.0, 1.0]);
    }
}

/// C059: dimension i turns with i + half, not with its neighbour.
#[test]
fn rotation_pairs_the_halves() {
    let shape = AttentionShape {
        rotary_dims: 4,
        gated: false,
        eps: 0.0,
        ..shape(1, 1, 6)
    };
    let x = Tensor::new(
        &[[
            1.0_f32, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0,
        ]],
        &Device::Cpu,
    );
    let norm = Tensor::full((1.0 / 6.0_f32).sqrt(), 6, &Device::Cpu).expect("a norm");
    let table = Rotary::new(1e4, 4)
        .expect("a rotary")
        .table(&[5], &Device::Cpu)
        .expect("a table");
    for backend in [Backend::Cpu, Backend::Composed] {
        let q = values(&inputs(backend, &shape, x.as_ref().expect("a row"), &norm, &table)[0]);
        for (found, expected) in q.iter().zip([5.0_f32.cos(), 0.0, 5.0_f32.sin(), 0.0, 0.0, 0.0]) {
            assert!((found - expected).abs() < 1e-6, "{q:?}");
        }
    }
}

#[test]
fn a_position_that_no_block_holds_is_named() {
    let mut numbers = Numbers(8);
    let sequence = Sequence::new(&mut numbers, shape(2, 1, 8), 20, DType::F32);
    let refuse = |view: &KvView, position: usize, count: usize| {
        let (q, gate) = (rows(&sequence.q, 0, count), rows(&sequence.gate, 0, count));
        let segment = AttentionSegment {
            rows: count,
            position,
            view,
        };
        attention(Backend::Cpu, &sequence.shape, &q, Some(&gate), &[segment])
            .expect_err("a hole")
            .to_string()
    };
    let whole = sequence.view(&[8, 12, 20], None, 0);
    let text = refuse(&whole, 18, 3);
    assert_eq!(
        text,
        "attention: the query at position 20 of segment 0 sees position 20, which no block holds"
    );
    let mut holed = whole.clone();
    holed.blocks.remove(1);
    assert!(refuse(&holed, 15, 1).contains("sees position 8,"));
    // A window that starts after the hole does not see it; a sink that reaches into it does.
    holed.window = Some(4);
    let segment = [AttentionSegment {
        rows: 1,
        position: 15,
        view: &holed,
    }];
    let (q, gate) = (rows(&sequence.q, 0, 1), rows(&sequence.gate, 0, 1));
    attention(Backend::Cpu, &sequence.shape, &q, Some(&gate), &segment).expect("no hole in sight");
    holed.sink = 9;
    assert!(refuse(&holed, 15, 1).contains("sees position 8,"));
    let mut unordered = whole.clone();
    unordered.blocks.swap(0, 1);
    assert!(refuse(&unordered, 15, 1).contains("ascending order"));
    assert!(refuse(
        &KvView {
            window: Some(0),
            ..whole
        },
        15,
        1
    )
    .contains("window is 0"));
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let mut numbers = Numbers(9);
    let sequence = Sequence::new(&mut numbers, shape(4, 2, 8), 6, DType::F32);
    let view = sequence.view(&[6], None, 0);
    let segment = [AttentionSegment {
        rows: 6,
        position: 0,
        view: &view,
    }];
    let attend = |shape: &AttentionShape, q: &Tensor, gate: Option<&Tensor>| {
        attention(Backend::Cpu, shape, q, gate, &segment).expect_err("no fit")
    };
    let (good, q, gate) = (sequence.shape, &sequence.q, &sequence.gate);
    assert!(matches!(
        attend(&AttentionShape { kv_heads: 3, ..good }, q, Some(gate)),
        Error::Value { .. }
    ));
    assert!(matches!(
        attend(
            &AttentionShape {
                rotary_dims: 10,
                ..good
            },
            q,
            Some(gate)
        ),
        Error::Value { .. }
    ));
    assert!(matches!(attend(&good, q, None), Error::Value { .. }));
    assert!(matches!(
        attend(&AttentionShape { gated: false, ..good }, q, Some(gate)),
        Error::Value { .. }
    ));
    assert!(matches!(
        attend(&good, &rows(q, 0, 5), Some(gate)),
        Error::Shape { operand: "q", .. }
    ));
    assert!(matches!(
        attend(&good, q, Some(&rows(gate, 0, 5))),
        Error::Shape { operand: "gate", .. }
    ));
    let half = q.to_dtype(DType::F16).expect("a type");
    assert!(matches!(
        attend(&good, &half, Some(gate)),
        Error::DType { operand: "q", .. }
    ));
    let view = numbers.tensor(&[4, 6, 8]).transpose(0, 1).expect("a view");
    assert!(matches!(
        attend(&good, &view, Some(gate)),
        Error::Strided { operand: "q", .. }
    ));
    assert!(matches!(
        attend(&AttentionShape { heads: 2, ..good }, q, Some(gate)),
        Error::Shape { operand: "q", .. }
    ));
    let mut short = sequence.view(&[6], None, 0);
    short.blocks[0].rows = 9;
    let segment = [AttentionSegment {
        rows: 6,
        position: 0,
        view: &short,
    }];
    let found = attention(Backend::Cpu, &good, q, Some(gate), &segment).expect_err("a short block");
    assert_eq!(
        found.to_string(),
        "attention: `keys` has shape [8, 2, 8], expected [at least 9, 2, 8]"
    );
}
