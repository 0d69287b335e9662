"""What is rotated in one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from allotrope.ops.rope import RopeSpec


class LayerNorm(NamedTuple):
    """To mean 0 and variance 1, then times `weight` plus `bias`, both [D] fp32."""

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float


@dataclass(frozen=True)
class MlaRopeSpec:
    """`rope`: None for a layer without rotation. `dtype`: of queries and key."""

    rope: RopeSpec | None
    dtype: torch.dtype
