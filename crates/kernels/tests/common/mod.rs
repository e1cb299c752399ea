//! Numbers for tests, and comparisons of bits.
#![allow(dead_code, unreachable_pub)]

use candle_core::{DType, Device, Tensor};

/// A small generator: the same numbers on every machine.
pub struct Numbers(pub u64);

impl Numbers {
    /// Uniform in -1..1.
    pub fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        (z >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
    }

    pub fn tensor(&mut self, shape: &[usize]) -> Tensor {
        let count = shape.iter().product();
        let values: Vec<f32> = (0..count).map(|_| self.next()).collect();
        Tensor::from_vec(values, shape, &Device::Cpu).expect("a tensor")
    }

    pub fn typed(&mut self, shape: &[usize], dtype: DType) -> Tensor {
        self.tensor(shape).to_dtype(dtype).expect("a type")
    }
}

pub fn values(x: &Tensor) -> Vec<f32> {
    let x = x.to_dtype(DType::F32).expect("a float");
    x.flatten_all().expect("flat").to_vec1().expect("values")
}

/// Panics where two tensors differ in any bit.
#[track_caller]
pub fn same(a: &Tensor, b: &Tensor, what: &str) {
    assert_eq!(a.dims(), b.dims(), "{what}: shapes");
    for (i, (x, y)) in values(a).iter().zip(values(b)).enumerate() {
        assert!(
            x.to_bits() == y.to_bits(),
            "{what}: element {i} of {:?}: {x:?} ({:#010x}) against {y:?} ({:#010x})",
            a.dims(),
            x.to_bits(),
            y.to_bits()
        );
    }
}

/// Largest difference, with the values' own size as the unit where it is above 1.
#[track_caller]
pub fn distance(a: &Tensor, b: &Tensor) -> f32 {
    assert_eq!(a.dims(), b.dims());
    let pairs = values(a).into_iter().zip(values(b));
    pairs
        .map(|(x, y)| (x - y).abs() / y.abs().max(1.0))
        .fold(0.0, |most, x| {
            assert!(!x.is_nan(), "not a number");
            f32::max(most, x)
        })
}

pub fn rows(x: &Tensor, start: usize, count: usize) -> Tensor {
    x.narrow(0, start, count).expect("rows").copy().expect("a copy")
}

/// Runs `f` in a pool of so many threads.
pub fn in_pool<T: Send>(threads: usize, f: impl FnOnce() -> T + Send) -> T {
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build()
        .expect("a pool");
    pool.install(f)
}
