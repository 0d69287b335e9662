"""Products with a packed weight (`product.c`)."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
import torch.nn.functional as F

from allotrope.cpu.compiler import CannotCompile, load

# Outputs of a panel, as in C.
_PANEL = 32
_POINTER, _LONG = ctypes.c_void_p, ctypes.c_long


class PackedWeight:
    """A weight, [outputs, inputs], that multiplies in C. Only where `packs` says so."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.outputs, self.inputs = weight.shape
        pair = 4 // weight.element_size()
        padded = F.pad(weight, (0, 0, 0, -self.outputs % _PANEL))
        panels = padded.view(-1, _PANEL, self.inputs // pair, pair).transpose(1, 2)
        self.panels = panels.contiguous()
        self.bias: tuple[torch.Tensor, torch.Tensor] | None = None
        library = _library(weight.dtype)
        assert library is not None
        self._product = library.product

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x W^T + bias. `x`: [T, inputs]. `bias`: [outputs]. Returns [T, outputs]."""
        if x.stride(1) != 1:
            x = x.contiguous()
        y = x.new_empty(len(x), self.outputs)
        padded = None if bias is None else self._padded(bias).data_ptr()
        self._product(
            y.data_ptr(), x.data_ptr(), x.stride(0), self.panels.data_ptr(), padded, len(x), self.inputs, self.outputs
        )
        return y

    def _padded(self, bias: torch.Tensor) -> torch.Tensor:
        """`bias` in fp32, as long as the panels; made once, since a layer's bias is always the same."""
        if self.bias is None or self.bias[0] is not bias:
            self.bias = (bias, F.pad(bias.float(), (0, -self.outputs % _PANEL)))
        return self.bias[1]


def packs(weight: torch.Tensor) -> bool:
    """Whether a weight can be packed here and is multiplied fastest so."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16) or weight.shape[1] % 2:
        return False
    return _library(weight.dtype) is not None


@functools.cache
def _library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The functions for a type, if this machine has what they are made for. (Without a compiler oneDNN multiplies.)"""
    try:
        library = load(Path(__file__).with_name("product.c"), dtype)
    except CannotCompile:
        return None
    library.product.restype = None
    library.product.argtypes = [_POINTER, _POINTER, _LONG, _POINTER, _POINTER, _LONG, _LONG, _LONG]
    return library if library.suits() else None
