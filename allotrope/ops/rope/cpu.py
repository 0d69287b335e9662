"""Rotation of heads in C (`cpu.c`)."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from allotrope.kernels.c.compiler import CannotCompile
from allotrope.kernels.c.function import CFunction

SOURCE = Path(__file__).with_name("cpu.c")


@functools.cache
def _rotate(dtype: torch.dtype) -> CFunction | None:
    try:
        return CFunction(SOURCE, "rotate", dtype, "pppplllllll")
    except CannotCompile:
        return None


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor | None:
    """x cos + (x with the numbers of each pair exchanged) sin over the first R dims.

    `x`: [T, heads, D]. `cos`, `sin`: [T, 1, R] of its type; `sin` has the sign of its place. Pairs are i and i + R/2,
    or 2i and 2i + 1 where they are `interleaved`. None where C does not take them.
    """
    function = None if x.device.type != "cpu" else _rotate(x.dtype)
    taken = x.dim() == 3 and x.stride(2) == 1 and cos.dtype == x.dtype and len(cos) == len(x) and cos.is_contiguous()
    if function is None or not taken:
        return None
    tokens, heads, dim = x.shape
    out = x.new_empty(tokens, heads, dim)
    function(out, x, cos, sin, tokens, heads, dim, cos.shape[-1], x.stride(0), x.stride(1), interleaved)
    return out
