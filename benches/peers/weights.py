"""Random weights in the shape of Qwen3.5-0.8B as GGUF files for llama.cpp.

The distributions are those of recant's own random model (tests/common/seeded.rs), so activations are of ordinary size. The
values come from another generator: no kernel's time depends on them.
"""

import zlib

import gguf
import numpy as np

ARCH = "qwen35"
HIDDEN, FFN, LAYERS, VOCAB = 1024, 3584, 24, 248_320
HEADS, KV_HEADS, HEAD_DIM, ROTARY = 8, 2, 256, 64
LINEAR_HEADS, LINEAR_DIM, CONV = 16, 128, 4
FULL_EVERY = 4
SEED = 1

TYPES = {
    "bf16": gguf.GGMLQuantizationType.BF16,
    "int8": gguf.GGMLQuantizationType.Q8_0,
    "int4": gguf.GGMLQuantizationType.Q4_0,
}


def tensors():
    """Names and shapes ([out, in] as in numpy) of all tensors. The output head is the token embedding."""
    linear = LINEAR_HEADS * LINEAR_DIM
    yield "token_embd.weight", (VOCAB, HIDDEN)
    yield "output_norm.weight", (HIDDEN,)
    for layer in range(LAYERS):
        block = {
            "attn_norm.weight": (HIDDEN,),
            "post_attention_norm.weight": (HIDDEN,),
            "ffn_gate.weight": (FFN, HIDDEN),
            "ffn_up.weight": (FFN, HIDDEN),
            "ffn_down.weight": (HIDDEN, FFN),
        }
        if (layer + 1) % FULL_EVERY == 0:
            block |= {
                "attn_q.weight": (2 * HEADS * HEAD_DIM, HIDDEN),  # each head's query, then its gate
                "attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
                "attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
                "attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
                "attn_q_norm.weight": (HEAD_DIM,),
                "attn_k_norm.weight": (HEAD_DIM,),
            }
        else:
            block |= {
                "attn_qkv.weight": (3 * linear, HIDDEN),
                "attn_gate.weight": (linear, HIDDEN),
                "ssm_alpha.weight": (LINEAR_HEADS, HIDDEN),
                "ssm_beta.weight": (LINEAR_HEADS, HIDDEN),
                "ssm_conv1d.weight": (3 * linear, CONV),
                "ssm_a": (LINEAR_HEADS,),
                "ssm_dt.bias": (LINEAR_HEADS,),
                "ssm_norm.weight": (LINEAR_DIM,),
                "ssm_out.weight": (HIDDEN, linear),
            }
        for name, shape in block.items():
            yield f"blk.{layer}.{name}", shape


def is_matrix(name, shape):
    """Whether a tensor is stored in the file's type; all others stay f32."""
    return len(shape) == 2 and not name.endswith("ssm_conv1d.weight")


def values(name, shape):
    """A tensor as llama.cpp expects it: norms are 1 + w, and `ssm_a` is -exp(A_log)."""
    random = np.random.default_rng([SEED, zlib.crc32(name.encode())])

    def uniform(low, high):
        return random.random(shape, dtype=np.float32) * np.float32(high - low) + np.float32(low)

    if name.endswith("ssm_a"):
        return -np.exp(uniform(-1.0, 1.5))
    if name.endswith("ssm_dt.bias"):
        return uniform(-2.0, 1.0)
    if name.endswith("ssm_norm.weight"):
        return uniform(0.6, 1.4)
    if name.endswith("ssm_conv1d.weight"):
        return uniform(-0.8, 0.8)
    if name == "token_embd.weight":
        return uniform(-1.0, 1.0)
    if len(shape) == 1:
        return 1 + uniform(-0.17, 0.17)
    bound = (3 / shape[-1]) ** 0.5  # variance 1 / width
    return uniform(-bound, bound)


def metadata(writer):
    """What llama.cpp needs to know of the model. Without a vocabulary it makes up as many nameless tokens."""
    writer.add_context_length(262_144)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e7)
    writer.add_rope_dimension_count(ROTARY)
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_full_attention_interval(FULL_EVERY)
    writer.add_ssm_conv_kernel(CONV)
    writer.add_ssm_state_size(LINEAR_DIM)
    writer.add_ssm_group_count(LINEAR_HEADS)
    writer.add_ssm_time_step_rank(LINEAR_HEADS)
    writer.add_ssm_inner_size(LINEAR_HEADS * LINEAR_DIM)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("no_vocab")


def write(path, width):
    """Writes the model with its matrices in the type that stands for `width` (a key of TYPES)."""
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, ARCH)
    metadata(writer)
    for name, shape in tensors():
        kind = TYPES[width] if is_matrix(name, shape) else gguf.GGMLQuantizationType.F32
        block, size = gguf.GGML_QUANT_SIZES[kind]
        nbytes = int(np.prod(shape)) // block * size
        writer.add_tensor_info(name, shape, np.float32, nbytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, shape in tensors():
        tensor = values(name, shape)
        if is_matrix(name, shape):
            tensor = gguf.quantize(tensor, TYPES[width])
        writer.write_tensor_data(tensor)
    writer.close()
    partial.rename(path)
