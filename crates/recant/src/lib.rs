//! Exact speculative decoding for Qwen3.5, Qwen3.6 and Qwen3-Next hybrid language models, on candle
