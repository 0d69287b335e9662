"""Products with a packed weight (`cpu.c`)."""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path

import torch
import torch.nn.functional as F

from allotrope.kernels.c.compiler import UNSUITED, CannotCompile, load

log = logging.getLogger("allotrope.kernels")

# Outputs of a panel, as in C.
_PANEL = 32
_POINTER, _LONG = ctypes.c_void_p, ctypes.c_long


class PackedWeight:
    """A weight, [outputs, inputs], that multiplies in C. Only where `packs` says so."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.outputs, self.inputs = weight.shape
        self.panels = _panels(weight)
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


class PackedStack:
    """Weights of experts, [E, outputs, inputs], that multiply rows sorted by expert. Only where `packs` says so."""

    def __init__(self, weights: torch.Tensor) -> None:
        self.experts, self.outputs, self.inputs = weights.shape
        self.panels = _panels(weights)
        library = _library(weights.dtype)
        assert library is not None
        self._product = library.grouped_product

    def __call__(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """`rows`: [n, inputs]. `ends`: [E] int32, where each expert's rows end. Returns [n, outputs]."""
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        y = rows.new_empty(len(rows), self.outputs)
        self._product(
            y.data_ptr(), rows.data_ptr(), rows.stride(0), self.panels.data_ptr(), ends.data_ptr(), self.experts,
            self.inputs, self.outputs,
        )  # fmt: skip
        return y


def _panels(weight: torch.Tensor) -> torch.Tensor:
    """[..., outputs, inputs] as [..., panels, inputs / pair, panel, pair]."""
    pair = 4 // weight.element_size()
    padded = F.pad(weight, (0, 0, 0, -weight.shape[-2] % _PANEL))
    return padded.unflatten(-1, (-1, pair)).unflatten(-3, (-1, _PANEL)).transpose(-3, -2).contiguous()


def packed_bytes(weight: torch.Tensor) -> int:
    """Bytes of a weight, [..., outputs, inputs], once it is packed."""
    outputs = weight.shape[-2]
    return weight.numel() // outputs * (outputs + -outputs % _PANEL) * weight.element_size()


def packs(weight: torch.Tensor) -> bool:
    """Whether a weight can be packed here and is multiplied fastest so."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16) or weight.shape[1] % 2:
        return False
    return _library(weight.dtype) is not None


@functools.cache
def _library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The functions for a type, if this machine has what they are made for. Why oneDNN multiplies is said once."""
    try:
        library = load(Path(__file__).with_name("cpu.c"), dtype)
        if not library.suits():
            raise CannotCompile(UNSUITED)
    except CannotCompile as reason:
        log.info("products of %s weights run by oneDNN: %s", dtype, reason)
        return None
    if not library.suits():
        return None
    library.product.restype = None
    library.product.argtypes = [_POINTER, _POINTER, _LONG, _POINTER, _POINTER, _LONG, _LONG, _LONG]
    library.grouped_product.restype = None
    library.grouped_product.argtypes = [_POINTER, _POINTER, _LONG, _POINTER, _POINTER, _LONG, _LONG, _LONG]
    return library
