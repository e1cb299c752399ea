//! Layers of the hybrid models: Gated DeltaNet, gated attention, MLP and the decoder block
