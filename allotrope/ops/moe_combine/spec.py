"""What is combined, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class CombineSpec:
    """`hidden`: size of a row. `dtype`: of the experts' outputs."""

    hidden: int
    dtype: torch.dtype
