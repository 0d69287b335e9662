"""Rotation of queries and of one key on a CPU: joined in PyTorch, rotated in C."""

from __future__ import annotations

import torch

from allotrope.kernels.c.function import c_reasons
from allotrope.kernels.chip import Chip
from allotrope.ops.mla_rope.reference import join
from allotrope.ops.mla_rope.spec import LayerNorm, MlaRopeSpec
from allotrope.ops.rope import Rotation
from allotrope.ops.rope.cpu import SOURCE, apply_rope


def rejects(spec: MlaRopeSpec, chip: Chip) -> list[str]:
    return c_reasons(SOURCE, spec.dtype, chip)


def mla_rope(
    q: torch.Tensor, k: torch.Tensor, rotation: Rotation | None, norm: LayerNorm | None = None
) -> torch.Tensor:
    """As `reference.mla_rope`."""
    joined = join(q, k, norm)
    return joined if rotation is None else apply_rope(joined, rotation)
