"""What happens to the rows of a layer between its products, one C function each (`cpu.c`)."""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path

import torch

from allotrope.kernels.c.compiler import CannotCompile, load
from allotrope.ops.gated_activation.c_struct import CompiledGating

log = logging.getLogger("allotrope.kernels")

# Numbers of a vector in C; widths that it does not divide are left to PyTorch.
LANES = 16
_POINTER, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float


class Rows:
    """Functions of rows of one type. Each says which tensors it takes; the others are left to PyTorch."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Raises CannotCompile."""
        library = load(Path(__file__).with_name("cpu.c"), dtype)
        self._normalize, self._gate, self._rotate = library.normalize, library.gate, library.rotate
        self._normalize.argtypes = [_POINTER] * 3 + [_LONG] * 5 + [_FLOAT]
        self._open = library.open_heads
        self._open.argtypes = [_POINTER] * 4 + [_LONG] * 4 + [_FLOAT, _LONG]
        self._gate.argtypes = [_POINTER] * 2 + [_LONG] * 3 + [CompiledGating]
        self._rotate.argtypes = [_POINTER] * 4 + [_LONG] * 7
        for function in (self._normalize, self._gate, self._rotate, self._open):
            function.restype = None

    def normalizes(self, x: torch.Tensor) -> bool:
        """Whether `normalize` takes `x`."""
        return x.dim() in (2, 3) and x.stride(-1) == 1

    def normalize(self, x: torch.Tensor, weight: torch.Tensor, floor: float) -> torch.Tensor:
        """x / sqrt(sum x^2 + floor) * weight. `x`: [T, size] or [T, heads, size]. `weight`: [size] fp32."""
        assert weight.dtype == torch.float32, weight.dtype
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        tokens, size = x.shape[0], x.shape[-1]
        heads, stride = (1, 0) if x.dim() == 2 else (x.shape[1], x.stride(1))
        self._normalize(
            out.data_ptr(), x.data_ptr(), weight.data_ptr(), tokens, heads, size, x.stride(0), stride, floor
        )
        return out

    def opens(self, x: torch.Tensor, gate: torch.Tensor) -> bool:
        """Whether `open` takes `x` and `gate`."""
        return x.is_contiguous() and x.shape[-1] % LANES == 0 and gate.stride(1) == 1 and gate.dtype == x.dtype

    def open(self, x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, floor: float, silu: bool) -> torch.Tensor:
        """x / sqrt(sum x^2 + floor) * weight * act(gate), act: silu or sigmoid. `x`: [T, heads, size]. `weight`: [size]
        fp32. `gate`: [T, heads * size]. Returns [T, heads * size].
        """
        assert weight.dtype == torch.float32, weight.dtype
        tokens, heads, size = x.shape
        out = x.new_empty(tokens, heads * size)
        self._open(
            out.data_ptr(), x.data_ptr(), weight.data_ptr(), gate.data_ptr(),
            tokens, heads, size, gate.stride(0), floor, silu,
        )  # fmt: skip
        return out

    def gates(self, x: torch.Tensor) -> bool:
        """Whether `gate` takes `x`."""
        return x.dim() == 2 and x.stride(1) == 1 and x.shape[1] % (2 * LANES) == 0

    def gate(self, x: torch.Tensor, how: CompiledGating) -> torch.Tensor:
        """`x`: [T, 2 * width], gate first, then up; the width is a multiple of `LANES`. Returns [T, width]."""
        tokens, width = x.shape[0], x.shape[1] // 2
        out = x.new_empty(tokens, width)
        self._gate(out.data_ptr(), x.data_ptr(), tokens, width, x.stride(0), how)
        return out

    def rotates(self, x: torch.Tensor, cos: torch.Tensor) -> bool:
        """Whether `rotate` takes `x` and rotations like `cos`."""
        return x.dim() == 3 and x.stride(2) == 1 and cos.dtype == x.dtype and len(cos) == len(x) and cos.is_contiguous()

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
        """x cos + (x with the numbers of each pair exchanged) sin over the first R dims.

        `x`: [T, heads, D]. `cos`, `sin`: [T, 1, R] of its type; `sin` has the sign of its place. Pairs are i and
        i + R/2, or 2i and 2i + 1 where they are `interleaved`.
        """
        tokens, heads, dim = x.shape
        out = x.new_empty(tokens, heads, dim)
        self._rotate(
            out.data_ptr(), x.data_ptr(), cos.data_ptr(), sin.data_ptr(),
            tokens, heads, dim, cos.shape[-1], x.stride(0), x.stride(1), interleaved,
        )  # fmt: skip
        return out


@functools.cache
def rows(dtype: torch.dtype, device: torch.device) -> Rows | None:
    """The functions for tensors of a type on a device; None where there are none, which is said once."""
    if device.type != "cpu":
        return None
    try:
        return Rows(dtype)
    except CannotCompile as reason:
        log.warning("layers of %s run at less than full speed, by PyTorch alone: %s", dtype, reason)
        return None
