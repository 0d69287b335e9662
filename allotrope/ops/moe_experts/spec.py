"""What experts for few tokens are, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MoeExpertsSpec:
    """`hidden`, `width`: inputs and inner size of an expert. `dtype`: of weights and activations."""

    hidden: int
    width: int
    dtype: torch.dtype
