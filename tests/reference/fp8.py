#!/usr/bin/env python3
"""Writes matrices in FP8 and NVFP4 as releases of the Hub store them, for tests/fp8.rs.

    python3 -m venv venv && venv/bin/pip install compressed-tensors==0.20.0 nvidia-modelopt==0.47.0 requests
    venv/bin/python tests/reference/fp8.py

tests/golden/fp8/matrices.safetensors   of each matrix its parts, named as in a release, and `expected`: its numbers in f32
tests/golden/fp8/matrices.json          of each matrix the `quantization_config` of its release

Numbers are made of codes by the programs that make such releases, in f32: compressed-tensors for what it stores, ModelOpt for
its NVFP4. Blocks of `weight_scale_inv` are multiplied here as transformers does it.
"""

import json
from importlib.metadata import version
from pathlib import Path

import torch
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from safetensors.torch import save_file

GOLDEN = Path(__file__).resolve().parents[2] / "tests/golden/fp8"
FP8 = torch.float8_e4m3fn
tensors, configs = {}, {}


def put(name, config, expected, **parts):
    configs[name] = config
    for end, part in {**parts, "expected": expected.float()}.items():
        tensors[f"{name}.{end}"] = part.clone()


def codes(*shape):
    """Any codes but those of no number."""
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x7E
    return codes.view(FP8)


def scales(shape, dtype):
    return torch.empty(shape).uniform_(1e-4, 3e-3).to(dtype)


def blocks(name, shape, block, dtype, config):
    weight = codes(*shape)
    scale = scales([-(-n // size) for n, size in zip(shape, block)], dtype)
    wide = scale.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    put(name, config, weight.float() * wide[: shape[0], : shape[1]], weight=weight, weight_scale_inv=scale)


def fp8(block):
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": block,
        "modules_to_not_convert": ["lm_head"],
    }


def compressed(form, **weights):
    weights = {"type": "float", "symmetric": True, "dynamic": False, **weights}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "transform_config": {},
        "sparsity_config": {},
    }


def scaled(name, shape, scale_shape, dtype, config):
    """FP8 of compressed-tensors."""
    weight, scale = codes(*shape), scales(scale_shape, dtype)
    args = QuantizationArgs(**config["config_groups"]["group_0"]["weights"])
    expected = dequantize(weight, scale.float(), args=args, dtype=torch.float32)
    put(name, config, expected, weight=weight, weight_scale=scale)


def nvfp4(name, rows, columns, factor):
    packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    scale = torch.empty(rows, columns // 16).uniform_(0.01, 448).to(FP8)
    # The smallest and the largest.
    scale[0, 0], scale[0, 1] = 2.0**-9, 448.0

    divisor = torch.tensor([1 / factor])
    config = compressed(
        "nvfp4-pack-quantized", num_bits=4, strategy="tensor_group", group_size=16, scale_dtype=None, zp_dtype=None
    )
    args = QuantizationArgs(**config["config_groups"]["group_0"]["weights"])
    unpacked = unpack_fp4_from_uint8(packed, rows, columns, dtype=torch.float32)
    expected = dequantize(unpacked, scale.float(), args=args, dtype=torch.float32, global_scale=divisor)
    more = {"weight_global_scale": divisor, "input_global_scale": torch.tensor([12.5])}
    put(f"packed.{name}", config, expected, weight_packed=packed, weight_scale=scale, **more)

    factor = torch.tensor(factor)
    config = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "ignore": ["lm_head"],
        "producer": {"name": "modelopt", "version": version("nvidia-modelopt")},
    }
    quantized = NVFP4QTensor(torch.Size([rows, columns]), torch.float32, packed)
    expected = quantized.dequantize(torch.float32, scale=scale, double_scale=factor, block_sizes={-1: 16})
    more = {"weight_scale_2": factor, "input_scale": torch.tensor(0.25)}
    put(f"modelopt.{name}", config, expected, weight=packed, weight_scale=scale, **more)


if __name__ == "__main__":
    torch.manual_seed(1)
    # Blocks that are cut short, at the ends of rows and of columns.
    blocks("blocks", (132, 160), (128, 128), torch.bfloat16, fp8([128, 128]))
    blocks("blocks.f32", (40, 96), (32, 64), torch.float32, fp8([32, 64]))
    blocks("blocks.undeclared", (129, 128), (128, 128), torch.bfloat16, None)
    # Rows and groups that kernels do not read.
    blocks("blocks.narrow", (20, 100), (16, 48), torch.float32, fp8([16, 48]))
    blocks("blocks.odd", (20, 96), (16, 40), torch.bfloat16, fp8([16, 40]))
    channel = compressed("float-quantized", num_bits=8, strategy="channel")
    scaled("rows", (12, 64), (12, 1), torch.bfloat16, channel)
    scaled("rows.f32", (12, 64), (12, 1), torch.float32, channel)
    scaled("rows.narrow", (12, 40), (12, 1), torch.bfloat16, channel)
    scaled("one", (12, 64), (1,), torch.float32, compressed("float-quantized", num_bits=8, strategy="tensor"))
    block = compressed("float-quantized", num_bits=8, strategy="block", block_structure=[128, 128])
    scaled("blocks.compressed", (8, 256), (1, 2), torch.bfloat16, block)
    nvfp4("wide", 24, 96, 0.0012345)
    nvfp4("narrow", 6, 48, 0.031)

    GOLDEN.mkdir(parents=True, exist_ok=True)
    save_file(tensors, GOLDEN / "matrices.safetensors")
    (GOLDEN / "matrices.json").write_text(json.dumps(configs, indent=1) + "\n")
    for name in ["torch", "compressed-tensors", "nvidia-modelopt"]:
        print(name, version(name))
