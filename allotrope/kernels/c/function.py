"""Calling C: one place that turns tensors and numbers into C's arguments.

Must not know: what a function computes.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch

from allotrope.kernels.c.compiler import CannotCompile, load
from allotrope.kernels.chip import Chip

_TYPES: dict[str, Any] = {"p": ctypes.c_void_p, "l": ctypes.c_long, "f": ctypes.c_float}


class CFunction:
    """One function of a C source, for tensors of one type.

    `signature`: of its arguments, a letter each: p a tensor or none, l an integer or bool, f a number; s for the next
    of `structs`, which is passed by value. `defines`: macros of the source.
    """

    def __init__(
        self, source: Path, name: str, dtype: torch.dtype, signature: str, *structs: Any, **defines: int
    ) -> None:
        """Raises CannotCompile."""
        following = iter(structs)
        self._function = getattr(load(source, dtype, **defines), name)
        self._function.argtypes = [next(following) if letter == "s" else _TYPES[letter] for letter in signature]
        self._function.restype = None

    def __call__(self, *arguments: Any) -> None:
        """Tensors are passed by address: the caller holds their types, strides and sizes to what C reads."""
        self._function(*(one.data_ptr() if isinstance(one, torch.Tensor) else one for one in arguments))


def c_reasons(source: Path, dtype: torch.dtype, chip: Chip, **defines: int) -> list[str]:
    """Why the functions of a C source cannot run for a type on a chip."""
    if chip.vendor != "cpu":
        return [f"chip={chip.arch} (needs cpu)"]
    try:
        load(source, dtype, **defines)
    except CannotCompile as reason:
        return [str(reason)]
    return []
