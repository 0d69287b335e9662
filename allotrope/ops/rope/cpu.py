"""Rotary position embedding in C (`cpu.c`)."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from allotrope.kernels.c.function import CFunction, c_reasons
from allotrope.kernels.chip import Chip
from allotrope.ops.rope import reference
from allotrope.ops.rope.spec import ApplyRopeSpec, Rotation

SOURCE = Path(__file__).with_name("cpu.c")


def rejects(spec: ApplyRopeSpec, chip: Chip) -> list[str]:
    return c_reasons(SOURCE, spec.dtype, chip)


@functools.cache
def _apply_rope(dtype: torch.dtype) -> CFunction:
    return CFunction(SOURCE, "apply_rope", dtype, "pppplllllll")


def apply_rope(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """As `reference.apply_rope`, which runs heads with strided dims, and cos and sin of another type or length."""
    cos, sin = rotation.cos, rotation.sin
    if x.dim() != 3 or x.stride(2) != 1 or cos.dtype != x.dtype or len(cos) != len(x) or not cos.is_contiguous():
        return reference.apply_rope(x, rotation)
    tokens, heads, dim = x.shape
    out = x.new_empty(tokens, heads, dim)
    strides = x.stride(0), x.stride(1)
    _apply_rope(x.dtype)(out, x, cos, sin, tokens, heads, dim, cos.shape[-1], *strides, rotation.interleaved)
    return out
