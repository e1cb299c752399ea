"""Writes tests/golden/gguf, and the larger files that tests/gguf.rs looks for in target/reference/gguf.

    pip install torch numpy "transformers==5.24.0" "gguf==0.19.0" sentencepiece
    python tests/reference/to_gguf.py LLAMA_CPP [QUANTIZE]

LLAMA_CPP is llama.cpp's source, whose convert_hf_to_gguf.py is used as it is (the sdist of llama-cpp-python has it in
vendor/; 0.3.36 gives the files that are here, byte for byte). QUANTIZE is its llama-quantize, or a program that calls
llama_model_quantize of its library with the same three arguments; without it the demo target is not converted.

tests/golden/gguf:
  dense-r2.*.gguf, moe-r3.*.gguf, next-r2*.gguf
                     tiny models of random weights, with 2 and 3 value heads a key head and a multi-token-prediction head
  demo-target.q4_k_m.gguf
                     the demo target, the type most files in use have
  *.safetensors      `tokens`, and the logits that transformers gives for the model before it was converted, and with its
                     weights rounded as in the file
  blocks.safetensors random blocks of some types, and their values as the gguf package reads them; `sizes`: number, elements and bytes of
                     a block of every type
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import gguf
import numpy
import tokenizers
import torch
import transformers
from safetensors.torch import save_file

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/golden/gguf"
LARGE = ROOT / "target/reference/gguf"
DEMO = ROOT / "examples/models/demo-target"
VOCAB = 288
SPECIAL = ["<|endoftext|>", "<|im_end|>"]
SHOWN = ["<think>", "</think>"]

# The converter knows a tokenizer by what it makes of a text, and these are not among those it knows.
CONVERT = """
import runpy, sys
sys.path[:0] = [{llama!r}, {llama!r} + "/gguf-py"]
from conversion import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: {pre!r}
sys.argv = ["convert_hf_to_gguf.py", *{args!r}]
runpy.run_path({llama!r} + "/convert_hf_to_gguf.py", run_name="__main__")
"""


def convert(llama, folder, to, kind, *more, pre="qwen2"):
    args = [str(folder), "--outfile", str(to), "--outtype", kind, *more]
    code = CONVERT.format(llama=str(llama), pre=pre, args=args)
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONHASHSEED": "0"})


def tiny_tokenizer(folder):
    """Every byte, a few merges, and tokens of both kinds."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("ab", "c"), ("\u0120", "a"), ("\u0120a", "b")]
    vocab = {token: i for i, token in enumerate(alphabet + ["".join(pair) for pair in merges])}
    text = json.loads((DEMO / "tokenizer.json").read_text())
    text["model"]["vocab"] = vocab
    text["model"]["merges"] = [list(pair) for pair in merges]
    marked = text["pre_tokenizer"]["pretokenizers"][0]["pattern"]
    marked["Regex"] = (
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}"
        "| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
    )
    added = text["added_tokens"][0]
    text["added_tokens"] = [
        {**added, "id": len(vocab) + i, "content": token, "special": token in SPECIAL}
        for i, token in enumerate(SPECIAL + SHOWN)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(text))
    config = json.loads((DEMO / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {str(t["id"]): {k: t[k] for k in t if k != "id"} for t in text["added_tokens"]}
    config.pop("additional_special_tokens", None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def head(state, prefix, hidden):
    """A multi-token-prediction head: the last full attention layer with noise, and what else it needs."""
    layer = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
    made = {f"mtp.layers.0.{k}": v + 0.01 * torch.randn_like(v) for k, v in layer.items()}
    for name in ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"]:
        made[f"mtp.{name}.weight"] = 0.1 * torch.randn(hidden)
    made["mtp.fc.weight"] = 0.1 * torch.randn(hidden, 2 * hidden)
    return made


def tiny(kind, value_heads, **more):
    sizes = dict(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        layer_types=["linear_attention", "full_attention"],
        full_attention_interval=2,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        initializer_range=0.1,
        **more,
    )
    if kind == "dense":
        config = transformers.Qwen3_5TextConfig(**sizes, tie_word_embeddings=True)
        return transformers.Qwen3_5ForCausalLM(config)
    sizes |= dict(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32
    )
    if kind == "moe":
        return transformers.Qwen3_5MoeForCausalLM(transformers.Qwen3_5MoeTextConfig(**sizes))
    return transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**sizes))


def randomize(model):
    """Norms that are not one, decays that differ from head to head, biases that are not zero."""
    with torch.no_grad():
        for name, x in model.named_parameters():
            if name.endswith("A_log"):
                x.copy_(torch.linspace(-2.0, 1.5, x.numel()))
            elif name.endswith("dt_bias"):
                x.copy_(torch.linspace(-3.0, 0.5, x.numel()).flip(0))
            elif "norm" in name:
                x.add_(0.2 * torch.randn_like(x))
            # Values that f16 holds, so that a file in F16 is the same model.
            x.copy_(x.half().float())


def rounded_to_q8_0(model):
    """Rounds what the converter rounds. A head's 32 columns are a block, so that it does not matter in which order heads are."""
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    with torch.no_grad():
        for name, x in model.named_parameters():
            if x.ndim > 1 and not name.endswith(("conv1d.weight", "mlp.gate.weight", "shared_expert_gate.weight")):
                x.copy_(torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(x.numpy(), q8_0), q8_0)))


