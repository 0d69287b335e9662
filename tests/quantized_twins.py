"""Checkpoints whose matrices are quantized, made of plain ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from allotrope.ops.matmul.fp8 import Fp8
from allotrope.ops.matmul.mxfp4 import MXFP4

NOT_QUANTIZED = (
    "embed",
    "lm_head",
    "head.weight",
    "norm",
    "conv",
    "gate.weight",
    "router",
    "A_log",
    "hc_",
    "ape",
    "weights_proj",
)


def write_twin(plain: Path, twin: Path, *, block: int = 16, mxfp4: bool = False, scheme: str = "block") -> Path:
    """Write `twin`: `plain` with FP8 matrices, or with the experts of a gpt-oss in MXFP4.

    `scheme`: a scale for each `block` x `block` numbers, or "channel", for each row.
    """
    twin.mkdir()
    config = json.loads((plain / "config.json").read_text())
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(plain.glob("model*.safetensors")):
        for name, tensor in load_file(path).items():
            if mxfp4 and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                made = MXFP4.quantize(tensor.transpose(1, 2))
                tensors[name + "_blocks"] = made.values.unflatten(-1, (-1, 16)).contiguous()
                tensors[name + "_scales"] = made.scales
            elif (
                not mxfp4
                and tensor.dim() == 2
                and tensor.is_floating_point()
                and not any(part in name for part in NOT_QUANTIZED)
            ):
                made = Fp8(block if scheme == "block" else 0).quantize(tensor, block)
                tensors[name] = made.values
                scales = made.scales[::block] if scheme == "block" else made.scales
                tensors[name.removesuffix(".weight") + ".weight_scale_inv"] = scales.contiguous()
            else:
                tensors[name] = tensor.contiguous()
    stated = {"quant_method": "mxfp4" if mxfp4 else "fp8"}
    config["quantization_config"] = stated | ({"weight_block_size": [block, block]} if scheme == "block" else {})
    (twin / "config.json").write_text(json.dumps(config))
    save_file(tensors, twin / "model.safetensors")
    for other in plain.iterdir():
        if not other.name.startswith("model") and not (twin / other.name).exists() and other.is_file():
            shutil.copy(other, twin / other.name)
    return twin
