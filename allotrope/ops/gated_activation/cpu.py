"""The gated activation in C (`cpu.c`)."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from allotrope.kernels.c.compiler import CannotCompile
from allotrope.kernels.c.function import CFunction
from allotrope.ops.gated_activation.c_struct import CompiledGating

SOURCE = Path(__file__).with_name("cpu.c")
# Numbers of a vector in C.
LANES = 16


@functools.cache
def _gated(dtype: torch.dtype) -> CFunction | None:
    try:
        return CFunction(SOURCE, "gated_activation", dtype, "ppllls", CompiledGating)
    except CannotCompile:
        return None


def gated_activation(x: torch.Tensor, how: CompiledGating) -> torch.Tensor | None:
    """`x`: [T, 2 * width], gate first, then up. Returns [T, width]; None where C does not take it."""
    function = None if x.device.type != "cpu" else _gated(x.dtype)
    if function is None or x.dim() != 2 or x.stride(1) != 1 or x.shape[1] % (2 * LANES):
        return None
    tokens, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty(tokens, width)
    function(out, x, tokens, width, x.stride(0), how)
    return out
