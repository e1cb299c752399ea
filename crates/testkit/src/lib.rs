//! Scripted models and drafters, and the laws any cache can be held against
