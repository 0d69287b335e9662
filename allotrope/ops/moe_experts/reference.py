"""Whole experts in PyTorch: what C is held against."""

from __future__ import annotations

import torch

from allotrope.ops.gated_activation import GatedActivation
from allotrope.ops.gated_activation.reference import gated_activation

Weights = tuple[torch.Tensor, torch.Tensor | None]
"""Of all experts, and their bias."""


def moe_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: Weights,
    down: Weights,
    activation: GatedActivation,
) -> torch.Tensor:
    """y[t] = sum over k of weights[t, k] * (down_e act(gate_up_e x[t] + b_e) + c_e), e = experts[t, k], in fp32.

    `x`: [T, hidden]. `weights` fp32, `experts` int64: [T, k]. `gate_up`: [E, 2 * width, hidden] and its bias
    [E, 2 * width]. `down`: [E, hidden, width] and its bias [E, hidden]. Returns [T, hidden] in `x`'s type.
    """
    chosen = experts.flatten()
    rows = x.float().repeat_interleave(experts.shape[1], 0)
    inner = gated_activation(_product(rows, gate_up, chosen), activation)
    results = _product(inner, down, chosen).unflatten(0, experts.shape)
    return (weights[..., None] * results).sum(1).to(x.dtype)


def _product(rows: torch.Tensor, weights: Weights, chosen: torch.Tensor) -> torch.Tensor:
    """`rows`: [pairs, inputs] fp32. Returns [pairs, outputs] fp32."""
    matrix, bias = weights
    y = torch.bmm(matrix[chosen].float(), rows[..., None]).squeeze(-1)
    return y if bias is None else y + bias[chosen].float()
