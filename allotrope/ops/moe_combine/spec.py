"""What is combined, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class CombineSpec:
    """`hidden`: size of a row. `dtype`: of the experts' outputs. `ranks`: that share the experts' width, so that each
    has a part of the sum."""

    hidden: int
    dtype: torch.dtype
    ranks: int = 1
