//! Matrices rounded to FP8 and NVFP4 as releases of the Hub store them, and their numbers.

use recant::candle::{DType, Device, Tensor};
use recant_weights::{Coding, Stored};

use crate::common::checkpoint::Tensors;
use crate::common::small_floats::{e4m3, E2M1};
use crate::common::Result;

/// How a matrix is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// FP8, with a scale for so many rows and columns, as `weight_scale_inv`.
    Blocks([usize; 2]),
    /// FP8, with a scale a row.
    Rows,
    /// FP8, with one scale, and one of activations beside it.
    One,
    /// NVFP4 of ModelOpt.
    ModelOpt,
    /// NVFP4 of compressed-tensors.
    Packed,
}

/// Which of `count` ascending numbers is nearest to a magnitude.
fn nearest(x: f32, count: u8, number: impl Fn(u8) -> f32) -> u8 {
    let x = x.abs();
    let (mut below, mut above) = (0, count - 1);
    while below + 1 < above {
        let middle = below + (above - below) / 2;
        match number(middle) > x {
            true => above = middle,
            false => below = middle,
        }
    }
    match x - number(below) <= number(above) - x {
        true => below,
        false => above,
    }
}

fn to_e4m3(x: f32) -> u8 {
    nearest(x, 0x7f, e4m3) | (u8::from(x < 0.0) << 7)
}

pub(crate) fn floats(tensor: &Tensor) -> Result<Vec<f32>> {
    Ok(tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
}

pub(crate) fn bytes(codes: &[u8], dtype: DType, shape: &[usize]) -> Result<Tensor> {
    Ok(Tensor::from_raw_buffer(codes, dtype, shape, &Device::Cpu)?)
}

fn numbers(values: Vec<f32>, shape: &[usize], dtype: DType) -> Result<Tensor> {
    Ok(Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)?)
}

/// The largest magnitude, and no zero.
fn largest<'x>(of: impl Iterator<Item = &'x f32>) -> f32 {
    of.fold(1e-12, |most, x| most.max(x.abs()))
}

/// A matrix rounded: its parts by what follows the dot after its module's name, and its numbers in f32.
pub(crate) fn rounded(form: Form, matrix: &Tensor) -> Result<(Tensors, Tensor)> {
    let (rows, columns) = matrix.dims2()?;
    let weights = floats(matrix)?;
    let (parts, found) = match form {
        Form::Blocks(block) => fp8(&weights, [rows, columns], block, "weight_scale_inv", DType::BF16)?,
        Form::Rows => fp8(
            &weights,
            [rows, columns],
            [1, columns],
            "weight_scale",
            DType::BF16,
        )?,
        Form::One => {
            let (mut parts, found) = fp8(
                &weights,
                [rows, columns],
                [rows, columns],
                "weight_scale",
                DType::F32,
            )?;
            let scale = parts["weight_scale"].reshape(())?;
            parts.insert("weight_scale".to_owned(), scale);
            parts.insert("input_scale".to_owned(), Tensor::new(0.25_f32, &Device::Cpu)?);
            (parts, found)
        }
        Form::ModelOpt | Form::Packed => nvfp4(&weights, [rows, columns], form)?,
    };
    Ok((parts, Tensor::from_vec(found, (rows, columns), &Device::Cpu)?))
}

