//! A safetensors file: its header, its names, and the formats that they tell.
#![no_main]

use libfuzzer_sys::fuzz_target;
use recant_fuzz::{inspect, CONFIG};

fuzz_target!(|data: &[u8]| inspect(&[("config.json", CONFIG), ("model.safetensors", data)]));
