"""Products of plain weights by PyTorch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from allotrope.kernels.chip import Chip
from allotrope.ops.matmul.plain import PLAIN, PlainWeight


def rejects(spec: Any, chip: Chip) -> list[str]:
    """`Backend.rejects`."""
    return [] if spec.format is PLAIN else [f"format={spec.format.name} (needs plain)"]


def matmul(
    x: torch.Tensor, weight: PlainWeight, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As `reference.matmul`, in the weight's own type."""
    y = F.linear(x, weight.values, bias)
    return y if out is None else out.copy_(y)
