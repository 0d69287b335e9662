"""Products of large plain weights on a CPU by oneDNN, which reorders a weight once, then reads it at memory speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from allotrope.kernels.chip import Chip
from allotrope.ops.matmul.plain import PLAIN, PlainWeight
from allotrope.ops.matmul.weight import Format, Weight

MIN_NUMBERS = 1 << 18
"""Numbers from which a weight is worth the start of a product that reads it in another order."""
_DTYPES = (torch.float32, torch.bfloat16)
_product = torch.ops.mkldnn._linear_pointwise.default


def rejects(spec: Any, chip: Chip) -> list[str]:
    """`Backend.rejects`."""
    if chip.vendor != "cpu":
        return [f"chip={chip.arch} (needs cpu)"]
    reasons = plain_reasons(spec)
    if not torch.backends.mkldnn.is_available():
        reasons.append("this PyTorch has no oneDNN")
    return [*reasons, *small_reasons(spec)]


def plain_reasons(spec: Any) -> list[str]:
    """What a CPU's reordered products need of a weight."""
    reasons = [] if spec.format is PLAIN else [f"format={spec.format.name} (needs plain)"]
    if spec.dtype not in _DTYPES:
        reasons.append(f"dtype={spec.dtype} (needs float32 or bfloat16)")
    return reasons


def small_reasons(spec: Any) -> list[str]:
    """Small weights are multiplied faster in the order in which they are stored."""
    numbers = spec.outputs * spec.inputs
    return [] if numbers >= MIN_NUMBERS else [f"weight of {numbers} numbers (needs {MIN_NUMBERS})"]


@dataclass(frozen=True, repr=False)
class OneDNNWeight(Weight):
    """`reordered`: opaque to all but oneDNN."""

    reordered: torch.Tensor
    sizes: tuple[int, int]
    format: Format = PLAIN

    @property
    def shape(self) -> tuple[int, ...]:
        """As `Weight.shape`."""
        return self.sizes

    @property
    def nbytes(self) -> int:
        """As `Weight.nbytes`."""
        return self.sizes[0] * self.sizes[1] * self.reordered.element_size()

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """As `Weight.dequantize`."""
        return self.reordered.to_dense().to(dtype)


def pack(weight: PlainWeight) -> OneDNNWeight:
    """`MatmulBackend.pack`."""
    outputs, inputs = weight.shape
    return OneDNNWeight(torch.ops.mkldnn._reorder_linear_weight(weight.values, None), (outputs, inputs))


def reordered_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of the reordered weight of `shape`, which takes memory of its own."""
    return torch.Size(shape).numel() * dtype.itemsize


def matmul(
    x: torch.Tensor, weight: OneDNNWeight, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As `reference.matmul`."""
    y: torch.Tensor = _product(x, weight.reordered, bias, "none", [], "")
    return y if out is None else out.copy_(y)
