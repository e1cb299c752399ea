//! Random matrices as MLX packs them, and their numbers.

use recant::candle::{DType, Device, Tensor};

use crate::common::checkpoint::Tensors;
use crate::common::small_floats::{e4m3, E2M1};
use crate::common::{Result, Rng};

pub(crate) fn floats(tensor: &Tensor) -> Result<Vec<f32>> {
    Ok(tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
}

/// Ways to pack a matrix: mode, bits, group.
pub(crate) const PACKINGS: [(&str, usize, usize); 11] = [
    ("affine", 4, 64),
    ("mxfp4", 4, 32),
    ("affine", 8, 32),
    ("nvfp4", 4, 16),
    ("affine", 2, 64),
    ("mxfp8", 8, 32),
    ("affine", 3, 32),
    ("affine", 5, 32),
    ("affine", 6, 64),
    ("affine", 8, 64),
    ("global", 4, 16),
];

/// A random matrix, or a stack of them, as MLX packs it, by the ends of names; and its numbers in f32.
pub(crate) fn packed(
    shape: &[usize],
    packing: (&str, usize, usize),
    rng: &mut Rng,
) -> Result<(Tensors, Tensor)> {
    let (mode, bits, group) = packing;
    let (count, features) = (shape.iter().product::<usize>(), shape[shape.len() - 1]);
    let last = |n: usize| [&shape[..shape.len() - 1], &[n]].concat();
    let numbers: Vec<u8> = (0..count)
        .map(|_| match mode {
            // Not the numbers that are none, and no large ones.
            "mxfp8" => (rng.below(256) & 0xbf) as u8,
            _ => rng.below(1 << bits) as u8,
        })
        .collect();
    let mut words = vec![0_u32; count * bits / 32];
    for (i, q) in numbers.iter().enumerate() {
        let (word, shift) = (i * bits / 32, i * bits % 32);
        let both = u64::from(*q) << shift;
        words[word] |= both as u32;
        if shift + bits > 32 {
            words[word + 1] |= (both >> 32) as u32;
        }
    }
    let mut parts = Tensors::new();
    let words = Tensor::from_vec(words, last(features * bits / 32), &Device::Cpu)?;
    parts.insert("weight".to_owned(), words);
    let groups = count / group;
    let of_scale = |per_group: Vec<f32>, number: &dyn Fn(u8, f32) -> f32| -> Result<Tensor> {
        let values = numbers.iter().enumerate();
        let values = values.map(|(i, q)| number(*q, per_group[i / group])).collect();
        Ok(Tensor::from_vec(values, shape, &Device::Cpu)?)
    };
    if mode == "affine" {
        let most = (3.0 / features as f32).sqrt();
        let step = |i: usize| 2.0 * most / (1 << bits) as f32 * (0.75 + (i % 5) as f32 / 16.0);
        let scales: Vec<f32> = (0..groups).map(step).collect();
        let scales = Tensor::from_vec(scales, last(features / group), &Device::Cpu)?.to_dtype(DType::BF16)?;
        let middle = f64::from(1_u32 << (bits - 1));
        let biases = (scales.to_dtype(DType::F32)? * -middle)?.to_dtype(DType::BF16)?;
        let numbers = of_scale(floats(&scales)?, &|q, s| s * (f32::from(q) - middle as f32))?;
        parts.insert("scales".to_owned(), scales);
        parts.insert("biases".to_owned(), biases);
        return Ok((parts, numbers));
    }
    let bytes: Vec<u8> = (0..groups)
        .map(|i| match mode {
            "mxfp4" => 121 + (i % 2) as u8,
            "mxfp8" => 124 + (i % 2) as u8,
            _ => 0x10 + (i % 8) as u8,
        })
        .collect();
    let mut scales: Vec<f32> = bytes
        .iter()
        .map(|s| match mode {
            "mxfp4" | "mxfp8" => 2.0_f32.powi(i32::from(*s) - 127),
            _ => e4m3(*s),
        })
        .collect();
    if mode == "global" {
        let matrices = shape[..shape.len() - 2].iter().product::<usize>();
        let global: Vec<f32> = (0..matrices).map(|e| 2000.0 + 150.0 * e as f32).collect();
        for (i, s) in scales.iter_mut().enumerate() {
            *s *= global[i / (groups / matrices)] / 2688.0;
        }
        let at = &shape[..shape.len() - 2];
        parts.insert(
            "global_scale".to_owned(),
            Tensor::from_vec(global, at, &Device::Cpu)?,
        );
    }
    let numbers = of_scale(scales, &|q, s| match mode {
        "mxfp8" => s * e4m3(q),
        _ => s * E2M1[usize::from(q)],
    })?;
    let bytes = Tensor::from_vec(bytes, last(features / group), &Device::Cpu)?;
    parts.insert("scales".to_owned(), bytes);
    Ok((parts, numbers))
}
