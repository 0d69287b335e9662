"""Routing in C (`cpu.c`)."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from allotrope.kernels.c.function import CFunction, c_reasons
from allotrope.kernels.chip import Chip
from allotrope.ops.moe_route.spec import RouteSpec

SOURCE = Path(__file__).with_name("cpu.c")
# As C numbers them.
SCORES = ("softmax", "sigmoid", "sqrt_softplus")


def rejects(spec: Any, chip: Chip) -> list[str]:
    return c_reasons(SOURCE, torch.float32, chip)


@functools.cache
def _route() -> CFunction:
    return CFunction(SOURCE, "route", torch.float32, "ppppllllllllf")


def route(logits: torch.Tensor, correction: torch.Tensor | None, spec: RouteSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """As `reference.route`."""
    assert logits.dtype == torch.float32, logits.dtype
    logits = logits.contiguous()
    tokens, count = logits.shape
    weights = logits.new_empty(tokens, spec.topk)
    experts = torch.empty(tokens, spec.topk, dtype=torch.int64)
    groups = (spec.groups, spec.top_groups, spec.group_best)
    kind = SCORES.index(spec.score)
    _route()(
        *(weights, experts, logits, correction, tokens, count, spec.topk),
        *(*groups, kind, spec.normalize, spec.scale),
    )
    return weights, experts
