//! How long the rows of a matrix are: a packed one does not say so itself.

use recant_layers::{Config, FeedForward};

/// The input features of the matrix of a canonical name, of the model or of its multi-token-prediction head.
pub(super) fn of(config: &Config, mtp: bool, name: &str) -> usize {
    let is = |part: &str| name.contains(part);
    if is(".linear_attn.out_proj.") {
        config.linear_num_value_heads * config.linear_value_head_dim
    } else if is(".self_attn.o_proj.") {
        config.num_attention_heads * config.head_dim
    } else if mtp && name.starts_with("fc.") {
        2 * config.hidden_size
    } else if is(".down_proj") || is(".w2.") {
        match feed_forward(config, mtp, name) {
            Some(FeedForward::Sparse { shared_width, .. }) if is(".shared_expert.") => *shared_width,
            Some(FeedForward::Sparse { shape, .. }) => shape.width,
            Some(FeedForward::Dense { width }) => *width,
            None => 0,
        }
    } else {
        config.hidden_size
    }
}

/// What follows the mixer in the layer that a name is of. A head has a mixture where the model has one in any layer.
fn feed_forward<'c>(config: &'c Config, mtp: bool, name: &str) -> Option<&'c FeedForward> {
    if mtp {
        let mut mixtures = config.feed_forward.iter();
        let mixture = mixtures.find(|layer| matches!(layer, FeedForward::Sparse { .. }));
        return mixture.or(config.feed_forward.first());
    }
    let (number, _) = name.strip_prefix("layers.")?.split_once('.')?;
    config.feed_forward.get(number.parse::<usize>().ok()?)
}
