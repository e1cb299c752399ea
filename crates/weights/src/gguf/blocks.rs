//! Quantized blocks as groups, without loss.
//!
//! A block of GGUF is some numbers of 2 to 8 bits, in an order that suits another program's kernels, with scales that may be
//! packed themselves. Here each becomes groups of 8 or 4 bits a number in the order of the matrix, `scale * number + bias`.
//!
//! Nothing is rounded. Scales that a block stores as f16 stay f16. In k-quants a group's scale is a product of an f16 that the
//! block shares, which has 11 significant bits, and a whole number of at most 8: they stay apart, in two levels. The product has
//! 19 bits, which an f32 holds with its 24; likewise their biases. The product with `q` fits too (Q6_K: 11 + 7 + 5 bits), so that
//! a weight that is read from the groups is bit for bit what the block's own definition gives in f32.

use candle_core::DType;
use half::f16;

use super::types::GgmlType;
use crate::Coding;

/// Elements of the largest block.
const MOST: usize = 256;

/// What the blocks of a type become.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layout {
    pub(super) coding: Coding,
    /// Elements that share a scale.
    pub(super) group: usize,
    pub(super) scales: Levels,
    pub(super) biased: bool,
    decode: fn(&[u8], &mut Block),
}

/// How scales and biases are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Levels {
    /// Products of numbers and factors, in this type.
    One(DType),
    /// Numbers and factors, apart.
    Two,
}

/// The numbers of one block.
#[derive(Debug, Clone)]
pub(super) struct Block {
    pub(super) quants: [u8; MOST],
    pub(super) scales: Steps,
    pub(super) biases: Steps,
}

/// Scales or biases of a block: numbers, times a factor. Of two levels the numbers are whole and the factor is an f16.
#[derive(Debug, Clone)]
pub(super) struct Steps {
    pub(super) numbers: [f32; MOST / 16],
    pub(super) factor: f32,
}

impl Default for Block {
    fn default() -> Self {
        Self {
            quants: [0; MOST],
            scales: Steps::default(),
            biases: Steps::default(),
        }
    }
}

impl Default for Steps {
    fn default() -> Self {
        Self {
            numbers: [0.0; MOST / 16],
            factor: 1.0,
        }
    }
}

impl Layout {
    /// The layout for a type, if its blocks are read here.
    pub(super) fn of(kind: GgmlType) -> Option<Self> {
        let layout = |coding, group, scales, decode| Self {
            coding,
            group,
            scales,
            biased: false,
            decode,
        };
        let whole = |bits, zero| Coding::Whole { bits, zero };
        let biased = |layout| Self {
            biased: true,
            ..layout
        };
        Some(match kind.name() {
            "Q4_0" => layout(whole(4, 8), 32, Levels::One(DType::F16), q4_0),
            "Q4_1" => biased(layout(whole(4, 0), 32, Levels::One(DType::F16), q4_1)),
            "Q5_0" => layout(whole(8, 16), 32, Levels::One(DType::F16), q5_0),
            "Q5_1" => biased(layout(whole(8, 0), 32, Levels::One(DType::F16), q5_1)),
            "Q8_0" => layout(whole(8, 128), 32, Levels::One(DType::F16), q8_0),
            "Q2_K" => biased(layout(whole(4, 0), 16, Levels::Two, q2_k)),
            "Q3_K" => layout(whole(4, 4), 16, Levels::Two, q3_k),
            "Q4_K" => biased(layout(whole(4, 0), 32, Levels::Two, q4_k)),
            "Q5_K" => biased(layout(whole(8, 0), 32, Levels::Two, q5_k)),
            "Q6_K" => layout(whole(8, 32), 16, Levels::Two, q6_k),
            "IQ4_NL" => layout(IQ4, 32, Levels::One(DType::F16), iq4_nl),
            "IQ4_XS" => layout(IQ4, 32, Levels::Two, iq4_xs),
            // Powers of two down to 2^-128: bf16 has them all.
            "MXFP4" => layout(Coding::DOUBLE_E2M1, 32, Levels::One(DType::BF16), mxfp4),
            // Halves of unsigned E4M3, from 2^-10 to 224 with four significant bits.
            "NVFP4" => layout(Coding::DOUBLE_E2M1, 16, Levels::One(DType::F16), nvfp4),
            _ => return None,
        })
    }

