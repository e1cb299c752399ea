//! Greedy decoding, drafters and the exact speculative step
