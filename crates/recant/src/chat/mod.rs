//! Conversations to prompts, by a checkpoint's own template.

mod engine;
mod message;
mod python;
mod shield;
mod source;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use minijinja::value::Serde;
use minijinja::Environment;
use recant_weights::Folder;
use serde_json::{Map, Value};

use crate::{Error, Result, Text};
use shield::{Guard, Shield, Unused};

pub use message::{Content, Function, Message, Part, ToolCall};

/// The template that is used unless tools are given and there is one for that.
const DEFAULT: &str = "default";
const TOOL_USE: &str = "tool_use";

/// Writes conversations as the prompts that a checkpoint was trained on.
///
/// The text is that of `apply_chat_template` of transformers, byte for byte: the same Jinja settings, Python's string
/// methods, and JSON as Python writes it. Three things differ:
///
/// - Arguments of tool calls may be strings that hold JSON; the template is given the object.
/// - A content that is null or absent is an empty text.
/// - A content of parts is one text.
///
/// `strftime_now` tells the time in UTC. The tag `{% generation %}`, by which some templates mark what is trained on, is not
/// known.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    engine: Environment<'static>,
    path: PathBuf,
    /// `bos_token` and so on, which templates may use.
    tokens: Map<String, Value>,
}

/// How a conversation is written.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatOptions {
    /// Functions that the model may call, in the chat completions format. Fields keep their order.
    pub tools: Vec<Value>,
    /// Whether the prompt opens a new turn of the assistant. True unless set.
    pub add_generation_prompt: bool,
    /// Whether the prompt ends within the last message, for the model to go on with it. Needs `add_generation_prompt` to be
    /// false.
    pub continue_final_message: bool,
    /// Whether the model is to think before it speaks; left to the template unless set.
    pub enable_thinking: Option<bool>,
    /// Other variables that the template knows, such as `preserve_thinking`.
    pub extra: BTreeMap<String, Value>,
}

impl Default for ChatOptions {
    fn default() -> Self {
        Self {
            tools: Vec::new(),
            add_generation_prompt: true,
            continue_final_message: false,
            enable_thinking: None,
            extra: BTreeMap::new(),
        }
    }
}

impl ChatTemplate {
    /// The template of a checkpoint folder: `chat_template.jinja`, else `chat_template` in `tokenizer_config.json`, else
    /// `chat_template.json`. None where the folder has none.
    ///
    /// # Errors
    /// A file that cannot be read, or a template with a mistake in it.
    pub fn load(folder: impl AsRef<Path>) -> Result<Option<Self>> {
        source::find(folder.as_ref())?.map(Self::new).transpose()
    }

