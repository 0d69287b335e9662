"""The operations other than attention, by name: every `Op` of every folder beside this page."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pkgutil
from collections.abc import Mapping

from allotrope import ops
from allotrope.kernels.backend import Op
from allotrope.ops.case import OpCase


@functools.cache
def registered_ops() -> Mapping[str, Op]:
    """Name -> operation, in the order of names. Raises ValueError if two have one name."""
    found: dict[str, Op] = {}
    for folder in pkgutil.iter_modules(ops.__path__, f"{ops.__name__}."):
        if not folder.ispkg:
            continue
        for value in vars(importlib.import_module(folder.name)).values():
            if not isinstance(value, Op):
                continue
            if found.setdefault(value.name, value) is not value:
                raise ValueError(f"two operations are named {value.name!r}")
    return dict(sorted(found.items()))


@functools.cache
def registered_cases() -> Mapping[str, Mapping[str, OpCase]]:
    """Name of an operation -> name of a case -> case, of every folder that has a `cases.py`."""
    found: dict[str, Mapping[str, OpCase]] = {}
    for folder in pkgutil.iter_modules(ops.__path__, f"{ops.__name__}."):
        if folder.ispkg and importlib.util.find_spec(f"{folder.name}.cases"):
            found |= importlib.import_module(f"{folder.name}.cases").CASES
    return found
