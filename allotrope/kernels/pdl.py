"""Programmatic dependent launch (PDL): kernels that start while the one before them ends, from Hopper on.

A kernel is made by `pdl_jit` in place of `triton.jit` (or goes through `with_pdl`). Before it touches the device's
memory come `gdc_wait()` and `gdc_launch_dependents()`: it waits until the kernel before it has written everything, and
lets the next one start as far as its own wait. Every one of them calls both, even one that needs nothing of the kernel
before: the kernels after it rely on all that came before. A kernel of `no_pdl_jit` starts when the one before it has
ended, and calls neither.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import triton
from triton.language import core
from triton.language.extra import cuda

from allotrope.kernels.chip import current_chip
from allotrope.kernels.warmup import compile_for, warming_up

SWITCH = "ALLOTROPE_PDL"
"""Variable of the environment; 0: kernels start when the one before them has ended."""

OPTIONS = {"enable_fp_fusion": True}
"""What every kernel is compiled with. Products and sums become one instruction; from Triton 3.10 on not by default."""


def gdc_wait(_semantic: Any = None) -> None:
    """Wait until the kernel before has ended. Nothing on a chip without PDL, nor in the interpreter."""
    if _semantic is not None and _has_pdl(_semantic.builder.options):
        cuda.gdc_wait(_semantic=_semantic)


def gdc_launch_dependents(_semantic: Any = None) -> None:
    """Let the next kernel start. Nothing on a chip without PDL, nor in the interpreter."""
    if _semantic is not None and _has_pdl(_semantic.builder.options):
        cuda.gdc_launch_dependents(_semantic=_semantic)


# For the compiler these are functions of its own language; the interpreter calls them as they stand.
for _builtin in (gdc_wait, gdc_launch_dependents):
    setattr(_builtin, core.TRITON_BUILTIN, True)


def _has_pdl(options: Any) -> bool:
    return getattr(options, "backend_name", "") == "cuda" and int(options.arch.removeprefix("sm")) >= 90


def pdl_jit(function: Any = None, **options: Any) -> Any:
    """As `triton.jit`, launched with PDL where the chip has it."""
    if function is None:
        return lambda function: with_pdl(triton.jit(function, **options))
    return with_pdl(triton.jit(function, **options))


def with_pdl(made: Any) -> Any:
    """A compiled function that is launched with PDL where the chip has it, and not at all in a warm-up."""
    made.run = _Launcher(made.run, True)
    return made


def no_pdl_jit(function: Any = None, **options: Any) -> Any:
    """As `triton.jit`: launched when the kernel before has ended, and not at all in a warm-up."""
    if function is None:
        return functools.partial(no_pdl_jit, **options)
    made = triton.jit(function, **options)
    made.run = _Launcher(made.run, False)
    return made


def uses_pdl(kernel: Any) -> bool:
    """Whether a compiled function has been through `with_pdl`."""
    return isinstance(kernel.run, _Launcher) and kernel.run.pdl


@dataclass(frozen=True)
class _Launcher:
    """Triton's `run` of a kernel, and what it is told beside the kernel's arguments."""

    plain: Callable[..., Any]
    pdl: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        options = OPTIONS | {"launch_pdl": True} if self.pdl and _pdl_launches() else OPTIONS
        if warming_up():
            return compile_for(self.plain, *args, **kwargs, **options)
        return self.plain(*args, **kwargs, **options)


@functools.cache
def _pdl_launches() -> bool:
    return os.environ.get(SWITCH, "1") != "0" and current_chip().has_pdl
