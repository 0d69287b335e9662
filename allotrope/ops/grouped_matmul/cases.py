"""Small cases of products of experts' rows: every format, experts without rows, gates and biases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from allotrope.ops.case import Cases, Draw, OpCase
from allotrope.ops.gated_activation import GatedActivation
from allotrope.ops.matmul import MatmulSpec
from allotrope.ops.matmul.cases import FORMATS, draw_weight, dtypes_of, tolerance_of
from allotrope.ops.matmul.weight import Format


def _case(format: Format, block_rows: int, sizes: Sequence[int], gating: GatedActivation | None, bias: bool) -> OpCase:
    """`sizes`: rows of each expert. With a gate, rows are picked out of fewer tokens."""
    outputs, inputs, tokens = 128, 192 if 192 % format.pack_factor == 0 else 256, 7

    def make(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        draw, rows = Draw(generator, device), sum(sizes)
        weight = draw_weight(draw, format, block_rows, dtype, len(sizes), outputs, inputs)
        x = draw(dtype, tokens if gating else rows, inputs)
        token_ids = draw.integers(0, tokens, rows, dtype=torch.int32) if gating else None
        offsets = torch.tensor(sizes).cumsum(0).to(device, torch.int32)
        return x, weight, offsets, token_ids, draw(dtype, len(sizes), outputs) if bias else None, gating

    spec: Callable[[torch.dtype], MatmulSpec] = lambda dtype: MatmulSpec(  # noqa: E731
        format, dtype, outputs, inputs, len(sizes)
    )
    return OpCase(spec, make, dtypes_of(format), tolerance_of(format))


def _cases() -> dict[str, OpCase]:
    found = {}
    for name, (format, block_rows) in FORMATS.items():
        found[f"{name}, down"] = _case(format, block_rows, (5, 0, 17, 1), None, False)
        found[f"{name}, gate and up"] = _case(format, block_rows, (0, 3, 0, 1), GatedActivation(), False)
        found[f"{name}, bias"] = _case(format, block_rows, (2, 1), None, True)
    return found


CASES: Cases = {"grouped_matmul": _cases()}
