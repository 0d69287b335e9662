"""Calling C: one place that turns tensors and numbers into C's arguments.

Must not know: what a function computes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from allotrope.kernels.c.compiler import CannotCompile, load
from allotrope.kernels.chip import Chip

_TYPES: dict[str, Any] = {"p": ctypes.c_void_p, "l": ctypes.c_long, "f": ctypes.c_float}


class CFunction:
    """One function of a C source, for tensors of one type.

    `signature`: of its arguments, a letter each: p a tensor, an address or none, l an integer or bool, f a number.
    Floats that come last let it be recorded (`recording.py`). `defines`: macros of the source.
    """

    def __init__(self, source: Path, name: str, dtype: torch.dtype, signature: str, **defines: int) -> None:
        """Raises CannotCompile."""
        self.name, self.signature = name, signature
        self._function = getattr(load(source, dtype, **defines), name)
        self._function.argtypes = [_TYPES[letter] for letter in signature]
        self._function.restype = None

    @property
    def address(self) -> int:
        """Where its code is."""
        return ctypes.cast(self._function, ctypes.c_void_p).value or 0

    def __call__(self, *arguments: Any) -> None:
        """Tensors are passed by address: the caller holds their types, strides and sizes to what C reads."""
        words = [one.data_ptr() if isinstance(one, torch.Tensor) else one for one in arguments]
        self._function(*words)
        if listener is not None:
            listener(self, words)


listener: Callable[[CFunction, Sequence[Any]], None] | None = None
"""Is told each call and its arguments, while a computation is recorded."""


def c_reasons(source: Path, dtype: torch.dtype, chip: Chip, **defines: int) -> list[str]:
    """Why the functions of a C source cannot run for a type on a chip."""
    if chip.vendor != "cpu":
        return [f"chip={chip.arch} (needs cpu)"]
    try:
        load(source, dtype, **defines)
    except CannotCompile as reason:
        return [str(reason)]
    return []
