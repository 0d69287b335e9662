"""Grouping by a stable sort in PyTorch."""

from __future__ import annotations

import torch

from allotrope.ops.moe_group.spec import TokenGroups


def group(experts: torch.Tensor, count: int) -> TokenGroups:
    """Sort pairs of token and choice by expert, stably. `experts`: [T, k]. `count`: of experts."""
    expert_ids, order = experts.flatten().sort(stable=True)
    numbers = torch.arange(count, device=experts.device)
    expert_offsets = torch.searchsorted(expert_ids, numbers, right=True, out_int32=True)
    return TokenGroups(expert_offsets, order // experts.shape[1], expert_ids, order.argsort())
