//! What can go wrong between a folder and its text.

use std::path::PathBuf;

/// The result of this crate's operations.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of loading, of a session or of generation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A checkpoint folder cannot be read.
    #[error(transparent)]
    Weights(#[from] recant_weights::Error),

    /// A repository of the Hub cannot be fetched.
    #[cfg(feature = "hub")]
    #[error(transparent)]
    Hub(#[from] crate::HubError),

    /// A model cannot be made of a checkpoint.
    #[error("{}: {source}", folder.display())]
    Model {
        /// The checkpoint folder.
        folder: PathBuf,
        /// What is wrong with it.
        source: Box<recant_layers::Error>,
    },

    /// A model family that this library does not run.
    #[error("{}: model_type is {found}; supported are {supported}", folder.display())]
    Unsupported {
        /// The checkpoint folder.
        folder: PathBuf,
        /// What its `config.json` says.
        found: String,
        /// What it could say.
        supported: String,
    },

    /// A head was given where a model is wanted.
    #[error(
        "{} holds a multi-token-prediction head alone: it is no model and no draft model; attach it to a session of its \
         target with `mtp_from`", folder.display()
    )]
    HeadAlone {
        /// The folder.
        folder: PathBuf,
    },

    /// A multi-token-prediction head does not go with the target.
    #[error(transparent)]
    Mtp(Box<recant_mtp::Error>),

    /// The tokenizer cannot be read, or refuses a text.
    #[error("tokenizer {}: {reason}", path.display())]
    Tokenizer {
        /// Its file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },

    /// A draft model writes other texts for the same ids.
    #[error(
        "the draft model's vocabulary differs from the target's: id {id} is {draft} in the draft and {target} in the target; \
         use a draft model of the same tokenizer"
    )]
    Vocabulary {
        /// The first id that differs.
        id: u32,
        /// Its text in the draft's tokenizer.
        draft: String,
        /// Its text in the target's tokenizer.
        target: String,
    },

    /// A stop string that would end every text before its first character.
    #[error("stop string {index} (counted from 0) is empty: it would end every text at once; leave it out")]
    EmptyStop {
        /// Its place among the stop strings.
        index: usize,
    },

    /// A checkpoint cannot chat.
    #[error(
        "{} has no chat template: neither chat_template.jinja, nor `chat_template` in tokenizer_config.json, nor \
         chat_template.json; it may be a base model: give it plain text", folder.display()
    )]
    NoChatTemplate {
        /// The checkpoint folder.
        folder: PathBuf,
    },

    /// A chat template cannot be read, or fails on a conversation.
    #[error("chat template {}: {reason}", path.display())]
    ChatTemplate {
        /// Its file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },

    /// A chat template refuses a conversation, in its own words.
    #[error("{message}")]
    ChatRefused {
        /// What the template says.
        message: String,
    },

    /// A conversation that can be given to no template.
    #[error("{reason}")]
    Conversation {
        /// What is wrong with it.
        reason: String,
    },

    /// A message that can be given to no template.
    #[error("messages[{index}] ({role}): {reason}")]
    Message {
        /// Its place in the conversation, from 0.
        index: usize,
        /// Its role.
        role: String,
        /// What is wrong with it.
        reason: String,
    },

    /// A format of rounded weights that checkpoints are not written in.
    #[error(
        "weights of {found} cannot be saved; expected 4 or 8 bits in groups of 32, 64 or 128, affine, with scales of f32, f16 or \
         bf16"
    )]
    SaveFormat {
        /// The format.
        found: String,
    },

    /// A checkpoint that cannot be rounded and saved.
    #[error("{} cannot be saved: {reason}; use another copy of the model", folder.display())]
    Save {
        /// The folder of the checkpoint.
        folder: PathBuf,
        /// What is wrong with it.
        reason: String,
    },

    /// A folder to be written exists already.
    #[error("{} exists already; name a folder that does not, or remove it", path.display())]
    TargetExists {
        /// The folder.
        path: PathBuf,
    },

    /// A file or folder cannot be written.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },

    /// Generation failed. The text so far and its caches are in step.
    #[error(transparent)]
    Generate(#[from] recant_generate::Error),

    /// The threads could not be started.
    #[error("cannot start {threads} threads: {reason}")]
    Threads {
        /// How many were asked for.
        threads: usize,
        /// What the system said.
        reason: String,
    },
}

impl From<recant_mtp::Error> for Error {
    fn from(error: recant_mtp::Error) -> Self {
        Self::Mtp(Box::new(error))
    }
}

impl From<recant_core::Error> for Error {
    fn from(error: recant_core::Error) -> Self {
        Self::Generate(error.into())
    }
}
