//! Any supported checkpoint, from its folder or file.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use recant_core::{Hidden, LanguageModel};
use recant_layers::{Family, HybridModel, LoadOptions};
use recant_mtp::HeadCheck;
use recant_qwen3_5::Qwen35;
use recant_qwen3_5_moe::Qwen35Moe;
use recant_qwen3_next::Qwen3Next;
use recant_weights::Folder;
use serde_json::Value;

use crate::heads::{CheckedHead, Heads, CHECK_TEXT};
#[cfg(feature = "hub")]
use crate::Hub;
use crate::{recommended, ChatTemplate, Error, Result, Sampling, SessionBuilder, Text, Threads};

/// Families that [`load`] takes.
const FAMILIES: [&dyn Family; 3] = [&Qwen35, &Qwen35Moe, &Qwen3Next];

/// A model and what belongs to it. Clones share the weights.
#[derive(Clone)]
pub struct Loaded {
    model: Arc<dyn LanguageModel>,
    hybrid: HybridModel,
    family: &'static dyn Family,
    options: LoadOptions,
    has_head: bool,
    heads: Arc<Heads>,
    text: Arc<Text>,
    /// Read when it is first asked for.
    chat: Arc<OnceLock<ChatTemplate>>,
    /// That of a model in GGUF, where the template is in no file of its own.
    tokenizer_config: Option<Arc<Value>>,
    eos: Vec<u32>,
    sampling: Arc<Sampling>,
    notes: Vec<String>,
    path: PathBuf,
}

/// Loads a checkpoint, a folder in the layout of the Hub or a model in GGUF: own kernels, on the CPU.
///
/// A model in GGUF is named by any of its files, or by a folder that holds no other model.
///
/// A path that does not exist and looks like a repository of the Hub, `owner/name` or `owner/name@revision`, is fetched from there
/// into the cache that all its clients share, as [`Hub::from_env`](crate::Hub::from_env) says (feature `hub`).
///
/// # Errors
/// Whatever is missing, unknown or contradicts itself in the folder is named.
///
/// ```no_run
/// let target = recant::load("Qwen3.5-0.8B")?;
/// let mut session = target.session().build()?;
/// session.start("def fibonacci(n):")?;
/// for event in session.generate(64) {
///     print!("{}", event?.text());
/// }
/// # Ok::<(), recant::Error>(())
/// ```
pub fn load(path: impl AsRef<Path>) -> Result<Loaded> {
    load_with(path, &LoadOptions::default(), &mut |_, _| {})
}

/// [`load`] with a choice of backend and device. `progress` is told how many of how many bytes are read; where a repository is
/// fetched, before that how many of how many bytes are there.
pub fn load_with(
    path: impl AsRef<Path>,
    options: &LoadOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Loaded> {
    let folder = Folder::open(local(path.as_ref(), progress)?)?;
    let family = family(&folder)?;
    let text = Text::of(&folder)?;
    let (model, inventory) =
        HybridModel::load(family, &folder, options, progress).map_err(|source| Error::Model {
            folder: folder.path().to_owned(),
            source: Box::new(source),
        })?;
    let mut notes = model.config().warnings.clone();
    for (count, what) in [
        (inventory.vision, "the vision tower: images are not supported"),
        (
            inventory.mtp,
            "the multi-token-prediction head: `mtp()` of a session drafts with it",
        ),
    ] {
        if count > 0 {
            notes.push(format!("left alone {count} tensors of {what}"));
        }
    }
    let (sampling, ignored) = recommended::sampling(folder.generation_config());
    notes.extend(ignored);
    let mut eos = model.spec().eos.clone();
    eos.extend(tokenizer_eos(&folder, &text));
    eos.sort_unstable();
    eos.dedup();
    Ok(Loaded {
        model: Arc::new(model.clone()),
        hybrid: model,
        family,
        options: options.clone(),
        has_head: inventory.mtp > 0,
        heads: Arc::default(),
        text: Arc::new(text),
        chat: Arc::default(),
        tokenizer_config: folder
            .tokenizer_config()
            .filter(|_| folder.is_gguf())
            .map(|config| Arc::new(config.clone())),
        eos,
        sampling: Arc::new(sampling),
        notes,
        path: folder.path().to_owned(),
    })
}

/// A path, or the folder that a repository of the Hub was fetched into.
#[cfg(feature = "hub")]
pub(crate) fn local<'a>(path: &'a Path, progress: &mut dyn FnMut(u64, u64)) -> Result<Cow<'a, Path>> {
    match path.to_str() {
        Some(name) if !path.exists() && Hub::names(name) => {
            Ok(Cow::Owned(Hub::from_env()?.fetch(name, progress)?))
        }
        _ => Ok(Cow::Borrowed(path)),
    }
}

