#!/usr/bin/env python3
"""Writes what mlx and mlx-lm give, for tests/mlx.rs.

    python3 -m venv venv && venv/bin/pip install 'mlx[cpu]==0.32.4' mlx-lm==0.32.2
    venv/bin/python tests/reference/from_mlx.py

tests/golden/mlx/packings.safetensors   every mode, number of bits, group and type of scales: what mlx.quantize packs
                                        (`weight`, `scales`, `biases`, `global_scale`) and what mlx.dequantize makes of it
tests/golden/mlx/4bit/                  the demo target, converted by mlx-lm to 4 bits in groups of 64; two matrices in
                                        8 bits, one in mxfp4, one left as it is; its tokens after a prompt, by mlx-lm
target/reference/mlx/                   more conversions of the demo target, too large to be kept, likewise
"""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import mlx_lm
from mlx_lm.models import cache as caches
from mlx_lm.utils import load
from mlx_lm.convert import convert

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/golden/mlx"
LARGE = ROOT / "target/reference/mlx"
SOURCE = ROOT / "examples/models/demo-target"
ROWS, FEATURES = 3, 256
TOKENS = 48
PROMPT = "def read_lines(path):\n    "

mx.set_default_device(mx.cpu)


def packings():
    """Numbers are random, with a row of one value and one of large and small ones."""
    mx.random.seed(1)
    plain = mx.random.normal((ROWS, FEATURES))
    plain[1] = 0.25
    plain[2] = plain[2] * mx.exp(2 * mx.random.normal((FEATURES,)))
    out = {}

    def put(name, weight, group, bits, mode, dtype, global_scale=None):
        extra = {} if global_scale is None else {"global_scale": global_scale}
        packed, scales, *biases = mx.quantize(weight, group, bits, mode=mode, **extra)
        out[f"{name}.weight"], out[f"{name}.scales"] = packed, scales
        if biases:
            out[f"{name}.biases"] = biases[0]
        if global_scale is not None:
            out[f"{name}.global_scale"] = global_scale
        numbers = mx.dequantize(
            packed, scales, biases[0] if biases else None, group, bits, mode=mode, dtype=dtype, **extra
        )
        out[f"{name}.expected"] = numbers.astype(mx.float32)

    for bits in [2, 3, 4, 5, 6, 8]:
        for group in [32, 64, 128]:
            put(f"affine.{bits}.{group}.f32", plain, group, bits, "affine", mx.float32)
        for name, dtype in [("f16", mx.float16), ("bf16", mx.bfloat16)]:
            put(f"affine.{bits}.64.{name}", plain.astype(dtype), 64, bits, "affine", dtype)
    for mode, group, bits in [("mxfp4", 32, 4), ("nvfp4", 16, 4), ("mxfp8", 32, 8)]:
        put(f"{mode}.{bits}.{group}.u8", plain, group, bits, mode, mx.float32)
    put("nvfp4.4.16.global", plain * 900, 16, 4, "nvfp4", mx.float32, mx.max(mx.abs(plain * 900)))
    mx.save_safetensors(str(GOLDEN / "packings.safetensors"), out)


def overrides(path, _):
    """Two modules in 8 bits, one in mxfp4, one not at all."""
    if path.endswith("layers.0.mlp.down_proj") or path.endswith("layers.3.self_attn.q_proj"):
        return {"group_size": 32, "bits": 8}
    if path.endswith("layers.5.mlp.gate_proj"):
        return {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    return not path.endswith("layers.1.linear_attn.out_proj")


def tokens(folder):
    """Greedy tokens and the logits that chose them, one token a call, in f32."""
    model, tokenizer = load(str(folder))
    model.set_dtype(mx.float32)
    ids = tokenizer.encode(PROMPT)
    state = caches.make_prompt_cache(model)
    text, margins, fed = list(ids), [], ids
    for _ in range(TOKENS):
        logits = model(mx.array([fed]), cache=state)[0, -1].astype(mx.float32)
        best = mx.argsort(-logits)[:2].tolist()
        margins.append((logits[best[0]] - logits[best[1]]).item())
        text.append(best[0])
        fed = [best[0]]
    return {"prompt": ids, "tokens": text[len(ids) :], "margins": margins}


def converted(folder, **options):
    if folder.exists():
        shutil.rmtree(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    convert(str(SOURCE), str(folder), quantize=True, **options)
    # The tokenizer is the source's.
    keep = {"config.json", "model.safetensors", "generation_config.json"}
    answer = tokens(folder)
    for file in folder.iterdir():
        if file.name not in keep:
            file.unlink()
    (folder / "expected.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    print("mlx", mx.__version__, "mlx-lm", mlx_lm.__version__)
    GOLDEN.mkdir(parents=True, exist_ok=True)
    packings()
    converted(GOLDEN / "4bit", q_bits=4, q_group_size=64, quant_predicate=overrides)
    for mode in ["mxfp4", "nvfp4", "mxfp8"]:
        converted(LARGE / mode, q_mode=mode)
    for bits in [3, 6, 8]:
        converted(LARGE / f"{bits}bit", q_bits=bits)
