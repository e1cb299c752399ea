//! Rules and filters, held against what they promise.