def write_tiny(llama, name, kinds, *args, **more):
    torch.manual_seed(7)
    model = tiny(*args, **more).float().eval()
    randomize(model)
    tokens = torch.randint(0, 256, (1, 40))
    made = {"tokens": tokens[0].int()}
    with torch.no_grad():
        made["f16"] = model(tokens).logits[0]
    with tempfile.TemporaryDirectory() as folder:
        # Files hold the name of their folder.
        folder = pathlib.Path(folder) / name
        folder.mkdir()
        model.save_pretrained(folder)
        state = {k: v.clone() for k, v in transformers.modeling_utils.load_state_dict(folder / "model.safetensors").items()}
        state |= head(state, "model.layers.1.", model.config.hidden_size)
        save_file({k: v.contiguous() for k, v in state.items()}, folder / "model.safetensors", {"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        config["mtp_num_hidden_layers"] = 1
        (folder / "config.json").write_text(json.dumps(config))
        tiny_tokenizer(folder)
        for kind in kinds:
            convert(llama, folder, GOLDEN / f"{name}.{kind}.gguf", kind, pre="qwen35")
        if name.startswith("moe"):
            convert(llama, folder, GOLDEN / f"{name}-fused.q8_0.gguf", "q8_0", "--fuse-gate-up-exps", pre="qwen35")
        fused = {k: v for k, v in state.items() if k.endswith("in_proj_qkvz.weight")}
        if fused:
            as_before(GOLDEN / f"{name}.f16.gguf", GOLDEN / f"{name}-old.f16.gguf", fused)
    if "q8_0" in kinds:
        rounded_to_q8_0(model)
        with torch.no_grad():
            made["q8_0"] = model(tokens).logits[0]
    save_file({k: v.contiguous() for k, v in made.items()}, GOLDEN / f"{name}.safetensors")


def as_before(new, old, fused):
    """A file as converters wrote it before they took Qwen3-Next's fused projections apart."""
    reader = gguf.GGUFReader(new)
    writer = gguf.GGUFWriter(old, "qwen3next")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kinds = field.types
            writer.add_key_value(field.name, field.contents(), kinds[0], sub_type=kinds[-1] if len(kinds) > 1 else None)
    for tensor in reader.tensors:
        block, _, part = tensor.name.removeprefix("blk.").partition(".")
        if part == "attn_qkv.weight":
            data = fused[f"model.layers.{block}.linear_attn.in_proj_qkvz.weight"].half().numpy()
            writer.add_tensor(f"blk.{block}.ssm_in.weight", data)
        elif part != "attn_gate.weight":
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def blocks():
    made = {}
    numbers = numpy.random.default_rng(11)
    for kind in ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4"]:
        type_ = gguf.GGMLQuantizationType[kind]
        block, size = gguf.GGML_QUANT_SIZES[type_]
        data = numbers.integers(0, 256, (3, 512 // block, size), dtype=numpy.uint8)
        # Scales that a model could have: f16 of 2^-14 to 1 of either sign, or a power of two.
        halves = {"Q4_1": [0, 2], "Q5_1": [0, 2], "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
        for at in [] if kind.endswith("FP4") else halves.get(kind, [0]):
            data[:, :, at + 1] = data[:, :, at + 1] & 0x83 | numbers.integers(1, 15, data.shape[:2], dtype=numpy.uint8) << 2
        if kind == "MXFP4":
            data[:, :, 0] = numbers.integers(90, 140, data.shape[:2], dtype=numpy.uint8)
            data[0, :2, 0] = [0, 1]
            data[0, 2, 0] = 252
        if kind == "NVFP4":
            data[:, :, :4] = numbers.integers(0, 127, (3, 512 // block, 4), dtype=numpy.uint8)
        data = data.reshape(3, -1)
        values = gguf.quants.dequantize(data, type_)
        made[f"{kind}.bytes"] = torch.from_numpy(data)
        made[f"{kind}.values"] = torch.from_numpy(values.astype(numpy.float32))
    sizes = [(int(type_), *size) for type_, size in gguf.GGML_QUANT_SIZES.items()]
    made["sizes"] = torch.tensor(sizes, dtype=torch.int32)
    save_file(made, GOLDEN / "blocks.safetensors")


def demo(llama, quantize):
    LARGE.mkdir(parents=True, exist_ok=True)
    for kind in ["f16", "q8_0"]:
        convert(llama, DEMO, LARGE / f"demo-target.{kind}.gguf", kind)
    convert(llama, DEMO, LARGE / "demo-target-split.gguf", "f16", "--split-max-tensors", "40")
    for kind in ["Q4_K_M", "Q4_K_S", "Q5_K_M", "Q6_K", "Q2_K", "Q3_K_M", "IQ4_XS", "IQ4_NL", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]:
        to = LARGE / f"demo-target.{kind.lower()}.gguf"
        subprocess.run([quantize, LARGE / "demo-target.f16.gguf", to, kind], check=True)
    shutil.copy(LARGE / "demo-target.q4_k_m.gguf", GOLDEN)


def main():
    llama = pathlib.Path(sys.argv[1]).resolve()
    GOLDEN.mkdir(parents=True, exist_ok=True)
    blocks()
    write_tiny(llama, "dense-r2", ["f16", "q8_0"], "dense", 4)
    write_tiny(llama, "moe-r3", ["f16", "q8_0"], "moe", 6)
    write_tiny(llama, "next-r2", ["f16"], "next", 4)
    if len(sys.argv) > 2:
        demo(llama, sys.argv[2])


main()
