"""The norm of heads that a layer passes to its attention backend, which may fuse it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class HeadNorm:
    """A norm over the last dimension. `apply`: the implementation that the layer chose. `weight`: [D] fp32, times
    sqrt(D), for a kernel that fuses the norm; None where the norm spans more than one head."""

    apply: Callable[[torch.Tensor], torch.Tensor]
    weight: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.apply(x)
