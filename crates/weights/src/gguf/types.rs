//! The types that tensors of a GGUF file have.

use std::fmt;

/// A type of tensor elements, by its number in the format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct GgmlType {
    name: &'static str,
    block: usize,
    bytes: usize,
}

/// Number, name, elements of a block, bytes of a block. The gaps are types that were withdrawn.
const TYPES: [(u32, &str, usize, usize); 34] = [
    (0, "F32", 1, 4),
    (1, "F16", 1, 2),
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (9, "Q8_1", 32, 36),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56),
    (30, "BF16", 1, 2),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17),
    (40, "NVFP4", 64, 36),
    (41, "Q1_0", 128, 18),
];

impl GgmlType {
    pub(super) fn of(number: u32) -> Option<Self> {
        TYPES.iter().find(|found| found.0 == number).map(Self::from)
    }

    /// The type of this name.
    pub(super) fn named(name: &str) -> Option<Self> {
        TYPES.iter().find(|found| found.1 == name).map(Self::from)
    }

    pub(super) fn name(self) -> &'static str {
        self.name
    }

    /// Elements of a block.
    pub(super) fn block(self) -> usize {
        self.block
    }

    /// Bytes of a block.
    pub(super) fn bytes(self) -> usize {
        self.bytes
    }
}

impl From<&(u32, &'static str, usize, usize)> for GgmlType {
    fn from(&(_, name, block, bytes): &(u32, &'static str, usize, usize)) -> Self {
        Self { name, block, bytes }
    }
}

impl fmt::Display for GgmlType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use candle_core::{safetensors, Device};

    use super::*;

    #[test]
    fn numbers_and_sizes_are_those_of_the_gguf_package() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/gguf/blocks.safetensors");
        let golden = safetensors::load(golden, &Device::Cpu).expect("golden blocks");
        let sizes = golden["sizes"].to_vec2::<i32>().expect("sizes");
        let own: Vec<Vec<i32>> = TYPES
            .iter()
            .map(|(number, _, block, bytes)| vec![number.cast_signed(), *block as i32, *bytes as i32])
            .collect();
        // No file holds Q8_1, which the package gives another size than llama.cpp does.
        for sizes in sizes.iter().filter(|sizes| sizes[0] != 9) {
            assert!(own.contains(sizes), "type {}", sizes[0]);
        }
        for own in own.iter().filter(|own| own[0] != 9) {
            assert!(sizes.contains(own), "type {}", own[0]);
        }
    }
}
