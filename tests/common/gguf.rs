//! GGUF files written by a test, right or wrong.
#![allow(dead_code, unreachable_pub)]

/// A value of the metadata.
#[derive(Debug, Clone)]
pub enum Value {
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    Text(String),
    U64(u64),
    Texts(Vec<String>),
    I32s(Vec<i32>),
    Bools(Vec<bool>),
}

/// A tensor: its name, its dimensions outermost first, the number of its type, its data.
#[derive(Debug, Clone)]
pub struct Spec {
    pub name: String,
    pub shape: Vec<u64>,
    pub kind: u32,
    pub data: Vec<u8>,
}

/// A file to be.
#[derive(Debug, Clone, Default)]
pub struct File {
    pub metadata: Vec<(String, Value)>,
    pub tensors: Vec<Spec>,
}

pub fn text(value: &str) -> Value {
    Value::Text(value.to_owned())
}

impl Spec {
    pub fn f32(name: &str, shape: &[u64], number: impl Fn(u64) -> f32) -> Self {
        let count: u64 = shape.iter().product();
        Self {
            name: name.to_owned(),
            shape: shape.to_vec(),
            kind: 0,
            data: (0..count).flat_map(|i| number(i).to_le_bytes()).collect(),
        }
    }
}

impl File {
    /// A whole model of two blocks, a linear one and a full one, with as many value heads as key heads, and a head beside. All
    /// in F32, of one number each.
    pub fn model() -> Self {
        let mut file = Self::default();
        for (key, value) in [
            ("general.architecture", text("qwen35")),
            ("qwen35.block_count", Value::U32(3)),
            ("qwen35.nextn_predict_layers", Value::U32(1)),
            ("qwen35.context_length", Value::U32(64)),
            ("qwen35.embedding_length", Value::U32(8)),
            ("qwen35.feed_forward_length", Value::U32(12)),
            ("qwen35.attention.head_count", Value::U32(2)),
            ("qwen35.attention.head_count_kv", Value::U32(1)),
            ("qwen35.attention.key_length", Value::U32(8)),
            ("qwen35.attention.value_length", Value::U32(8)),
            ("qwen35.attention.layer_norm_rms_epsilon", Value::F32(1e-6)),
            ("qwen35.rope.freq_base", Value::F32(1e7)),
            ("qwen35.rope.dimension_count", Value::U32(2)),
            ("qwen35.full_attention_interval", Value::U32(2)),
            ("qwen35.ssm.conv_kernel", Value::U32(4)),
            ("qwen35.ssm.state_size", Value::U32(4)),
            ("qwen35.ssm.group_count", Value::U32(1)),
            ("qwen35.ssm.time_step_rank", Value::U32(2)),
            ("qwen35.ssm.inner_size", Value::U32(8)),
            ("tokenizer.ggml.model", text("gpt2")),
            ("tokenizer.ggml.pre", text("qwen35")),
            (
                "tokenizer.ggml.tokens",
                Value::Texts(
                    ["a", "b", "ab", "<|im_end|>", "<think>", "[PAD5]"]
                        .map(str::to_owned)
                        .to_vec(),
                ),
            ),
            ("tokenizer.ggml.token_type", Value::I32s(vec![1, 1, 1, 3, 4, 5])),
            ("tokenizer.ggml.merges", Value::Texts(vec!["a b".to_owned()])),
            ("tokenizer.ggml.eos_token_id", Value::U32(3)),
            (
                "tokenizer.chat_template",
                text("{{ messages[0].content }}{{ eos_token }}"),
            ),
        ] {
            file.metadata.push((key.to_owned(), value));
        }
        let mut add = |name: &str, shape: &[u64], number: f32| {
            file.tensors
                .push(Spec::f32(name, shape, |i| number + i as f32 / 1024.0));
        };
        add("token_embd.weight", &[6, 8], 0.1);
        add("output_norm.weight", &[8], 1.0);
        for block in 0..3 {
            let mut add =
                |name: &str, shape: &[u64], number| add(&format!("blk.{block}.{name}"), shape, number);
            add("attn_norm.weight", &[8], 1.0);
            add("post_attention_norm.weight", &[8], 1.0);
            add("ffn_gate.weight", &[12, 8], 0.1);
            add("ffn_up.weight", &[12, 8], 0.1);
            add("ffn_down.weight", &[8, 12], 0.1);
            if block == 0 {
                add("attn_qkv.weight", &[16, 8], 0.1);
                add("attn_gate.weight", &[8, 8], 0.1);
                add("ssm_beta.weight", &[2, 8], 0.1);
                add("ssm_alpha.weight", &[2, 8], 0.1);
                add("ssm_conv1d.weight", &[16, 4], 0.1);
                add("ssm_a", &[2], -0.5);
                add("ssm_dt.bias", &[2], 0.1);
                add("ssm_norm.weight", &[4], 1.0);
                add("ssm_out.weight", &[8, 8], 0.1);
                continue;
            }
            add("attn_q.weight", &[32, 8], 0.1);
            add("attn_k.weight", &[8, 8], 0.1);
            add("attn_v.weight", &[8, 8], 0.1);
            add("attn_output.weight", &[8, 16], 0.1);
            add("attn_q_norm.weight", &[8], 1.0);
            add("attn_k_norm.weight", &[8], 1.0);
            if block == 2 {
                add("nextn.eh_proj.weight", &[8, 16], 0.1);
                add("nextn.enorm.weight", &[8], 1.0);
                add("nextn.hnorm.weight", &[8], 1.0);
                add("nextn.shared_head_norm.weight", &[8], 1.0);
            }
        }
        file
    }

