"""Four faults of Triton's interpreter, mended for as long as tests need it.

- A number that a kernel computed is held as an array of one element and becomes a loop's bound by `int(array)`, which
  NumPy refuses from 2.4 on.
- bf16 is held as its bits, and a product of matrices multiplies the bits.
- fp32 becomes bf16 by dropping bits, where every chip rounds to nearest: twice the error.
- What a comparison finds is said to be of the type compared: spread over a block it becomes int32, which Triton 3.9
  refuses for a mask.
"""

from __future__ import annotations

import importlib.util
from typing import Any

if importlib.util.find_spec("triton") is not None:
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    _patch, _dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def _numbers(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def _create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return _dot(self, _numbers(a), _numbers(b), *others)

    _cast = interpreter.InterpreterBuilder.cast_impl

    def _cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.bfloat16):
            return _cast(self, src, dst_type)
        bits = np.atleast_1d(np.ascontiguousarray(src.data)).view(np.uint32).reshape(src.data.shape)
        nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        data = np.where(np.isnan(src.data), bits >> 16 | 0x40, nearest).astype(np.uint16)
        return interpreter.TensorHandle(data, tl.bfloat16)

    _binary_op = interpreter.InterpreterBuilder.binary_op

    def _of_truths(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        made = _binary_op(self, lhs, rhs, op)
        return interpreter.TensorHandle(made.data, tl.int1) if made.data.dtype == np.bool_ else made

    interpreter.InterpreterBuilder.binary_op = _of_truths
    interpreter.InterpreterBuilder.cast_impl = _cast_impl
    interpreter._patch_lang_tensor = _patch_lang_tensor
    interpreter.InterpreterBuilder.create_dot = _create_dot
