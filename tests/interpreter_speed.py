"""Makes Triton's interpreter faster: what it works out anew for every operation is worked out once.

That is types, shapes, and the type that an operation has. Sums and products of integers are held to their type's range
by one operation of NumPy instead of ten of the interpreter's. Nothing that a kernel computes changes.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

if importlib.util.find_spec("triton") is not None:
    import numpy as np
    from triton.language import core
    from triton.runtime import interpreter

    _semantic = interpreter.interpreter_semantic
    _np_dtype = functools.cache(interpreter._get_np_dtype)
    _init_block_type, _init_tensor = core.block_type.__init__, core.tensor.__init__
    _equal, _unwrap = core.dtype.__eq__, core._unwrap_if_constexpr
    _broadcast, _check_types = _semantic.broadcast_impl_value, _semantic.binary_op_type_checking_impl
    # What types hold, by what they are made of. Types of one shape share the object that says it.
    _types: dict[Any, dict[str, Any]] = {}
    _shapes: dict[Any, Any] = {}
    _UNWRAPPED = (int, bool, float, str, type(None), core.tensor, core.dtype, core.block_type, core.pointer_type)

    def _get_np_dtype(type: Any) -> Any:
        return _np_dtype(type.element_ty if isinstance(type, core.block_type) else type)

    def _hash(self: Any) -> int:
        return hash(self.name)

    def _equal_types(self: Any, other: Any) -> Any:
        return self is other or _equal(self, other)

    def _unwrap_if_constexpr(value: Any) -> Any:
        kind = type(value)
        if kind is core.constexpr:
            return value.value
        return value if kind in _UNWRAPPED else _unwrap(value)

    def _init_block_type_once(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([getattr(size, "value", size) for size in shape])
        if (held := _types.get((element_ty, sizes))) is None:
            _init_block_type(self, element_ty, shape)
            self.shape = _shapes.setdefault(sizes, self.shape)
            # Of all tensors of the type: what the first one holds.
            held = _types[element_ty, sizes] = self.__dict__ | {"_of_tensors": {}}
        self.__dict__.update(held)

    def _init_tensor_once(self: Any, handle: Any, type: Any) -> None:
        held = type.__dict__.setdefault("_of_tensors", {})
        if not held:
            _init_tensor(self, handle, type)
            held.update(self.__dict__)
        self.__dict__.update(held)
        self.handle, self.type = handle, type

    def _broadcast_impl_value(lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and left.shape is right.shape:
            return lhs, rhs
        return _broadcast(lhs, rhs)

    def _binary_op_type_checking_impl(
        lhs: Any,
        rhs: Any,
        lhs_ptr: bool = False,
        rhs_ptr: bool = False,
        arithmetic: bool = True,
        division: bool = False,
    ) -> Any:
        if not division and type(lhs) is core.tensor is type(rhs) and lhs.dtype is rhs.dtype and not lhs.dtype.is_ptr():
            return _broadcast_impl_value(lhs, rhs)
        return _check_types(lhs, rhs, lhs_ptr, rhs_ptr, arithmetic, division)

    def _check_range(lhs: Any, rhs: Any, operation: Any) -> None:
        scalar = lhs.type.scalar
        if scalar.int_bitwidth >= 64 or not _semantic.builder.options.sanitize_overflow:
            return
        name = operation.__name__
        exact = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[name]
        found = exact(lhs.handle.data, rhs.handle.data, dtype=np.int64)
        if found.min() < scalar.get_int_min_value() or found.max() > scalar.get_int_max_value():
            raise OverflowError(f"int{scalar.int_bitwidth} overflow detected for operation {name}")

    interpreter._get_np_dtype = _get_np_dtype
    core.pointer_type.__hash__ = _hash
    core.dtype.__eq__ = _equal_types
    core._unwrap_if_constexpr = _unwrap_if_constexpr
    core.block_type.__init__ = _init_block_type_once
    core.tensor.__init__ = _init_tensor_once
    # Of the interpreter alone, not of what is compiled beside it.
    _semantic.broadcast_impl_value = _broadcast_impl_value
    _semantic.binary_op_type_checking_impl = _binary_op_type_checking_impl
    _semantic.binary_op_sanitize_overflow_impl = _check_range
    _semantic.computation_type_impl = functools.cache(_semantic.computation_type_impl)
