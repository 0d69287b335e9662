"""Tensors of the eight models in the released layout: `released(model)` gives them by their released names, and
`load_released` reads them back."""

from __future__ import annotations

import torch

from train.decoders import DeepseekMtp, HyperBackbone, Model, QwenMtp
from train.layers import (
    Experts,
)


def _released_names(model: Model, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Renames `state_dict`'s keys, but for experts."""
    v4 = isinstance(model.backbone, HyperBackbone)
    renamed = {}
    for name, tensor in tensors.items():
        if name.startswith("backbone."):
            name = model.prefix + name.removeprefix("backbone.")
        elif name.startswith("mtp.") and isinstance(model.mtp, DeepseekMtp | QwenMtp):
            name = model.mtp_prefix + model.mtp.rename(name.removeprefix("mtp."))
        elif name == "head.weight" and not v4:
            name = "lm_head.weight"
        if v4:
            name = name.replace("embed_tokens.", "embed.")
        renamed[name] = tensor
    return renamed


def released(model: Model) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors, in their released names, layouts and types (bf16, and fp32 or int64 where released)."""
    tensors: dict[str, torch.Tensor] = dict(model.state_dict())
    for path, module in model.named_modules():
        if isinstance(module, Experts):
            for name, _ in module.named_parameters():
                del tensors[f"{path}.{name}"]
            tensors |= {f"{path}.{name}": tensor for name, tensor in module.released().items()}
    tensors = _released_names(model, tensors)
    if isinstance(model.mtp, DeepseekMtp):
        tensors[model.mtp_prefix + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
        tensors[model.mtp_prefix + "shared_head.head.weight"] = tensors["lm_head.weight"]
    return {name: _stored(name, tensor.detach()) for name, tensor in tensors.items()}


# Parts of the names of tensors that releases keep in fp32.
FP32 = (".e_score_correction_bias", "hc_", ".attn_sink", ".ape", ".ffn.gate.bias", "indexer.k_norm")


def _stored(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor.cpu().contiguous()
    dtype = torch.float32 if any(part in name for part in FP32) else torch.bfloat16
    return tensor.to("cpu", dtype, copy=True).contiguous()


@torch.no_grad()
def load_released(model: Model, tensors: dict[str, torch.Tensor]) -> None:
    """Reads a checkpoint's tensors. Raises KeyError for one that is missing."""
    own = dict(model.state_dict())
    for path, module in model.named_modules():
        if isinstance(module, Experts):
            for name, _ in module.named_parameters():
                del own[f"{path}.{name}"]
            prefix = next(iter(_released_names(model, {path + ".": torch.empty(0)})))
            module.load_released(
                {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            )
    for name, tensor in _released_names(model, own).items():
        tensor.copy_(tensors[name])


def round_to_released(model: Model) -> None:
    """Gives the module the values that its checkpoint has."""
    load_released(model, released(model))


def parameter_count(model: Model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