    /// Decodes one block. Groups that the type does not have stay as they were.
    pub(super) fn decode(&self, bytes: &[u8], block: &mut Block) {
        (self.decode)(bytes, block);
    }
}

/// Names of the types whose blocks are read, for messages.
pub(super) const READ: &str =
    "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4, NVFP4";

fn f16_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// Nibbles: the low halves of the bytes are the first elements, the high halves the others.
fn halves(bytes: &[u8], to: &mut [u8]) {
    let (low, high) = to.split_at_mut(bytes.len());
    for ((byte, low), high) in bytes.iter().zip(low).zip(high) {
        *low = byte & 15;
        *high = byte >> 4;
    }
}

/// Bit `i` of `bits` as the fifth bit of element `i`.
fn fifth_bits(bits: &[u8], to: &mut [u8]) {
    for (to, bits) in to.chunks_exact_mut(8).zip(bits) {
        for (i, q) in to.iter_mut().enumerate() {
            *q |= (bits >> i & 1) << 4;
        }
    }
}

fn q4_0(bytes: &[u8], block: &mut Block) {
    block.scales.numbers[0] = f16_at(bytes, 0);
    halves(&bytes[2..18], &mut block.quants[..32]);
}

fn q4_1(bytes: &[u8], block: &mut Block) {
    block.scales.numbers[0] = f16_at(bytes, 0);
    block.biases.numbers[0] = f16_at(bytes, 2);
    halves(&bytes[4..20], &mut block.quants[..32]);
}

fn q5_0(bytes: &[u8], block: &mut Block) {
    block.scales.numbers[0] = f16_at(bytes, 0);
    halves(&bytes[6..22], &mut block.quants[..32]);
    fifth_bits(&bytes[2..6], &mut block.quants[..32]);
}

fn q5_1(bytes: &[u8], block: &mut Block) {
    block.scales.numbers[0] = f16_at(bytes, 0);
    block.biases.numbers[0] = f16_at(bytes, 2);
    halves(&bytes[8..24], &mut block.quants[..32]);
    fifth_bits(&bytes[4..8], &mut block.quants[..32]);
}

fn q8_0(bytes: &[u8], block: &mut Block) {
    block.scales.numbers[0] = f16_at(bytes, 0);
    for (q, byte) in block.quants[..32].iter_mut().zip(&bytes[2..34]) {
        // Signed plus 128.
        *q = byte ^ 0x80;
    }
}

/// The bits of 2-bit numbers: 32 bytes hold 4 runs of 32 numbers.
fn quarters(bytes: &[u8], to: &mut [u8]) {
    for (bytes, to) in bytes.chunks_exact(32).zip(to.chunks_exact_mut(128)) {
        for (shift, to) in to.chunks_exact_mut(32).enumerate() {
            for (q, byte) in to.iter_mut().zip(bytes) {
                *q = byte >> (2 * shift) & 3;
            }
        }
    }
}

fn q2_k(bytes: &[u8], block: &mut Block) {
    block.scales.factor = f16_at(bytes, 80);
    block.biases.factor = -f16_at(bytes, 82);
    for (i, byte) in bytes[..16].iter().enumerate() {
        block.scales.numbers[i] = f32::from(byte & 15);
        block.biases.numbers[i] = f32::from(byte >> 4);
    }
    quarters(&bytes[16..80], &mut block.quants);
}

fn q3_k(bytes: &[u8], block: &mut Block) {
    block.scales.factor = f16_at(bytes, 108);
    let packed = &bytes[96..108];
    for i in 0..16 {
        let low = packed[i % 8] >> (4 * (i / 8)) & 15;
        let high = packed[8 + i % 4] >> (2 * (i / 4)) & 3;
        block.scales.numbers[i] = f32::from(low | high << 4) - 32.0;
    }
    quarters(&bytes[32..96], &mut block.quants);
    for (bit, run) in block.quants.chunks_exact_mut(32).enumerate() {
        for (q, mask) in run.iter_mut().zip(&bytes[..32]) {
            *q |= (mask >> bit & 1) << 2;
        }
    }
}