#[cfg(not(feature = "hub"))]
pub(crate) fn local<'a>(path: &'a Path, _: &mut dyn FnMut(u64, u64)) -> Result<Cow<'a, Path>> {
    Ok(Cow::Borrowed(path))
}

/// The family that the root's model type belongs to.
pub(crate) fn family(folder: &Folder) -> Result<&'static dyn Family> {
    if folder.is_mtp_alone() {
        return Err(Error::HeadAlone {
            folder: folder.path().to_owned(),
        });
    }
    let found = &folder.config()["model_type"];
    let known = |family: &&dyn Family| {
        found
            .as_str()
            .is_some_and(|found| family.model_types().contains(&found))
    };
    FAMILIES.into_iter().find(known).ok_or_else(|| {
        let supported: Vec<&str> = FAMILIES
            .iter()
            .flat_map(|family| family.model_types())
            .copied()
            .collect();
        Error::Unsupported {
            folder: folder.path().to_owned(),
            found: match found {
                Value::Null => "absent".to_owned(),
                other => other.to_string(),
            },
            supported: supported.join(", "),
        }
    })
}

/// The id of the tokenizer's own end-of-text token.
fn tokenizer_eos(folder: &Folder, text: &Text) -> Option<u32> {
    let token = &folder.tokenizer_config()?["eos_token"];
    let content = token.as_str().or_else(|| token["content"].as_str())?;
    text.tokenizer().token_to_id(content)
}

impl Loaded {
    /// The model.
    pub fn model(&self) -> &Arc<dyn LanguageModel> {
        &self.model
    }

    /// The tokenizer.
    pub fn text(&self) -> &Arc<Text> {
        &self.text
    }

    /// The checkpoint's chat template.
    ///
    /// # Errors
    /// It has none, or one that cannot be read.
    pub fn chat(&self) -> Result<&ChatTemplate> {
        if let Some(chat) = self.chat.get() {
            return Ok(chat);
        }
        let found = match &self.tokenizer_config {
            Some(config) => ChatTemplate::in_config(&self.path, config)?,
            None => ChatTemplate::load(&self.path)?,
        };
        let chat = found.ok_or_else(|| Error::NoChatTemplate {
            folder: self.path.clone(),
        })?;
        Ok(self.chat.get_or_init(|| chat))
    }

    /// Ids that end a text: those of the configuration, the generation configuration and the tokenizer together.
    pub fn eos(&self) -> &[u32] {
        &self.eos
    }

    /// The sampling that the checkpoint recommends, in `generation_config.json`: temperature, top-k, top-p, min-p and repetition
    /// penalty, as far as it names them; greedy where it names none, or says not to sample. A session is greedy unless it is
    /// given this or another.
    ///
    /// ```no_run
    /// let target = recant::load("Qwen3.5-0.8B")?;
    /// let session = target.session().sampling(target.sampling().clone()).build()?;
    /// # Ok::<(), recant::Error>(())
    /// ```
    pub fn sampling(&self) -> &Sampling {
        &self.sampling
    }

    /// What a user should know: contradictions that a rule settled, and tensors that were left alone.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Whether the checkpoint has tensors of a multi-token-prediction head.
    pub fn has_mtp(&self) -> bool {
        self.has_head
    }

    /// A head that was checked against this model, from `path` or the model's own folder. Each is read and checked once.
    pub(crate) fn checked_head(
        &self,
        path: Option<&Path>,
        hidden: Hidden,
        threads: &Threads,
    ) -> Result<CheckedHead> {
        let path = path.unwrap_or(&self.path);
        self.heads.get(path, hidden, || {
            let folder = Folder::open(local(path, &mut |_, _| {})?)?;
            let text = self.text.encode(CHECK_TEXT)?;
            let (head, check) = threads
                .run(|| HeadCheck::load(self.family, &self.hybrid, &folder, &self.options, hidden, &text))?;
            Ok(CheckedHead { head, check })
        })
    }

    /// The folder it came from, or the first file of a model in GGUF.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Prepares a session of this model.
    pub fn session(&self) -> SessionBuilder {
        SessionBuilder::new(self.clone())
    }
}

impl std::fmt::Debug for Loaded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Loaded")
            .field("path", &self.path)
            .field("spec", self.model.spec())
            .field("eos", &self.eos)
            .finish_non_exhaustive()
    }
}
