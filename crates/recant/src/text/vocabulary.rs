//! A tokenizer out of a vocabulary with merges, as Qwen's own `tokenizer.json` describes it.

use std::collections::BTreeSet;

use recant_weights::{Cutting, TokenKind, Vocabulary};
use tokenizers::models::bpe::{Vocab, BPE};
use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, SplitDelimiterBehavior, Tokenizer};

const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

pub(super) fn tokenizer(vocabulary: &Vocabulary<'_>) -> tokenizers::Result<Tokenizer> {
    let mut tokenizer = Tokenizer::new(model(vocabulary)?);
    let pattern = match vocabulary.cutting {
        Cutting::Qwen2 => QWEN2,
        Cutting::Qwen35 => QWEN35,
    };
    let split = Split::new(
        SplitPattern::Regex(pattern.to_owned()),
        SplitDelimiterBehavior::Isolated,
        false,
    )?;
    let bytes = ByteLevel::new(false, false, false);
    tokenizer
        .with_normalizer(Some(NFC))?
        .with_pre_tokenizer(Some(Sequence::new(vec![split.into(), bytes.into()])))
        .with_post_processor(Some(bytes))
        .with_decoder(Some(ByteLevel::default()));
    // Tokens of both kinds are single ids wherever they are written; only those of control are left out of texts.
    let added: Vec<AddedToken> = vocabulary
        .tokens
        .iter()
        .filter_map(|(token, kind)| {
            let special = match kind {
                TokenKind::Control => true,
                TokenKind::UserDefined => false,
                TokenKind::Normal | TokenKind::Unused => return None,
            };
            Some(AddedToken::from(*token, special).normalized(false))
        })
        .collect();
    tokenizer.add_tokens(added)?;
    Ok(tokenizer)
}

/// Every token that stands for a text keeps its id, added tokens too: they are looked up here when they are added.
fn model(vocabulary: &Vocabulary<'_>) -> tokenizers::Result<BPE> {
    let mut seen = BTreeSet::new();
    let mut ids = Vocab::default();
    for (id, (token, kind)) in (0..).zip(&vocabulary.tokens) {
        if *kind == TokenKind::Unused {
            continue;
        }
        if !seen.insert(*token) {
            return Err(
                format!("token {token:?} is in the vocabulary twice; expected texts that differ").into(),
            );
        }
        ids.insert((*token).to_owned(), id);
    }
    let merges = vocabulary.merges.iter();
    let merges = merges.map(|(a, b)| ((*a).to_owned(), (*b).to_owned()));
    BPE::builder().vocab_and_merges(ids, merges.collect()).build()
}
