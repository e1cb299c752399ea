//! Checkpoint folders as named weights, read strictly
