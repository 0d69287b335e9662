"""Whole experts in C (`cpu.c`)."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from allotrope.kernels.c.function import CFunction, c_reasons
from allotrope.kernels.chip import Chip
from allotrope.ops.gated_activation import GatedActivation
from allotrope.ops.moe_experts import reference
from allotrope.ops.moe_experts.reference import Weights

SOURCE = Path(__file__).with_name("cpu.c")
# Numbers of a vector in C.
LANES = 16


def rejects(spec: Any, chip: Chip) -> list[str]:
    return c_reasons(SOURCE, spec.dtype, chip)


@functools.cache
def _moe_experts(dtype: torch.dtype) -> CFunction:
    return CFunction(SOURCE, "moe_experts", dtype, "pplppppppplllllfff")


def moe_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: Weights,
    down: Weights,
    activation: GatedActivation,
) -> torch.Tensor:
    """As `reference.moe_experts`."""
    if any(one is not None and one.dtype != x.dtype for one in (*gate_up, *down)):
        return reference.moe_experts(x, weights, experts, gate_up, down, activation)
    x = x if x.stride(1) == 1 else x.contiguous()
    (tokens, hidden), (topk, width) = x.shape, (experts.shape[1], down[0].shape[2])
    padded = -(-width // LANES) * LANES
    out = x.new_empty(tokens, hidden)
    scratch = torch.empty(2 * tokens * topk * padded + tokens * hidden, dtype=torch.float32)
    _moe_experts(x.dtype)(
        *(out, x, x.stride(0), *gate_up, *down, weights.contiguous(), experts.contiguous(), scratch),
        *(tokens, topk, hidden, width, *activation.compiled),
    )
    return out
