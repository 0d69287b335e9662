"""Quantized twins of trained models, in the released layouts: MXFP4 experts, and FP8 in blocks of 128 x 128.

    python -m train.quantize /tmp/models/gpt_oss /tmp/models/qwen3_moe --publish train/models

writes `gpt_oss_mxfp4` and `qwen3_moe_fp8` beside them, and each model in the form in which it is published to
`train/models`.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

FP4_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FP4_GROUP, FP8_BLOCK = 32, 128
FP8_MAX = 448.0
# What releases in FP8 keep in bf16: embeddings, heads, routers, norms, and what joins an MTP layer to its model.
_PLAIN = re.compile(
    r"(embed_tokens|embed|lm_head|head|gate|shared_expert_gate|weights_proj|in_proj_ba|conv1d|eh_proj|mtp\.fc|"
    r"[a-z_]*norm[a-z_]*)\.weight$"
)
FP8_MODELS = ("deepseek_v3", "deepseek_v32", "qwen3_next", "qwen3_moe")
# What tells of a run.
CARD = ("README.md", "report.json", "loss.json", "loss.png")
# Models that are published as the larger ones of their family are released; the others in bf16.
PUBLISHED = {"gpt_oss": "mxfp4", "qwen3_next": "fp8", "deepseek_v3": "fp8", "deepseek_v32": "fp8"}


def mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Groups of 32 inputs share a power of two. `weight`: [E, out, in].

    Returns blocks [E, out, in / 32, 16] uint8, the even value of two in the low half, and scales [E, out, in / 32]
    uint8 with a bias of 127. The scale is the one of least squared error of the two nearest.
    """
    groups = weight.float().unflatten(-1, (-1, FP4_GROUP))
    exponent = torch.floor(torch.log2(groups.abs().amax(-1).clamp_min(2.0**-120))) - 2
    best = None
    for shift in (0, 1):
        scale = torch.exp2(exponent + shift)
        codes = _fp4(groups / scale[..., None])
        error = (_fp4_values(codes) * scale[..., None] - groups).square().sum(-1)
        if best is None:
            best = codes, exponent + shift, error
        else:
            better = error < best[2]
            best = (
                torch.where(better[..., None], codes, best[0]),
                torch.where(better, exponent + shift, best[1]),
                torch.minimum(error, best[2]),
            )
    assert best is not None
    codes, exponents = best[0], (best[1] + 127).clamp(0, 254).to(torch.uint8)
    return codes[..., ::2] | (codes[..., 1::2] << 4), exponents


def _fp4(x: torch.Tensor) -> torch.Tensor:
    """The nearest FP4 value of each number, as its code: the sign is bit 3."""
    borders = (FP4_VALUES[1:] + FP4_VALUES[:-1]) / 2
    return torch.bucketize(x.abs().contiguous(), borders).to(torch.uint8) | ((x < 0).to(torch.uint8) << 3)


def _fp4_values(codes: torch.Tensor) -> torch.Tensor:
    return torch.cat((FP4_VALUES, -FP4_VALUES))[codes.long()]


