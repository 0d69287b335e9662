"""Rows that the kernel which writes them quantizes to e4m3 as well, for products with FP8 weights that read them next.

That saves these a launch. The quantized rows are kept with the tensor that has them as they are; whatever is made of
that one, a slice or a copy, is quantized anew.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from allotrope.kernels.tiles import cdiv
from allotrope.ops.matmul.fp8 import ACTIVATION_GROUP

# Of the tensor that has rows as they are: what they are quantized to.
_KEPT = "quantized_rows"


class QuantizedRows(NamedTuple):
    """`values`: [rows, inputs], the rows in fours, the inputs in runs of 128. `scales`: [runs, rows] fp32."""

    values: torch.Tensor
    scales: torch.Tensor


def allocate(tokens: int, inputs: int, device: torch.device) -> QuantizedRows:
    """Memory for so many rows; what is behind them is left as it was."""
    runs, rows = cdiv(inputs, ACTIVATION_GROUP), -(-tokens // 4) * 4
    values = torch.empty((rows, runs * ACTIVATION_GROUP), dtype=torch.float8_e4m3fn, device=device)
    return QuantizedRows(values, torch.empty((runs, rows), dtype=torch.float32, device=device))


def keep_quantized(x: torch.Tensor, quantized_from: int | None) -> QuantizedRows | None:
    """Memory for the quantized rows of `x`, which is about to be written, kept with it; None where they are not wanted:
    of fewer rows than `quantized_from`."""
    if quantized_from is None or len(x) < quantized_from:
        return None
    tokens, inputs = x.shape
    kept = allocate(tokens, inputs, x.device)
    setattr(x, _KEPT, kept)
    return kept


def quantized_rows(x: torch.Tensor) -> QuantizedRows | None:
    """The quantized rows that are kept with `x`."""
    found: QuantizedRows | None = getattr(x, _KEPT, None)
    return found


def of_kernel(kept: QuantizedRows | None, absent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Values, scales and their strides, as kernels take them; `absent`, which they do not touch, in place of none."""
    if kept is None:
        return absent, absent, 0, 0
    return *kept, kept.values.stride(0), kept.scales.stride(0)