    /// Sets a value of the metadata.
    pub fn set(&mut self, key: &str, value: Value) {
        self.unset(key);
        self.metadata.push((key.to_owned(), value));
    }

    /// Leaves a key out.
    pub fn unset(&mut self, key: &str) {
        self.metadata.retain(|(found, _)| found != key);
    }

    pub fn tensor(&mut self, name: &str) -> &mut Spec {
        let found = self.tensors.iter_mut().find(|tensor| tensor.name == name);
        found.unwrap_or_else(|| panic!("no tensor {name}"))
    }

    /// The file's bytes: little-endian, version 3, data in the order of the tensors, each at a multiple of 32.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(3_u32.to_le_bytes());
        bytes.extend((self.tensors.len() as u64).to_le_bytes());
        bytes.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            put_text(&mut bytes, key);
            put(&mut bytes, value);
        }
        let mut at = 0_u64;
        for tensor in &self.tensors {
            put_text(&mut bytes, &tensor.name);
            bytes.extend((tensor.shape.len() as u32).to_le_bytes());
            for size in tensor.shape.iter().rev() {
                bytes.extend(size.to_le_bytes());
            }
            bytes.extend(tensor.kind.to_le_bytes());
            bytes.extend(at.to_le_bytes());
            at = (at + tensor.data.len() as u64).next_multiple_of(32);
        }
        for tensor in &self.tensors {
            bytes.resize(bytes.len().next_multiple_of(32), 0);
            bytes.extend(&tensor.data);
        }
        bytes
    }
}

fn put_text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}

fn put(bytes: &mut Vec<u8>, value: &Value) {
    let array = |bytes: &mut Vec<u8>, kind: u32, count: usize| {
        bytes.extend(9_u32.to_le_bytes());
        bytes.extend(kind.to_le_bytes());
        bytes.extend((count as u64).to_le_bytes());
    };
    let scalar = |bytes: &mut Vec<u8>, kind: u32, value: &[u8]| {
        bytes.extend(kind.to_le_bytes());
        bytes.extend(value);
    };
    match value {
        Value::U32(x) => scalar(bytes, 4, &x.to_le_bytes()),
        Value::I32(x) => scalar(bytes, 5, &x.to_le_bytes()),
        Value::F32(x) => scalar(bytes, 6, &x.to_le_bytes()),
        Value::Bool(x) => scalar(bytes, 7, &[u8::from(*x)]),
        Value::U64(x) => scalar(bytes, 10, &x.to_le_bytes()),
        Value::Text(x) => {
            bytes.extend(8_u32.to_le_bytes());
            put_text(bytes, x);
        }
        Value::Texts(x) => {
            array(bytes, 8, x.len());
            x.iter().for_each(|x| put_text(bytes, x));
        }
        Value::I32s(x) => {
            array(bytes, 5, x.len());
            bytes.extend(x.iter().flat_map(|x| x.to_le_bytes()));
        }
        Value::Bools(x) => {
            array(bytes, 7, x.len());
            bytes.extend(x.iter().map(|x| u8::from(*x)));
        }
    }
}
