"""What a gated activation computes, and how C takes it."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

import torch

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, kw_only=True)
class GatedActivation:
    """act(gate) * (up + offset), with gate at most `limit` and up within +-`limit`: SwiGLU with silu, GeGLU with gelu.

    `slope`: of silu, x * sigmoid(slope * x).
    """

    activation: Activation = "silu"
    slope: float = 1.0
    limit: float | None = None
    offset: float = 0.0

    @functools.cached_property
    def compiled(self) -> tuple[int, float, float, float]:
        """The last arguments of C functions, see `kernels/c/gated_activation.h`."""
        gelu = self.activation == "gelu_tanh" and self.slope == 1.0
        return int(gelu), self.slope, math.inf if self.limit is None else self.limit, self.offset


@dataclass(frozen=True)
class GatedActivationSpec:
    """`activation`: the equation. `dtype`: of gate, up and result."""

    activation: GatedActivation
    dtype: torch.dtype


@dataclass(frozen=True)
class SigmoidGateSpec:
    """`dtype`: of what is gated, of the gate and of the result."""

    dtype: torch.dtype
