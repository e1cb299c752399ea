//! Attention caches: the laws of `Cache`, with what each query sees as the output.

use candle_core::{Device, Tensor};
use recant_core::{AttentionCache, AttentionLayout, Cache, KvView, Window};

use super::lab::{rows_of, Bits, Lab, Subject, Trouble};
use super::{laws, Options};
use crate::rng::mix;
use crate::Failure;

pub(super) fn check(make: &dyn Fn() -> Box<dyn AttentionCache>, options: &Options) -> Result<(), Failure> {
    let layout = make().layout().clone();
    let window = options.window;
    let subject = || -> Box<dyn Subject + '_> {
        Box::new(Attention {
            cache: make(),
            window,
        })
    };
    let known = |history: &[u32]| -> Vec<Bits> {
        let rows: Vec<u64> = history
            .iter()
            .enumerate()
            .map(|(position, token)| {
                let of = |side| row(&layout, position, *token, side);
                fingerprint(position, &bits(&of(Side::Key)), &bits(&of(Side::Value)))
            })
            .collect();
        let visible = |query| (0..=query).filter(move |key| sees(window, query, *key));
        (0..rows.len())
            .map(|query| visible(query).map(|key| rows[key]).collect())
            .collect()
    };
    let lab = Lab::new(&subject, options.exact.then_some(&known));
    laws::check(&lab, options)?;
    appends(&lab, make, &layout)
}

/// Wrong rows are refused, and rows are copied in.
fn appends(
    lab: &Lab<'_>,
    make: &dyn Fn() -> Box<dyn AttentionCache>,
    layout: &AttentionLayout,
) -> Result<(), Failure> {
    let scene = lab.fresh("append() takes rows of the layout's shape and type, by copy, and nothing else");
    let mut cache = make();
    let rows = |tokens: &[u32], side| scene.done("making rows", tensor(layout, 0, tokens, side));
    let (keys, values) = (rows(&[1, 2], Side::Key)?, rows(&[1, 2], Side::Value)?);
    scene.done("append()", cache.append(&keys, &values))?;
    let before = scene.done("snapshot()", cache.snapshot())?;

    let other = match layout.dtype {
        candle_core::DType::F32 => candle_core::DType::F64,
        _ => candle_core::DType::F32,
    };
    let make_wrong = || -> candle_core::Result<Vec<(&str, Tensor)>> {
        Ok(vec![
            ("of another type", keys.to_dtype(other)?),
            ("with a dimension less", keys.flatten_from(1)?),
            ("with wider heads", Tensor::cat(&[&keys, &keys], 2)?),
            ("with more heads", Tensor::cat(&[&keys, &keys], 1)?),
            ("of another number of tokens", keys.narrow(0, 0, 1)?),
        ])
    };
    for (what, wrong) in scene.done("making rows", make_wrong().map_err(Into::into))? {
        for (keys, values) in [(&wrong, &values), (&keys, &wrong)] {
            if cache.append(keys, values).is_ok() {
                return Err(scene.broken(format!("rows {what} were appended")));
            }
            let after = scene.done("snapshot()", cache.snapshot())?;
            scene.same_snapshot(&after, &before, "a refused append changed the snapshot")?;
        }
    }
    // What was given is written over; what is held must not follow.
    let blank = scene.done("making rows", keys.zeros_like().map_err(Into::into))?;
    for given in [&keys, &values] {
        scene.done("writing rows", given.slice_set(&blank, 0, 0).map_err(Into::into))?;
    }
    let after = scene.done("snapshot()", cache.snapshot())?;
    scene.same_snapshot(
        &after,
        &before,
        "the cache shares storage with the rows it was given",
    )
}

struct Attention {
    cache: Box<dyn AttentionCache>,
    window: Option<Window>,
}

impl Subject for Attention {
    fn cache(&self) -> &dyn Cache {
        self.cache.as_ref()
    }

    fn cache_mut(&mut self) -> &mut dyn Cache {
        self.cache.as_mut()
    }

