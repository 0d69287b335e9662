"""The norms in PyTorch: what kernels are held against."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F

GateActivation = Literal["silu", "sigmoid"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, floor: float) -> torch.Tensor:
    """x / sqrt(sum x^2 + floor) * weight. `x`: [..., size]. `weight`: [size] fp32. Returns x's shape and type."""
    x_fp32 = x.float()
    # Few passes, where torch's own norm takes seven.
    root = x_fp32.new_full((), math.sqrt(floor))
    length = torch.hypot(torch.linalg.vector_norm(x_fp32, 2, -1, True), root)
    if x.dtype == torch.float32:
        return (x_fp32 / length).mul_(weight)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return torch.mul(x_fp32.div_(length), weight, out=out)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    floor: float,
    inner: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """s = (residual + x) * scale; y = norm(s). With `inner`, x is itself normed first, with that weight.

    `x`, `residual`: [T, size]. `weight`, `inner`: [size] fp32. `scale`: [1]; None is 1. Each of the steps rounds to x's
    type. Returns s and y, contiguous.
    """
    residual_out = residual + (x if inner is None else rms_norm(x, inner, floor))
    if scale is not None:
        residual_out = residual_out * scale
    return residual_out, rms_norm(residual_out, weight, floor)


def gated_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, floor: float, gate: torch.Tensor, activation: GateActivation
) -> torch.Tensor:
    """norm(x) * activation(gate). `x`: [T, heads, size]. `weight`: [size] fp32. `gate`: [T, heads * size].

    Returns [T, heads * size] in the gate's type.
    """
    normed = rms_norm(x.float(), weight, floor).flatten(1)
    gated = F.silu(gate.float()) if activation == "silu" else torch.sigmoid(gate.float())
    return (normed * gated).to(gate.dtype)
