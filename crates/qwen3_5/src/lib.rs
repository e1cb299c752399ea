//! The dense Qwen3.5 and Qwen3.6 family: configuration, weight names, assembly
#![forbid(unsafe_code)]

mod config;

pub use config::{Config, ConfigError, LayerKind, Tie};