def fp8_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 values and one fp32 scale for each block of 128 x 128; blocks at the edges are smaller.

    `weight`: [out, in]. Returns [out, in] and [ceil(out / 128), ceil(in / 128)]: weight = values * scale.
    """
    rows, inputs = weight.shape
    padded = F.pad(weight.float(), (0, -inputs % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    blocks = padded.unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK))
    scale = blocks.abs().amax(dim=(1, 3)).clamp_min(1e-12) / FP8_MAX
    values = (blocks / scale[:, None, :, None]).flatten(2, 3).flatten(0, 1)[:rows, :inputs]
    return values.contiguous().to(torch.float8_e4m3fn), scale


def quantize(folder: Path) -> Path | None:
    """Writes the twin of the checkpoint in `folder`. Returns its folder; None for a model that has no such release."""
    config = json.loads((folder / "config.json").read_text())
    kind, tensors = config["model_type"], load_file(folder / "model.safetensors")
    if kind == "gpt_oss":
        config["quantization_config"], form = _mxfp4_config(), "mxfp4"
        tensors = _mxfp4_tensors(tensors)
    elif kind in FP8_MODELS:
        config["quantization_config"], form = _fp8_config(tensors), "fp8"
        tensors = _fp8_tensors(tensors)
    else:
        return None
    out = folder.with_name(f"{folder.name}_{form}")
    out.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (folder / name).is_file():
            shutil.copy(folder / name, out / name)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    for name in CARD:
        if (folder / name).is_file():
            shutil.copy(folder / name, out / name)
    if (card := out / "README.md").is_file():
        stored = "experts in MXFP4" if form == "mxfp4" else "weights of products in FP8, in blocks of 128 x 128"
        card.write_text(f"{card.read_text()}\nQuantized after training, by `python -m train.quantize`: {stored}.\n")
    return out


def publish(folders: Sequence[Path], out: Path) -> None:
    """Copies each model in the form in which it is published. `folders`: as training wrote them."""
    for folder in folders:
        form = PUBLISHED.get(folder.name)
        source = folder if form is None else folder.with_name(f"{folder.name}_{form}")
        shutil.copytree(source, out / folder.name, dirs_exist_ok=True)


def plain(folder: Path, out: Path) -> Path:
    """Writes what the weights of a checkpoint stand for, in fp32, to a folder in `out`. Returns that folder.

    A checkpoint without quantized weights is its own plain twin.
    """
    config = json.loads((folder / "config.json").read_text())
    if config.pop("quantization_config", None) is None:
        return folder
    tensors = load_file(folder / "model.safetensors")
    found = {}
    for name, tensor in tensors.items():
        if (scale := tensors.get(f"{name}_scale_inv")) is not None:
            found[name] = from_fp8_blocks(tensor, scale)
        elif name.endswith("_blocks"):
            stem = name.removesuffix("_blocks")
            found[stem] = from_mxfp4(tensor, tensors[f"{stem}_scales"]).transpose(1, 2).contiguous()
        elif not name.endswith(("_scale_inv", "_scales")):
            found[name] = tensor.float()
    target = out / folder.name
    target.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.json"):
        shutil.copy(path, target / path.name)
    (target / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}, indent=2) + "\n")
    save_file(found, target / "model.safetensors", metadata={"format": "pt"})
    return target


def from_fp8_blocks(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The inverse of `fp8_blocks`, in fp32."""
    wide = scale.float().repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
    return values.float() * wide[: values.shape[0], : values.shape[1]]


def from_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The inverse of `mxfp4`, in fp32: [E, out, in]."""
    values = _fp4_values(torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2))
    return (values * torch.exp2(scales.float() - 127)[..., None]).flatten(-2)


def _mxfp4_config() -> dict[str, Any]:
    plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return {"quant_method": "mxfp4", "modules_to_not_convert": plain}


def _mxfp4_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            found[name + "_blocks"], found[name + "_scales"] = mxfp4(tensor.transpose(1, 2))
        else:
            found[name] = tensor
    return found


def _is_fp8(name: str, tensor: torch.Tensor) -> bool:
    return tensor.dim() == 2 and name.endswith(".weight") and not _PLAIN.search(name)


def _fp8_config(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
    }
    plain = [
        name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if tensor.dim() == 2 and name.endswith(".weight") and not _is_fp8(name, tensor)
    ]
    return config | {"modules_to_not_convert": sorted(plain)}


def _fp8_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in tensors.items():
        if _is_fp8(name, tensor):
            found[name], found[name + "_scale_inv"] = fp8_blocks(tensor)
        else:
            found[name] = tensor
    return found


def quantize_all(folders: Sequence[Path]) -> list[str]:
    """Quantizes those that can be. Returns a line for each."""
    return [f"quantized: {out}" for folder in folders if (out := quantize(folder)) is not None]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--publish", type=Path, metavar="FOLDER", help="of published models")
    options = parser.parse_args()
    for line in quantize_all(options.folders):
        print(line)
    if options.publish is not None:
        publish(options.folders, options.publish)
