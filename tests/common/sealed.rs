//! Cache files that were changed, with a digest that is right again: what is in them is read only behind that.
#![allow(unreachable_pub)]

use std::collections::BTreeMap;

use recant::candle::DType;
use safetensors::SafeTensors;

const FIELD: &str = "\"digest\":\"";

/// The file with the digest that its contents have; None for what is no safetensors file, or has no digest.
pub fn sealed(bytes: &[u8]) -> Option<Vec<u8>> {
    let (length, header) = SafeTensors::read_metadata(bytes).ok()?;
    let file = SafeTensors::deserialize(bytes).ok()?;
    let mut fields: BTreeMap<&String, &String> = header.metadata().as_ref()?.iter().collect();
    fields.retain(|name, _| *name != "digest");
    let mut digest = Digest([0x9e37_79b9_7f4a_7c15, 0xc2b2_ae3d_27d4_eb4f]);
    for text in fields.iter().flat_map(|(name, value)| [name, value]) {
        digest.field(text.as_bytes());
    }
    let mut names = file.names();
    names.sort_unstable();
    for name in names {
        let view = file.tensor(name).ok()?;
        digest.field(name.as_bytes());
        digest.field(DType::try_from(view.dtype()).ok()?.as_str().as_bytes());
        for size in view.shape() {
            digest.word(*size as u64);
        }
        digest.field(view.data());
    }
    let header = std::str::from_utf8(&bytes[8..8 + length]).ok()?;
    let start = header.find(FIELD)? + FIELD.len();
    let end = start + header[start..].find('"')?;
    let [a, b] = digest.0;
    let header = format!("{}{a:016x}{b:016x}{}", &header[..start], &header[end..]);
    let rest = &bytes[8 + length..];
    Some([&(header.len() as u64).to_le_bytes(), header.as_bytes(), rest].concat())
}

/// Two checksums over words of 8 bytes.
struct Digest([u64; 2]);

impl Digest {
    fn field(&mut self, bytes: &[u8]) {
        self.word(bytes.len() as u64);
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.word(u64::from_le_bytes(word));
        }
    }

    fn word(&mut self, word: u64) {
        let [a, b] = &mut self.0;
        *a = (*a ^ word).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(29);
        *b = (b.rotate_left(31) ^ word).wrapping_mul(0xff51_afd7_ed55_8ccd);
    }
}
