"""The norms in C (`cpu.c`): one pass over memory each."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from allotrope.kernels.c.function import CFunction, c_reasons
from allotrope.kernels.chip import Chip
from allotrope.ops.rms_norm import reference
from allotrope.ops.rms_norm.reference import GateActivation

SOURCE = Path(__file__).with_name("cpu.c")
# Numbers of a vector in C; gated heads of other sizes go to the reference.
LANES = 16


def rejects(spec: Any, chip: Chip) -> list[str]:
    return c_reasons(SOURCE, spec.dtype, chip)


@functools.cache
def _rms_norm(dtype: torch.dtype) -> CFunction:
    return CFunction(SOURCE, "rms_norm", dtype, "ppplllllf")


@functools.cache
def _gated(dtype: torch.dtype) -> CFunction:
    return CFunction(SOURCE, "gated_rms_norm", dtype, "pppplllllf")


@functools.cache
def _add_norm(dtype: torch.dtype) -> CFunction:
    return CFunction(SOURCE, "add_rms_norm", dtype, "pppppppllllf")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, floor: float) -> torch.Tensor:
    """As `reference.rms_norm`, which runs other than two or three dimensions, and strided ones."""
    if x.dim() not in (2, 3) or x.stride(-1) != 1:
        return reference.rms_norm(x, weight, floor)
    assert weight.dtype == torch.float32, weight.dtype
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    heads, stride = (1, 0) if x.dim() == 2 else (x.shape[1], x.stride(1))
    _rms_norm(x.dtype)(out, x, weight, x.shape[0], heads, x.shape[-1], x.stride(0), stride, floor)
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    floor: float,
    inner: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `reference.add_rms_norm`, which runs other than two dimensions, strided ones, and mixed types."""
    mixed = residual.dtype != x.dtype or (scale is not None and scale.dtype != x.dtype)
    if x.dim() != 2 or residual.dim() != 2 or mixed or x.stride(1) != 1 or residual.stride(1) != 1:
        return reference.add_rms_norm(x, residual, weight, floor, inner, scale)
    (tokens, size), strides = x.shape, (x.stride(0), residual.stride(0))
    residual_out, out = x.new_empty(tokens, size), x.new_empty(tokens, size)
    _add_norm(x.dtype)(residual_out, out, x, residual, weight, inner, scale, tokens, size, *strides, floor)
    return residual_out, out


def gated_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, floor: float, gate: torch.Tensor, activation: GateActivation
) -> torch.Tensor:
    """As `reference.gated_rms_norm`, which runs sizes of no whole vectors, gates of another type, strided tensors."""
    tokens, heads, size = x.shape
    if x.dtype != gate.dtype or not x.is_contiguous() or size % LANES or gate.stride(1) != 1:
        return reference.gated_rms_norm(x, weight, floor, gate, activation)
    assert weight.dtype == torch.float32, weight.dtype
    out = x.new_empty(tokens, heads * size)
    silu = activation == "silu"
    _gated(x.dtype)(out, x, weight, gate, tokens, heads, size, gate.stride(0), silu, floor)
    return out
