"""The registry of kernels: each module registers the specializations that released models need.

A module of kernels is one whose name begins with `triton` or `gluon`. Importing it registers them, so that no list is
kept by hand. Must not know: what a kernel computes, or how it is compiled.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from allotrope.kernels.chip import Chip


@dataclass(frozen=True)
class Specialization:
    """One kernel at one signature.

    `name`: for people, unique. `kernel`: the `@triton.jit` or `@gluon.jit` function. `signature`: argument -> Triton
    type ("*bf16", "i32", ...; "*bf16:16", "i32:16" where the launcher will see a multiple of 16, as for rows that are
    loaded whole), "constexpr" for those in `constants`. `num_warps`, `num_stages`: as it is launched. `spills`:
    registers that may go to memory, where the kernel is known to be faster so.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int
    spills: int = 0

    @property
    def has_e4m3fn(self) -> bool:
        """Whether an argument points to numbers of float8_e4m3fn."""
        return any(kind.startswith("*fp8e4nv") for kind in self.signature.values())


Specializations = Callable[[Chip], list[Specialization]]

_REGISTERED: dict[str, list[Specializations]] = {}


def specializations(function: Specializations) -> Specializations:
    """Register a module's specializations for a chip: released sizes, with the launch configurations of the chip."""
    _REGISTERED.setdefault(function.__module__, []).append(function)
    return function


def kernel_modules(packages: Sequence[str] = ("allotrope.ops", "allotrope.attention")) -> list[str]:
    """Every module of kernels, by name, sorted. The packages that hold them are imported, the modules are not."""
    modules = [
        one.name
        for package in packages
        for one in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}.")
    ]
    return sorted(name for name in modules if name.rpartition(".")[2].startswith(("triton", "gluon")))


def every_specialization(chip: Chip, modules: Sequence[str] | None = None) -> list[Specialization]:
    """The specializations that all modules of kernels, or those named, register for a chip.

    Without those that hold e4m3 numbers where Triton cannot: backends reject these there (`e4m3fn_reasons`).
    """
    result: list[Specialization] = []
    for module in kernel_modules() if modules is None else modules:
        importlib.import_module(module)
        for function in _REGISTERED.get(module, ()):
            result.extend(one for one in function(chip) if chip.triton_has_e4m3fn or not one.has_e4m3fn)
    return result
