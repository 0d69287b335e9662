"""Faults of Triton's interpreter, mended for as long as tests need it.

- A number that a kernel computed is held as an array of one element and becomes a loop's bound by `int(array)`, which
  NumPy refuses from 2.4 on.
- bf16 is held as its bits, and a product of matrices multiplies the bits.
- fp32 becomes bf16 by dropping bits, where every chip rounds to nearest: twice the error.
- What a comparison finds is said to be of the type compared: spread over a block it becomes int32, which Triton 3.9
  refuses for a mask.
- For every call of a function within a kernel, and not just for a launch, the language is searched for what to replace:
  a third of all time. What a launch has replaced stays replaced until it ends.
"""

from __future__ import annotations

import importlib.util
import inspect
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

    _patch_all, _builtin = interpreter._patch_lang, interpreter.tl.core.is_builtin
    # What is replaced now: modules of the language, and the scopes that put back what was there.
    _replaced: list[Any] = []
    _scopes: list[Any] = []

    class _Launch:
        """What a launch has replaced, also for the functions that its kernel calls."""

        def restore(self) -> None:
            while _scopes:
                _scopes.pop().restore()
            _replaced.clear()

    class _Call:
        """A call within a launch, which puts everything back at its end."""

        def restore(self) -> None:
            pass

    def _patch_lang(fn: Any) -> Any:
        outermost = not _scopes
        languages = [one for one in fn.__globals__.values() if one is tl or one is tl.core]
        if outermost or any(one not in _replaced for one in languages):
            _scopes.append(_patch_all(fn))
            _replaced.extend(languages)
        return _Launch() if outermost else _Call()

    _builtins: dict[Any, list[str]] = {}

    def _patch_builtin(pkg: Any, builder: Any, scope: Any) -> None:
        if pkg not in _builtins:
            _builtins[pkg] = [name for name, member in inspect.getmembers(pkg) if _builtin(member)]
        for name in _builtins[pkg]:
            # Another module may hold the same function, replaced already.
            if _builtin(member := getattr(pkg, name)):
                interpreter._patch_attr(pkg, name, member, builder, scope)

    interpreter._patch_lang = _patch_lang
    interpreter._patch_builtin = _patch_builtin
    interpreter.InterpreterBuilder.binary_op = _of_truths
    interpreter.InterpreterBuilder.cast_impl = _cast_impl
    interpreter._patch_lang_tensor = _patch_lang_tensor
    interpreter.InterpreterBuilder.create_dot = _create_dot
