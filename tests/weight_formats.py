"""Tiny checkpoints in every format in which quantized weights are released, each with the plain numbers it stands for.

The numbers of a twin are computed here from the codes and scales that are written, by the definition of each format.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
Tensors = dict[str, torch.Tensor]
Store = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]
"""Of a module's name and its weight: what is stored, and the weight that it stands for."""


@dataclass(frozen=True)
class Released:
    """`stated`: the quantization_config. `store`: how a weight is written. `experts_alone`: only those are quantized.
    `beside`: ModelOpt's own file has the statement."""

    stated: dict[str, Any]
    store: Store
    experts_alone: bool = False
    own_file: bool = False


def fp8(rows: int, columns: int, scale_name: str = "weight_scale", *, more: int = 0, static: bool = False) -> Store:
    """Blocks of `rows` x `columns` with a scale each; 0: all. `more`: dims of 1 behind both. `static`: with a scale of
    activations."""

    def store(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        outputs, inputs = weight.shape
        height, width = rows or outputs, columns or inputs
        blocks = weight.unflatten(1, (-1, width)).unflatten(0, (-1, height))
        scale = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        plain = (codes.float() * scale[:, None, :, None]).view(outputs, inputs)
        if not rows and not columns:
            scale = scale.view(())
        made = {f"{module}.weight": codes.view(outputs, inputs)}
        made[f"{module}.{scale_name}"] = scale[:, None, :, None].contiguous() if more else scale.contiguous()
        if static:
            made[f"{module}.input_scale"] = torch.tensor(0.5)
        return made, plain

    return store


def quark_mxfp4(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Two 4-bit floats a byte, the first in the low half, and the exponent of two of each 32."""
    runs = weight.unflatten(1, (-1, 32))
    exponent = torch.floor(torch.log2(runs.abs().amax(-1))) - 2
    scaled = runs / torch.exp2(exponent)[..., None]
    index = (scaled.abs()[..., None] - FP4).abs().argmin(-1)
    plain = FP4[index] * scaled.sign() * torch.exp2(exponent)[..., None]
    codes = (index + 8 * (scaled < 0)).to(torch.uint8).flatten(1)
    made = {f"{module}.weight": codes[:, ::2] | codes[:, 1::2] << 4}
    made[f"{module}.weight_scale"] = (exponent + 127).to(torch.uint8)
    return made, plain.flatten(1)


def packed_int4(group: int = 32, scales: torch.dtype = torch.bfloat16) -> Store:
    """Eight integers an int32, each plus 8, the first in the lowest bits; a scale for each `group`, 0: for each row.
    Their product is rounded to the type of the scales."""

    def store(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        groups = weight.unflatten(1, (-1, group or weight.shape[1]))
        scale = (groups.abs().amax(-1) / 7).to(scales)
        numbers = (groups / scale[..., None].float()).round().clamp(-8, 7).to(torch.int64)
        shifted = (numbers + 8).flatten(1).unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)
        made = {f"{module}.weight_packed": shifted.sum(-1).to(torch.uint32).view(torch.int32)}
        made[f"{module}.weight_scale"] = scale
        made[f"{module}.weight_shape"] = torch.tensor(weight.shape)
        return made, (numbers.to(scales) * scale[..., None]).float().flatten(1)

    return store


def compressed(weights: dict[str, Any], form: str, ignore: list[str]) -> dict[str, Any]:
    """What compressed-tensors writes."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": ignore}


def float8(strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "group_size": None, **more}
    return compressed(weights, "float-quantized", ["lm_head", "re:.*mlp.gate$"])


def quark(weight: dict[str, Any], exclude: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight, "input_tensors": None, "bias": None},
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": exclude,
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
    }


MXFP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "ch_axis": -1, "scale_format": "e8m0"}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "actorder": None}
DENSE = [f"*.mlp.{name}_proj" for name in ("gate", "up", "down")]
# As Kimi-K2.5 is released.
KIMI = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
FORMATS = {
    "fp8 block": Released({"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8(128, 128, "weight_scale_inv")),
    "fp8 tensor": Released({"quant_method": "fp8", "activation_scheme": "static"}, fp8(0, 0, static=True)),
    "fbgemm_fp8": Released({"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}, fp8(1, 0)),
    "compressed-tensors block": Released(float8("block", block_structure=[128, 128]), fp8(128, 128)),
    "compressed-tensors channel": Released(float8("channel"), fp8(1, 0)),
    "compressed-tensors tensor": Released(float8("tensor"), fp8(0, 0, static=True)),
    "modelopt tensor": Released({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, fp8(0, 0)),
    "modelopt channel": Released({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, fp8(1, 0)),
    "modelopt block": Released({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, fp8(128, 128, more=1)),
    "modelopt beside": Released(
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
        fp8(0, 0, static=True),
        own_file=True,
    ),
    "quark fp8": Released(quark({"dtype": "fp8_e4m3", "qscheme": "per_tensor"}, ["lm_head"]), fp8(0, 0, static=True)),
    "quark mxfp4": Released(quark(MXFP4, ["lm_head", "re:.*gate$"]), quark_mxfp4),
    "quark mxfp4 experts": Released(quark(MXFP4, ["lm_head", "*self_attn*", *DENSE]), quark_mxfp4, experts_alone=True),
    "compressed-tensors int4": Released(compressed(INT4, "pack-quantized", KIMI), packed_int4(), experts_alone=True),
    "compressed-tensors int4 by 128": Released(
        compressed(INT4 | {"group_size": 128}, "pack-quantized", ["lm_head", "re:.*mlp.gate$"]), packed_int4(128)
    ),
    "compressed-tensors int4 channel": Released(
        compressed(INT4 | {"strategy": "channel", "group_size": None}, "pack-quantized", ["lm_head", "re:.*mlp.gate$"]),
        packed_int4(0),
    ),
}


def write_released(plain: Path, directory: Path, released: Released) -> Path:
    """Write `directory`: the checkpoint `plain` in a released format; and beside it, `directory`-plain, its numbers."""
    twin = directory.with_name(directory.name + "-plain")
    config = json.loads((plain / "config.json").read_text())
    stored: Tensors = {}
    numbers: Tensors = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        module = name.removesuffix(".weight")
        wanted = ".experts." in name if released.experts_alone else module.endswith("_proj")
        made, numbers[name] = released.store(module, tensor) if wanted else ({name: tensor}, tensor)
        stored |= made
    for path, tensors in ((directory, stored), (twin, numbers)):
        path.mkdir()
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(config))
    if released.own_file:
        (directory / "hf_quant_config.json").write_text(json.dumps(released.stated))
    else:
        (directory / "config.json").write_text(json.dumps(config | {"quantization_config": released.stated}))
    return twin
