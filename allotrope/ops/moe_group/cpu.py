"""Grouping in C (`cpu.c`)."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from allotrope.kernels.c.function import CFunction, c_reasons
from allotrope.kernels.chip import Chip
from allotrope.ops.moe_group.spec import TokenGroups

SOURCE = Path(__file__).with_name("cpu.c")


def rejects(spec: Any, chip: Chip) -> list[str]:
    return c_reasons(SOURCE, torch.float32, chip)


@functools.cache
def _group() -> CFunction:
    return CFunction(SOURCE, "group", torch.float32, "ppppplll")


def group(experts: torch.Tensor, count: int) -> TokenGroups:
    """As `reference.group`. `experts`: int64."""
    experts = experts.contiguous()
    pairs = experts.numel()
    expert_offsets = torch.empty(count, dtype=torch.int32)
    sorted_token_ids, expert_ids, inverse = torch.empty(3, pairs, dtype=torch.int64).unbind()
    _group()(expert_offsets, sorted_token_ids, expert_ids, inverse, experts, pairs, count, experts.shape[1])
    return TokenGroups(expert_offsets, sorted_token_ids, expert_ids, inverse)
