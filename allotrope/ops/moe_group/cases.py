"""Cases of grouping: one pair, odd numbers, experts that no token chose, more experts than the kernels count."""

from __future__ import annotations

from functools import partial

import torch

from allotrope.ops.case import Cases, Draw, OpCase
from allotrope.ops.moe_group import GroupSpec

SHAPES = {
    "one pair": (1, 1, 2),
    "few": (7, 3, 5),
    "many": (103, 5, 13),
    "idle experts": (1, 4, 300),
    "beyond the kernels": (9, 8, 2000),
}


def _spec(count: int, dtype: torch.dtype) -> GroupSpec:
    return GroupSpec(count)


def _make(
    tokens: int, topk: int, count: int, generator: torch.Generator, dtype: torch.dtype, device: torch.device
) -> tuple[object, ...]:
    return Draw(generator, device).integers(0, count - 1, tokens, topk), count


CASES: Cases = {
    "moe_group": {
        name: OpCase(partial(_spec, shape[-1]), partial(_make, *shape), dtypes=(torch.float32,))
        for name, shape in SHAPES.items()
    }
}
