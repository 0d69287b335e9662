"""The mixing weights of hyper-connections in one C function (`cpu.c`)."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from allotrope.kernels.c.compiler import CannotCompile, load

_POINTER, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float


class StreamFunctions:
    def __init__(self) -> None:
        """Raises CannotCompile."""
        self._mixing = load(Path(__file__).with_name("cpu.c"), torch.float32).mixing
        self._mixing.argtypes = [_POINTER] * 6 + [_LONG] * 3 + [_FLOAT]
        self._mixing.restype = None

    def mixing(
        self, mixes: torch.Tensor, base: torch.Tensor, scales: torch.Tensor, streams: int, iterations: int, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """From mixes [T, (2 + N) N] fp32 to pre [T, N], post [T, N] and C [T, N, N], fp32; `base`, `scales`: one each.

        The equations are those of `layers.hyper_connection`.
        """
        assert mixes.dtype == base.dtype == scales.dtype == torch.float32
        mixes, tokens = mixes.contiguous(), len(mixes)
        pre, post = mixes.new_empty(2, tokens, streams).unbind()
        comb = mixes.new_empty(tokens, streams, streams)
        self._mixing(
            pre.data_ptr(), post.data_ptr(), comb.data_ptr(), mixes.data_ptr(), base.data_ptr(), scales.data_ptr(),
            tokens, streams, iterations, eps,
        )  # fmt: skip
        return pre, post, comb


@functools.cache
def stream_functions(device: torch.device) -> StreamFunctions | None:
    """The functions for tensors on a device; None where there are none (`rows` says so)."""
    if device.type != "cpu":
        return None
    try:
        return StreamFunctions()
    except CannotCompile:
        return None
