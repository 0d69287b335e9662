"""Grouping tokens by expert: pairs of token and choice, sorted by expert, where that is equal as they come."""

from __future__ import annotations

from allotrope.kernels.backend import Backend, Op, lazily, runs_anywhere
from allotrope.kernels.chip import Chip
from allotrope.kernels.triton_version import needs_triton
from allotrope.ops.moe_group import cpu, reference
from allotrope.ops.moe_group.spec import MAX_EXPERTS, GroupSpec, TokenGroups

__all__ = ["MAX_EXPERTS", "MOE_GROUP", "GroupSpec", "TokenGroups"]


def _triton_rejects(spec: GroupSpec, chip: Chip) -> list[str]:
    reasons = needs_triton(spec, chip)
    if spec.experts > MAX_EXPERTS:
        reasons.append(f"experts={spec.experts} (allowed: at most {MAX_EXPERTS})")
    return reasons


MOE_GROUP = Op(
    "moe_group",
    "expert_offsets, sorted_token_ids, expert_ids, inverse = sort pairs by expert",
    (
        Backend("triton", _triton_rejects, lazily("allotrope.ops.moe_group.triton", "group")),
        Backend("cpu", cpu.rejects, cpu.group),
        Backend("reference", runs_anywhere, reference.group),
    ),
)