    /// The template of a checkpoint: that of its folder, or the one in a GGUF file. None where it has none.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn of(folder: &Folder) -> Result<Option<Self>> {
        match (folder.is_gguf(), folder.tokenizer_config()) {
            (true, Some(config)) => Self::in_config(folder.path(), config),
            _ => Self::load(folder.path()),
        }
    }

    /// The template of a model in GGUF, whose configuration of the tokenizer this is.
    pub(crate) fn in_config(path: &Path, config: &Value) -> Result<Option<Self>> {
        source::in_config(path, config)?.map(Self::new).transpose()
    }

    fn new(found: source::Found) -> Result<Self> {
        let path = found.path;
        let wrong = |error: &minijinja::Error| Error::ChatTemplate {
            path: path.clone(),
            reason: told(error),
        };
        let mut engine = engine::new().map_err(|e| wrong(&e))?;
        for (name, source) in found.templates {
            engine.add_template_owned(name, source).map_err(|e| wrong(&e))?;
        }
        Ok(Self {
            engine,
            path,
            tokens: found.tokens,
        })
    }

    /// The file that the template is from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The prompt of a conversation.
    ///
    /// # Errors
    /// No messages, a message that is no text, arguments of a tool call that are no JSON object, options that contradict each
    /// other, and whatever the template refuses: [`Error::ChatRefused`] is what it says by `raise_exception`.
    ///
    /// # Example
    /// ```no_run
    /// use recant::{ChatOptions, ChatTemplate, Message};
    ///
    /// let template = ChatTemplate::load("Qwen3.5-9B")?.expect("a chat model");
    /// let options = ChatOptions { enable_thinking: Some(false), ..ChatOptions::default() };
    /// let prompt = template.render(&[Message::user("What is a monad?")], &options)?;
    /// # Ok::<(), recant::Error>(())
    /// ```
    pub fn render(&self, messages: &[Message], options: &ChatOptions) -> Result<String> {
        let mut conversation = Conversation::new(messages, options)?;
        let mut unused = self.unused(&conversation, options);
        self.write(&mut conversation, options, &mut unused)
    }

    /// The ids of a conversation's prompt. Those of [`render`](Self::render)'s text, except for what people wrote in it:
    ///
    /// - In messages of users and tools, and of roles other than the next, an added token that is written out, such as
    ///   `<|im_end|>` or `<think>`, is plain text.
    /// - In messages of the system, a developer and the assistant, and in tools, special tokens are plain text: no model
    ///   shows them in a text. Others, such as `<think>` and `<tool_call>`, are tokens, since models write them.
    ///
    /// Templates see a character that stands for the token, so one that looks for `<tool_response>` in a user's message
    /// finds none. [`ChatOptions::extra`] is not guarded, nor is a token of which the template writes one part and a message
    /// another.
    ///
    /// # Errors
    /// As [`render`](Self::render), or the tokenizer refuses the text.
    pub fn encode(&self, text: &Text, messages: &[Message], options: &ChatOptions) -> Result<Vec<u32>> {
        let mut conversation = Conversation::new(messages, options)?;
        let mut shield = Shield::new(text, self.unused(&conversation, options));
        for (value, message) in conversation.messages.iter_mut().zip(messages) {
            shield.value(value, Guard::of(&message.role))?;
        }
        for tool in &mut conversation.tools {
            shield.value(tool, Guard::Special)?;
        }
        let rendered = self.write(&mut conversation, options, shield.unused())?;
        shield.encode(&rendered)
    }

    fn write(
        &self,
        conversation: &mut Conversation,
        options: &ChatOptions,
        unused: &mut Unused,
    ) -> Result<String> {
        if !options.continue_final_message {
            return self.apply(conversation, options);
        }
        let mark = unused.take()?;
        let content = conversation
            .messages
            .last_mut()
            .and_then(|last| last.get_mut("content"));
        if let Some(Value::String(content)) = content {
            content.push_str(&format!("{mark} "));
        }
        let mut rendered = self.apply(conversation, options)?;
        let Some(end) = rendered.rfind(mark) else {
            return Err(Error::Conversation {
                reason: "continue_final_message: the chat template does not show the last message's content"
                    .to_owned(),
            });
        };
        let trims = !rendered[end..].starts_with(&format!("{mark} "));
        rendered.truncate(end);
        rendered.retain(|c| c != mark);
        if trims {
            rendered.truncate(rendered.trim_end().len());
        }
        Ok(rendered)
    }

    fn apply(&self, conversation: &Conversation, options: &ChatOptions) -> Result<String> {
        let tools = !conversation.tools.is_empty();
        let mut variables = self.tokens.clone();
        variables.insert("documents".into(), Value::Null);
        variables.extend(options.extra.clone());
        if let Some(thinks) = options.enable_thinking {
            variables.insert("enable_thinking".into(), thinks.into());
        }
        variables.insert("messages".into(), conversation.messages.clone().into());
        variables.insert(
            "tools".into(),
            if tools {
                conversation.tools.clone().into()
            } else {
                Value::Null
            },
        );
        variables.insert(
            "add_generation_prompt".into(),
            options.add_generation_prompt.into(),
        );
        let with_tools = tools.then(|| self.engine.get_template(TOOL_USE).ok()).flatten();
        let template = match with_tools {
            Some(template) => Ok(template),
            None => self.engine.get_template(DEFAULT),
        };
        template
            .and_then(|template| template.render(Serde(&variables)))
            .map_err(|error| self.failed(&error))
    }

    fn failed(&self, error: &minijinja::Error) -> Error {
        match raised(error) {
            Some(message) => Error::ChatRefused { message },
            None => Error::ChatTemplate {
                path: self.path.clone(),
                reason: told(error),
            },
        }
    }

    /// Private characters that neither the template nor the conversation has.
    fn unused(&self, conversation: &Conversation, options: &ChatOptions) -> Unused {
        let mut unused = Unused::default();
        for (_, template) in self.engine.templates() {
            unused.note(template.source());
        }
        let values = conversation.messages.iter().chain(&conversation.tools);
        for value in values.chain(options.extra.values()).chain(self.tokens.values()) {
            unused.note_value(value);
        }
        unused
    }
}

/// What a template is given of a conversation.
struct Conversation {
    messages: Vec<Value>,
    tools: Vec<Value>,
}

impl Conversation {
    fn new(messages: &[Message], options: &ChatOptions) -> Result<Self> {
        let refused = |reason: &str| {
            Err(Error::Conversation {
                reason: reason.to_owned(),
            })
        };
        if messages.is_empty() {
            return refused("the conversation has no messages; give at least one");
        }
        if options.continue_final_message && options.add_generation_prompt {
            return refused(
                "continue_final_message and add_generation_prompt exclude each other: a prompt goes on with the last \
                 message or opens a new one; set add_generation_prompt to false",
            );
        }
        let messages = messages.iter().enumerate();
        Ok(Self {
            messages: messages
                .map(|(index, message)| message.prepared(index))
                .collect::<Result<_>>()?,
            tools: options.tools.clone(),
        })
    }
}

fn chain(error: &minijinja::Error) -> impl Iterator<Item = &(dyn std::error::Error + 'static)> {
    let first: &(dyn std::error::Error + 'static) = error;
    std::iter::successors(Some(first), |error| error.source())
}

fn raised(error: &minijinja::Error) -> Option<String> {
    chain(error).find_map(|error| Some(error.downcast_ref::<engine::Raised>()?.0.clone()))
}

fn told(error: &minijinja::Error) -> String {
    let told: Vec<String> = chain(error).map(|error| error.to_string()).collect();
    told.join(": ")
}
