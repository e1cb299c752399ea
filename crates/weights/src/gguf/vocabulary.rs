//! The tokenizer in a file's metadata.

use serde_json::{json, Map, Value as Json};

use super::config::Metadata;
use super::header::Kind;
use crate::error::Result;
use crate::Folder;

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";
const TEMPLATE: &str = "tokenizer.chat_template";

/// What a token of a vocabulary is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenKind {
    /// A piece of text, its bytes written as printable characters.
    Normal,
    /// A token with a meaning of its own that no text shows, such as `<|im_end|>`.
    Control,
    /// A token of its own that a text shows, such as `<think>`.
    UserDefined,
    /// A row of the model that stands for nothing.
    Unused,
}

/// How a vocabulary's texts are cut before pieces are merged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cutting {
    /// As Qwen2, Qwen3 and Qwen3-Next do.
    Qwen2,
    /// As Qwen3.5 does: marks count as letters.
    Qwen35,
}

/// A byte-level vocabulary with merges, as a GGUF file holds it: see [`Folder::vocabulary`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Vocabulary<'a> {
    /// Each token and what it is, by id.
    pub tokens: Vec<(&'a str, TokenKind)>,
    /// Pairs of pieces that are merged, the first first.
    pub merges: Vec<(&'a str, &'a str)>,
    /// How texts are cut.
    pub cutting: Cutting,
}

impl Folder {
    /// The vocabulary in the metadata of a GGUF file. None where the checkpoint is none: a Hub folder has its own file,
    /// at [`tokenizer_path`](Self::tokenizer_path).
    ///
    /// # Errors
    /// A tokenizer of another kind, or tables that are missing, of other types or of different lengths.
    pub fn vocabulary(&self) -> Result<Option<Vocabulary<'_>>> {
        self.gguf_metadata().map(Vocabulary::read).transpose()
    }
}

impl<'a> Vocabulary<'a> {
    fn read(metadata: Metadata<'a>) -> Result<Self> {
        let missing = |key: &str, expected: &str| metadata.wrong(key, expected, "nothing");
        let expect = |key: &str, expected: &str| -> Result<&'a str> {
            metadata.text(key)?.ok_or_else(|| missing(key, expected))
        };
        let model = expect(MODEL, "\"gpt2\"")?;
        if model != "gpt2" {
            return Err(metadata.wrong(MODEL, "\"gpt2\", a byte-level vocabulary with merges", model));
        }
        const CUTTINGS: &str = "\"qwen35\" or \"qwen2\"";
        let cutting = match expect(PRE, CUTTINGS)? {
            "qwen35" => Cutting::Qwen35,
            "qwen2" => Cutting::Qwen2,
            other => return Err(metadata.wrong(PRE, CUTTINGS, other)),
        };
        let texts = |key, expected| -> Result<_> {
            let array = metadata.array(key, &[Kind::Text], expected)?;
            Ok(array.ok_or_else(|| missing(key, expected))?.texts(metadata.bytes))
        };
        let tokens: Vec<&str> = texts(TOKENS, "an array of texts")?.collect();
        let merges = texts(MERGES, "an array of texts")?
            .enumerate()
            .map(|(at, merge)| {
                merge.split_once(' ').ok_or_else(|| {
                    metadata.wrong(
                        MERGES,
                        &format!("two pieces with a space between at {at}"),
                        &format!("{merge:?}"),
                    )
                })
            })
            .collect::<Result<_>>()?;
        let kinds = token_kinds(metadata, tokens.len())?;
        Ok(Self {
            tokens: tokens.into_iter().zip(kinds).collect(),
            merges,
            cutting,
        })
    }
}

fn token_kinds(metadata: Metadata<'_>, tokens: usize) -> Result<Vec<TokenKind>> {
    const EXPECTED: &str = "an array of whole numbers";
    let Some(array) = metadata.array(TYPES, &[Kind::I32, Kind::U32], EXPECTED)? else {
        return Err(metadata.wrong(TYPES, EXPECTED, "nothing"));
    };
    if array.count != tokens {
        return Err(metadata.wrong(
            TYPES,
            &format!("{tokens} elements, one for each token"),
            &array.count.to_string(),
        ));
    }
    array
        .numbers(metadata.bytes)
        .enumerate()
        .map(|(id, number)| match number {
            1 => Ok(TokenKind::Normal),
            3 => Ok(TokenKind::Control),
            4 => Ok(TokenKind::UserDefined),
            5 => Ok(TokenKind::Unused),
            _ => Err(metadata.wrong(
                TYPES,
                &format!("1, 3, 4 or 5 for token {id}"),
                &number.to_string(),
            )),
        })
        .collect()
}

/// Ids that end a text: those that are named so, and the control tokens that end texts of this family of models. A file
/// names one, while its model may have learned to end a turn with one and a text with another.
pub(super) fn eos(metadata: Metadata<'_>) -> Result<Vec<u32>> {
    const ENDS: [&str; 2] = ["<|im_end|>", "<|endoftext|>"];
    let mut ids = Vec::new();
    for key in [
        "tokenizer.ggml.eos_token_id",
        "tokenizer.ggml.eot_token_id",
        "tokenizer.ggml.eom_token_id",
    ] {
        if let Some(id) = metadata.number(key)? {
            ids.push(
                u32::try_from(id).map_err(|_| metadata.wrong(key, "the id of a token", &id.to_string()))?,
            );
        }
    }
    let tokens = metadata.array(TOKENS, &[Kind::Text], "an array of texts")?;
    let types = metadata.array(TYPES, &[Kind::I32, Kind::U32], "an array of whole numbers")?;
    if let (Some(tokens), Some(types)) = (tokens, types) {
        let both = tokens.texts(metadata.bytes).zip(types.numbers(metadata.bytes));
        ids.extend(
            (0..)
                .zip(both)
                .filter(|(_, (token, kind))| *kind == 3 && ENDS.contains(token))
                .map(|(id, _)| id),
        );
    }
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

/// What `tokenizer_config.json` of a Hub folder says of the same model: chat templates, and texts of special tokens.
pub(super) fn tokenizer_config(metadata: Metadata<'_>) -> Result<Json> {
    let mut config = Map::new();
    let tokens = metadata.array(TOKENS, &[Kind::Text], "an array of texts")?;
    for (name, key) in [
        ("bos_token", "tokenizer.ggml.bos_token_id"),
        ("eos_token", "tokenizer.ggml.eos_token_id"),
        ("pad_token", "tokenizer.ggml.padding_token_id"),
    ] {
        let id = metadata.number(key)?.and_then(|id| usize::try_from(id).ok());
        let text = id
            .zip(tokens)
            .and_then(|(id, tokens)| tokens.texts(metadata.bytes).nth(id));
        if let Some(text) = text {
            config.insert(name.to_owned(), text.into());
        }
    }
    let mut templates = Vec::new();
    for key in metadata.values.keys() {
        let name = match key.strip_prefix(TEMPLATE) {
            Some("") => "default",
            Some(name) if name.starts_with('.') => &name[1..],
            _ => continue,
        };
        if let Some(template) = metadata.text(key)? {
            templates.push(json!({"name": name, "template": template}));
        }
    }
    if !templates.is_empty() {
        config.insert("chat_template".to_owned(), templates.into());
    }
    Ok(config.into())
}
