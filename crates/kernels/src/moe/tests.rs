//! The portable instruction set against the best one.

use candle_core::{DType, Tensor};

use crate::common::{in_pool, same, Numbers};
use crate::simd::{forced, Isa};
use crate::{add_gated, route, Backend, Mlp, MoeShape, SparseExperts};

#[test]
fn a_mixture_has_the_portable_bits() {
    for (hidden_size, width, experts, top_k) in
        [(1, 1, 1, 1), (19, 7, 5, 2), (40, 33, 21, 21), (64, 24, 8, 3)]
    {
        let mut numbers = Numbers(experts as u64);
        let shape = MoeShape {
            hidden_size,
            width,
            experts,
            top_k,
            renormalize: true,
        };
        let expert = |_| {
            let parts = [numbers.typed(&[2 * width, hidden_size], DType::BF16)];
            let down = numbers.typed(&[hidden_size, width], DType::BF16);
            Mlp::new(Backend::Cpu, &parts, &down).expect("an expert")
        };
        let layer = (0..experts).map(expert).collect();
        let layer = SparseExperts::new(Backend::Cpu, shape, layer).expect("a layer");
        let x = numbers.tensor(&[9, hidden_size]);
        let logits = numbers.tensor(&[9, experts]);
        let gate = numbers.tensor(&[9, 1]);
        let run = || -> [Tensor; 3] {
            let routes = route(Backend::Cpu, &shape, &logits).expect("routes");
            let weights = Tensor::new(routes.weights.as_slice(), x.device()).expect("weights");
            let y = layer.forward(&x, &routes).expect("rows");
            let sum = add_gated(Backend::Cpu, &y, &x, &gate).expect("a sum");
            [weights, y, sum]
        };
        // On one thread, since what is forced is forced on the thread that asks.
        let portable = in_pool(1, || forced::with(Isa::Portable, run));
        for (best, portable) in run().iter().zip(&portable) {
            same(best, portable, &format!("{shape:?}"));
        }
    }
}