/// Scales and biases of Q4_K and Q5_K: 8 of each, of 6 bits.
fn six_bits(bytes: &[u8], block: &mut Block) {
    block.scales.factor = f16_at(bytes, 0);
    block.biases.factor = -f16_at(bytes, 2);
    let packed = &bytes[4..16];
    for i in 0..8 {
        let (scale, bias) = if i < 4 {
            (packed[i] & 63, packed[i + 4] & 63)
        } else {
            (
                packed[i + 4] & 15 | packed[i - 4] >> 6 << 4,
                packed[i + 4] >> 4 | packed[i] >> 6 << 4,
            )
        };
        block.scales.numbers[i] = f32::from(scale);
        block.biases.numbers[i] = f32::from(bias);
    }
}

/// Nibbles of k-quants: 32 bytes hold two runs of 32 numbers.
fn runs(bytes: &[u8], to: &mut [u8]) {
    for (bytes, to) in bytes.chunks_exact(32).zip(to.chunks_exact_mut(64)) {
        halves(bytes, to);
    }
}

fn q4_k(bytes: &[u8], block: &mut Block) {
    six_bits(bytes, block);
    runs(&bytes[16..144], &mut block.quants);
}

fn q5_k(bytes: &[u8], block: &mut Block) {
    six_bits(bytes, block);
    runs(&bytes[48..176], &mut block.quants);
    for (bit, run) in block.quants.chunks_exact_mut(32).enumerate() {
        for (q, mask) in run.iter_mut().zip(&bytes[16..48]) {
            *q |= (mask >> bit & 1) << 4;
        }
    }
}

fn q6_k(bytes: &[u8], block: &mut Block) {
    block.scales.factor = f16_at(bytes, 208);
    for (scale, byte) in block.scales.numbers.iter_mut().zip(&bytes[192..208]) {
        *scale = f32::from(byte.cast_signed());
    }
    let low = bytes[..128].chunks_exact(64);
    let high = bytes[128..192].chunks_exact(32);
    for ((low, high), to) in low.zip(high).zip(block.quants.chunks_exact_mut(128)) {
        halves(low, to);
        for (shift, run) in to.chunks_exact_mut(32).enumerate() {
            for (q, high) in run.iter_mut().zip(high) {
                *q |= (high >> (2 * shift) & 3) << 4;
            }
        }
    }
}

const IQ4: Coding = Coding::Table([
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
]);

fn iq4_nl(bytes: &[u8], block: &mut Block) {
    block.scales.numbers[0] = f16_at(bytes, 0);
    halves(&bytes[2..18], &mut block.quants[..32]);
}

fn iq4_xs(bytes: &[u8], block: &mut Block) {
    block.scales.factor = f16_at(bytes, 0);
    let high = u16::from_le_bytes([bytes[2], bytes[3]]);
    for i in 0..8 {
        let low = bytes[4 + i / 2] >> (4 * (i % 2)) & 15;
        let scale = u16::from(low) | (high >> (2 * i) & 3) << 4;
        block.scales.numbers[i] = f32::from(scale) - 32.0;
    }
    for (bytes, to) in bytes[8..136]
        .chunks_exact(16)
        .zip(block.quants.chunks_exact_mut(32))
    {
        halves(bytes, to);
    }
}

fn mxfp4(bytes: &[u8], block: &mut Block) {
    // 2^(e - 127), halved since the values are doubled. The largest two would make weights that no f32 holds, and the last
    // is no number at all: they are given as infinite, for the caller to refuse.
    block.scales.numbers[0] = match bytes[0] {
        e @ 0..=1 => f32::from_bits(0x0020_0000 << e),
        e @ 2..=252 => f32::from_bits(u32::from(e - 1) << 23),
        _ => f32::INFINITY,
    };
    halves(&bytes[1..17], &mut block.quants[..32]);
}

fn nvfp4(bytes: &[u8], block: &mut Block) {
    for (scale, byte) in block.scales.numbers.iter_mut().zip(&bytes[..4]) {
        // Halved since the values are doubled. The largest is no number, and there is no sign: those are given as infinite, for
        // the caller to refuse.
        *scale = match (byte >> 3, f32::from(byte & 7)) {
            (0, mantissa) => mantissa / 1024.0,
            (exponent @ 1..=15, mantissa) if *byte != 0x7f => {
                (1.0 + mantissa / 8.0) * f32::from_bits((u32::from(exponent) + 119) << 23)
            }
            _ => f32::INFINITY,
        };
    }
    for (bytes, to) in bytes[4..36]
        .chunks_exact(8)
        .zip(block.quants.chunks_exact_mut(16))
    {
        halves(bytes, to);
    }
}
