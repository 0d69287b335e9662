"""Makes Triton's interpreter round as the chips do: to the nearest, ties to even, and all rows of a product alike.

Its own conversion cuts off what bf16 has no bits for, and in rounding to FP8 loses the carry into the exponent. Its
product is one of BLAS, whose kernels for some processors sum a row otherwise by where it lies in the tile.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import torch

if importlib.util.find_spec("triton") is not None:
    import triton.language as tl
    from triton.runtime import interpreter

    _TYPES = {
        tl.float32: torch.float32,
        tl.bfloat16: torch.bfloat16,
        tl.float16: torch.float16,
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
    }
    _convert = interpreter._convert_float

    def _convert_float(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if source not in _TYPES or target not in _TYPES or rounding_mode == interpreter._ir.ROUNDING_MODE.RTZ:
            return _convert(data, source, target, rounding_mode)
        bits = np.ascontiguousarray(data).view(f"int{source.primitive_bitwidth}").reshape(-1)
        exact = torch.from_numpy(bits.copy()).view(_TYPES[source]).float()
        if target.is_fp8():
            limit = torch.finfo(_TYPES[target]).max
            exact = exact.clamp(-limit, limit)
        width = target.primitive_bitwidth
        rounded = exact.to(_TYPES[target]).view(getattr(torch, f"int{width}")).numpy()
        return rounded.view(f"uint{width}").reshape(data.shape)

    interpreter._convert_float = _convert_float

    _product = interpreter.InterpreterBuilder.create_dot

    def _create_dot(self: Any, a: Any, b: Any, sums: Any, *options: Any) -> Any:
        """[..., M, K] x [..., K, N], every row by itself."""
        handle = interpreter.TensorHandle
        rows, right = handle(a.data[..., None, :], a.dtype), handle(b.data[..., None, :, :], b.dtype)
        found = _product(self, rows, right, handle(sums.data[..., None, :], sums.dtype), *options)
        return handle(found.data[..., 0, :], found.dtype)

    interpreter.InterpreterBuilder.create_dot = _create_dot
