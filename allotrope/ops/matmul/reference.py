"""Products in PyTorch, in fp32, with weights as they are stored: what all others are held against."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from allotrope.ops.matmul.plain import PlainWeight
from allotrope.ops.matmul.weight import QuantizedWeight


def pack(weight: PlainWeight | QuantizedWeight) -> PlainWeight | QuantizedWeight:
    """As it is stored; blocks of rows share their scales."""
    return weight.format.share_scales(weight) if isinstance(weight, QuantizedWeight) else weight


def matmul(
    x: torch.Tensor,
    weight: PlainWeight | QuantizedWeight,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = x W^T + b, rounded once.

    `x`: [T, inputs]. `bias`: [outputs]. `out`: [T, outputs] to write into, of any row stride. The weight is dequantized
    whole for each call.
    """
    activations = weight.format.activations(x)
    y = F.linear(activations, weight.dequantize(), None if bias is None else bias.float()).to(x.dtype)
    return y if out is None else out.copy_(y)
