"""The sum in C (`cpu.c`)."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from allotrope.kernels.c.function import CFunction, c_reasons
from allotrope.kernels.chip import Chip
from allotrope.ops.moe_combine import reference

SOURCE = Path(__file__).with_name("cpu.c")
# More than there are experts.
_ALL = 2**62


def rejects(spec: Any, chip: Chip) -> list[str]:
    return c_reasons(SOURCE, spec.dtype, chip)


@functools.cache
def _combine(dtype: torch.dtype) -> CFunction:
    return CFunction(SOURCE, "combine", dtype, "ppppppllll")


def combine(
    results: torch.Tensor,
    weights: torch.Tensor,
    inverse: torch.Tensor,
    experts: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    held: int | None = None,
) -> torch.Tensor:
    """As `reference.combine`; PyTorch adds `shared`, and all where types or integers are not those of C."""
    same = results.dtype == dtype and (bias is None or bias.dtype == dtype)
    if not same or inverse.dtype != torch.int64:
        return reference.combine(results, weights, inverse, experts, dtype, bias, shared, gate, held)
    assert bias is None or bias.is_contiguous()
    (tokens, topk), hidden = experts.shape, results.shape[1]
    out = results.new_empty(tokens, hidden)
    _combine(dtype)(
        *(out, results.contiguous(), weights.contiguous(), inverse, experts.contiguous()),
        *(bias, tokens, topk, hidden, _ALL if held is None else held),
    )
    return reference.add_shared(out, shared, gate)
