//! Row-invariant CPU kernels for hybrid language models, and the same operations composed of candle ops
