//! Text to ids and back, as a user of the facade sees it.

use std::path::Path;

use recant::Text;
use serde_json::{json, Value};
use tempfile::TempDir;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn tokenizer() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/models/demo-target/tokenizer.json")
}

#[test]
fn truncation_and_padding_of_a_tokenizer_file_cut_no_prompt() -> Result<()> {
    let plain = Text::load(tokenizer())?;
    let mut file: Value = serde_json::from_str(&std::fs::read_to_string(tokenizer())?)?;
    file["truncation"] = json!({
        "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0
    });
    file["padding"] = json!({
        "strategy": { "Fixed": 64 }, "direction": "Left", "pad_to_multiple_of": null, "pad_id": 8187,
        "pad_type_id": 0, "pad_token": "<|endoftext|>"
    });
    let dir = TempDir::new()?;
    let path = dir.path().join("tokenizer.json");
    std::fs::write(&path, file.to_string())?;
    let prompt = "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n";
    let ids = Text::load(path)?.encode(prompt)?;
    assert!(ids.len() > 4);
    assert_eq!(ids, plain.encode(prompt)?);
    assert_eq!(plain.decode(&ids)?, prompt);
    Ok(())
}
