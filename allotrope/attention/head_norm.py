"""The norm of heads or rows that a layer hands to its family, which applies it where its backend wants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class HeadNorm:
    """A norm over the last dimension. `apply`: by the implementation that the layer chose. `weight`: [D] fp32, with
    sqrt(D) in it, for a kernel that norms by itself; None where the norm spans more than one head."""

    apply: Callable[[torch.Tensor], torch.Tensor]
    weight: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.apply(x)