    fn feed_unread(&mut self, tokens: &[u32]) -> Result<(), Trouble> {
        let start = self.cache.len();
        let layout = self.cache.layout();
        let keys = tensor(layout, start, tokens, Side::Key)?;
        let values = tensor(layout, start, tokens, Side::Value)?;
        Ok(self.cache.append(&keys, &values)?)
    }

    fn feed(&mut self, tokens: &[u32]) -> Result<Vec<Bits>, Trouble> {
        let start = self.cache.len();
        let layout = self.cache.layout().clone();
        self.feed_unread(tokens)?;
        let view = self.cache.view()?;
        let expected = self.window.map(|w| (w.window, w.sink));
        if view.window.map(|window| (window, view.sink)) != expected {
            return Err(Trouble::Broken(format!(
                "the view has window {:?} and sink {}, where {:?} is expected",
                view.window, view.sink, self.window
            )));
        }
        let held = read(&view, &layout, start + tokens.len())?;
        (start..start + tokens.len())
            .map(|query| {
                (0..=query)
                    .filter(|key| sees(self.window, query, *key))
                    .map(|key| {
                        held[key].ok_or_else(|| {
                            Trouble::Broken(format!(
                                "the view lacks position {key}, which the query at {query} may see"
                            ))
                        })
                    })
                    .collect()
            })
            .collect()
    }
}

/// Whether the query at one position may see the key at another.
fn sees(window: Option<Window>, query: usize, key: usize) -> bool {
    key <= query && window.is_none_or(|w| query - key < w.window || key < w.sink)
}

/// The fingerprint of each row in a view, by position.
fn read(view: &KvView, layout: &AttentionLayout, len: usize) -> Result<Vec<Option<u64>>, Trouble> {
    let mut held = vec![None; len];
    let mut next = 0;
    for block in &view.blocks {
        if block.start < next || block.start + block.rows > len {
            return Err(Trouble::Broken(format!(
                "the view has a block of positions {}..{}, after one that ended at {next}, in a cache of {len} tokens",
                block.start,
                block.start + block.rows
            )));
        }
        next = block.start + block.rows;
        for tensor in [&block.keys, &block.values] {
            let fits = matches!(tensor.dims(), [rows, heads, width]
                if *rows >= block.rows && *heads == layout.kv_heads && *width == layout.head_dim);
            if !fits || !tensor.is_contiguous() {
                return Err(Trouble::Broken(format!(
                    "a block of {} rows has a tensor of {:?}, contiguous: {}",
                    block.rows,
                    tensor.dims(),
                    tensor.is_contiguous()
                )));
            }
        }
        let keys = rows_of(&block.keys.narrow(0, 0, block.rows)?)?;
        let values = rows_of(&block.values.narrow(0, 0, block.rows)?)?;
        for (row, (key, value)) in keys.iter().zip(&values).enumerate() {
            held[block.start + row] = Some(fingerprint(block.start + row, key, value));
        }
    }
    Ok(held)
}

fn fingerprint(position: usize, keys: &Bits, values: &Bits) -> u64 {
    let all = keys.iter().chain(values);
    all.fold(mix(position as u64), |hash, bits| mix(hash.rotate_left(7) ^ bits))
}

#[derive(Clone, Copy)]
enum Side {
    Key,
    Value,
}

/// Small whole numbers, which every type holds exactly.
fn row(layout: &AttentionLayout, position: usize, token: u32, side: Side) -> Vec<f32> {
    let salt = (position as u64) << 32 | u64::from(token) << 1 | side as u64;
    (0..layout.kv_heads * layout.head_dim)
        .map(|i| (mix(mix(salt) ^ i as u64) % 127) as f32)
        .collect()
}

fn bits(row: &[f32]) -> Bits {
    row.iter().map(|x| f64::from(*x).to_bits()).collect()
}

fn tensor(layout: &AttentionLayout, start: usize, tokens: &[u32], side: Side) -> recant_core::Result<Tensor> {
    let rows: Vec<f32> = (start..)
        .zip(tokens)
        .flat_map(|(position, token)| row(layout, position, *token, side))
        .collect();
    let shape = (tokens.len(), layout.kv_heads, layout.head_dim);
    Ok(Tensor::from_vec(rows, shape, &Device::Cpu)?.to_dtype(layout.dtype)?)
}
