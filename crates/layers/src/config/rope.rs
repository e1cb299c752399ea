//! Rotary position fields, in their new and their old place.

use super::fields::Fields;
use super::{ConfigError, Result};

/// Share of a head that is rotated where no file says otherwise.
const DEFAULT_FACTOR: f64 = 0.25;
/// Largest base of the rotary frequencies that is believed. Published models have 1e7.
const MAX_THETA: f64 = 1e15;

pub(super) struct Rope {
    pub(super) theta: f64,
    pub(super) dims: usize,
}

/// Reads theta and the rotated dimensions.
///
/// `rope_scaling`, where not null, stands in for `rope_parameters`. A value in that object wins over the flat key of
/// the same name. Unlike in Hugging Face's code a missing theta is an error: its default of 10000 is no published
/// model's, and a model run with it goes wrong slowly.
pub(super) fn read(text: &Fields<'_>, head_dim: usize, warnings: &mut Vec<String>) -> Result<Rope> {
    let parameters = text.object("rope_parameters")?;
    let scaling = text.object("rope_scaling")?;
    if scaling.is_some() && parameters.is_some() && text.get("rope_scaling") != text.get("rope_parameters") {
        warnings.push(format!(
            "{} and {} are both given and differ; the first is used",
            text.path("rope_scaling"),
            text.path("rope_parameters")
        ));
    }
    let dict = scaling.as_ref().or(parameters.as_ref());
    if let Some(dict) = dict {
        for name in ["rope_type", "type"] {
            if let Some(kind) = dict.text(name)? {
                if !["default", "mrope"].contains(&kind) {
                    return Err(dict.unsupported(name, "\"default\" or \"mrope\""));
                }
            }
        }
    }

    let theta = number(text, dict, "rope_theta", MAX_THETA, warnings)?
        .ok_or_else(|| text.missing("rope_parameters.rope_theta", "the base of the rotary frequencies"))?;
    let factor = number(text, dict, "partial_rotary_factor", 1.0, warnings)?.unwrap_or(DEFAULT_FACTOR);
    // Rounded down, as `int()` does in the code that the models were trained with. The factor is at most 1, so the
    // product fits.
    let dims = (head_dim as f64 * factor) as usize;
    if dims < 2 || !dims.is_multiple_of(2) {
        return Err(ConfigError::Incoherent {
            what: format!(
                "{} is {head_dim} and partial_rotary_factor is {factor}, so {dims} dimensions are rotated",
                text.path("head_dim")
            ),
            expected: "expected an even number of at least 2".to_owned(),
        });
    }
    Ok(Rope { theta, dims })
}

/// A positive number from the dict, else from the flat key, with a warning where the two differ.
fn number(
    text: &Fields<'_>,
    dict: Option<&Fields<'_>>,
    name: &'static str,
    max: f64,
    warnings: &mut Vec<String>,
) -> Result<Option<f64>> {
    let flat = text.positive(name, max)?;
    let inner = match dict {
        Some(dict) => dict.positive(name, max)?.map(|value| (dict, value)),
        None => None,
    };
    if let (Some((dict, inner)), Some(flat)) = (inner, flat) {
        if inner != flat {
            warnings.push(format!(
                "{} is {inner} and {} is {flat}; the first is used",
                dict.path(name),
                text.path(name)
            ));
        }
    }
    Ok(inner.map(|(_, value)| value).or(flat))
}
