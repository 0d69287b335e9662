"""Small cases of products: every format, odd sizes, and rows cut out of wider memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from allotrope.ops.case import FP32_AND_BF16, Cases, Draw, OpCase
from allotrope.ops.matmul import MatmulSpec, StoredWeight
from allotrope.ops.matmul.fp8 import Fp8
from allotrope.ops.matmul.gguf import GGUF_BLOCKS, GgufBlocks
from allotrope.ops.matmul.int4 import Int4
from allotrope.ops.matmul.mxfp4 import MXFP4
from allotrope.ops.matmul.plain import PLAIN, PlainWeight
from allotrope.ops.matmul.weight import Format

FORMATS: dict[str, tuple[Format, int]] = {
    "plain": (PLAIN, 1),
    "fp8 blocks": (Fp8(128, rows=128), 128),
    "fp8 rows": (Fp8(0), 1),
    "fp8 blocks exact": (Fp8(128, rows=128, fp8_activations=False), 128),
    "fp8 rows exact": (Fp8(0, fp8_activations=False), 1),
    "mxfp4": (MXFP4, 1),
    "int4 by 32": (Int4(32), 1),
    "int4 by 128": (Int4(128), 1),
    "int4 rows": (Int4(0), 1),
    **{kind: (format, 1) for kind, format in GGUF_BLOCKS.items()},
    "q4_k exact": (replace(GGUF_BLOCKS["q4_k"], int8_activations=False), 1),
}
"""Name of a case -> its format, and rows that share a scale."""


def draw_weight(draw: Draw, format: Format, block_rows: int, dtype: torch.dtype, *shape: int) -> StoredWeight:
    """A stored weight of unit gain. `shape`: [E,] outputs, inputs."""
    plain = draw(torch.float32, *shape) / shape[-1] ** 0.5
    if format is PLAIN:
        return PlainWeight(plain.to(dtype))
    return format.quantize(plain, block_rows)


def tolerance_of(format: Format) -> torch.dtype | None:
    """Values that activations are rounded to may fall the other way: that shows in fp32."""
    rounds = isinstance(format, GgufBlocks) or (isinstance(format, Fp8) and format.fp8_activations)
    return torch.bfloat16 if rounds else None


def dtypes_of(format: Format) -> tuple[torch.dtype, ...]:
    """Every type of blocks is compiled for each of them, which takes seconds: one stands for all."""
    several = not isinstance(format, GgufBlocks) or format.name == "q4_k"
    return FP32_AND_BF16 if several else FP32_AND_BF16[:1]


def _case(format: Format, block_rows: int, tokens: int, outputs: int, inputs: int, bias: bool) -> OpCase:
    def make(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        draw = Draw(generator, device)
        weight = draw_weight(draw, format, block_rows, dtype, outputs, inputs)
        return draw(dtype, tokens, inputs + 8)[:, :inputs], weight, draw(dtype, outputs) if bias else None

    spec: Callable[[torch.dtype], MatmulSpec] = lambda dtype: MatmulSpec(format, dtype, outputs, inputs)  # noqa: E731
    return OpCase(spec, make, dtypes_of(format), tolerance_of(format))


def _cases() -> dict[str, OpCase]:
    found = {}
    for name, (format, block_rows) in FORMATS.items():
        inputs = 384 if 384 % format.pack_factor == 0 else 256
        found[f"{name}, one row"] = _case(format, block_rows, 1, 128, inputs, False)
        inputs = 448 if 448 % format.pack_factor == 0 else 512
        # More rows of blocks are not rounded to int8 by matrix units.
        rows = 15 if isinstance(format, GgufBlocks) else 19
        found[f"{name}, odd"] = _case(format, block_rows, rows, 41, inputs, True)
    found["plain, large"] = _case(PLAIN, 1, 5, 520, 512, True)
    return found


CASES: Cases = {"matmul": _cases()}
