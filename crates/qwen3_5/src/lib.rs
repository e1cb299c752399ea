//! The dense Qwen3.5 and Qwen3.6 family: configuration, weight names, assembly
