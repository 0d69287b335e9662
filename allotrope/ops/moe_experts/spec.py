"""What experts for few tokens are, in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from allotrope.ops.gated_activation.c_struct import CompiledGating


@dataclass(frozen=True)
class MoeExpertsSpec:
    """`hidden`, `width`: inputs and inner size of an expert. `dtype`: of weights and activations."""

    hidden: int
    width: int
    dtype: torch.dtype


class GatedActivation(Protocol):
    """act(gate) * up, as PyTorch computes it and as C takes it."""

    @property
    def compiled(self) -> CompiledGating: ...

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor: ...