fn fp8(
    weights: &[f32],
    [rows, columns]: [usize; 2],
    [height, width]: [usize; 2],
    name: &str,
    dtype: DType,
) -> Result<(Tensors, Vec<f32>)> {
    let across = columns.div_ceil(width);
    let count = rows.div_ceil(height) * across;
    let of = |i: usize| i / columns / height * across + i % columns / width;
    let mut most = vec![0.0_f32; count];
    for (i, x) in weights.iter().enumerate() {
        most[of(i)] = most[of(i)].max(x.abs());
    }
    let scales = most.iter().map(|most| most.max(1e-12) / 448.0).collect();
    let scales = numbers(scales, &[count / across, across], dtype)?;
    let wide = floats(&scales)?;
    let codes: Vec<u8> = weights
        .iter()
        .enumerate()
        .map(|(i, x)| to_e4m3(x / wide[of(i)]))
        .collect();
    let found = codes
        .iter()
        .enumerate()
        .map(|(i, q)| e4m3(*q) * wide[of(i)])
        .collect();
    let parts = [
        (
            "weight".to_owned(),
            bytes(&codes, DType::F8E4M3, &[rows, columns])?,
        ),
        (name.to_owned(), scales),
    ];
    Ok((Tensors::from(parts), found))
}

fn nvfp4(weights: &[f32], [rows, columns]: [usize; 2], form: Form) -> Result<(Tensors, Vec<f32>)> {
    let factor = largest(weights.iter()) / (448.0 * 6.0);
    let (factor, scale): (f32, fn(u8, f32) -> f32) = match form {
        Form::Packed => (1.0 / factor, |q, divisor| e4m3(q) / divisor),
        _ => (factor, |q, factor| e4m3(q) * factor),
    };
    let scales: Vec<u8> = weights
        .chunks_exact(16)
        .map(|group| to_e4m3(largest(group.iter()) / 6.0 / scale(0x38, factor)).max(1))
        .collect();
    let of = |i: usize| scale(scales[i / 16], factor);
    let codes: Vec<u8> = weights
        .iter()
        .enumerate()
        .map(|(i, x)| nearest(x / of(i), 8, |q| E2M1[usize::from(q)]) | (u8::from(*x < 0.0) << 3))
        .collect();
    let number = |q: &u8| E2M1[usize::from(q & 7)] * if *q > 7 { -1.0 } else { 1.0 };
    let found = codes.iter().enumerate().map(|(i, q)| number(q) * of(i)).collect();
    let packed: Vec<u8> = codes.chunks_exact(2).map(|pair| pair[0] | pair[1] << 4).collect();
    let packed = bytes(&packed, DType::U8, &[rows, columns / 2])?;
    let scales = bytes(&scales, DType::F8E4M3, &[rows, columns / 16])?;
    let parts = match form {
        Form::Packed => vec![
            ("weight_packed", packed),
            ("weight_scale", scales),
            ("weight_global_scale", Tensor::new(&[factor], &Device::Cpu)?),
            ("input_global_scale", Tensor::new(&[3.5_f32], &Device::Cpu)?),
        ],
        _ => vec![
            ("weight", packed),
            ("weight_scale", scales),
            ("weight_scale_2", Tensor::new(factor, &Device::Cpu)?),
            ("input_scale", Tensor::new(0.5_f32, &Device::Cpu)?),
        ],
    };
    Ok((
        parts
            .into_iter()
            .map(|(name, part)| (name.to_owned(), part))
            .collect(),
        found,
    ))
}

/// The numbers of a matrix that was taken, in f32: a scale times what its codes stand for, rounded once.
pub(crate) fn wide(stored: &Stored) -> Result<Vec<f32>> {
    let groups = match stored {
        Stored::Float(tensor) => return floats(tensor),
        Stored::Groups(groups) => groups,
        other => return Err(format!("{other:?}").into()),
    };
    let codes = groups.quants.flatten_all()?.to_vec1::<u8>()?;
    let numbers: Vec<f32> = match groups.coding {
        Coding::E4m3 => codes.into_iter().map(e4m3).collect(),
        Coding::Table(table) => codes
            .iter()
            .flat_map(|pair| [pair & 15, pair >> 4])
            .map(|q| f32::from(table[usize::from(q)]))
            .collect(),
        other => return Err(format!("{other:?}").into()),
    };
    let scales = floats(&groups.scales)?;
    Ok(numbers
        .iter()
        .enumerate()
        .map(|(i, x)| scales[i / groups.group] * x)
        .collect())
}
