"""Kernels that begin while the one before them ends: programmatic dependent launch, on NVIDIA chips from Hopper on.

A kernel is made by `early_jit` in place of `triton.jit` (or goes through `early`), and its first line is
`await_turn()`: it waits there until the kernel before it has written everything, and lets the next one come as far as
that. So every one of them has to call it, even one that needs nothing of the kernel before: what follows relies on all
that came before. A kernel of `in_turn_jit` begins when the one before it has ended, and does not call it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.language import core
from triton.language.extra import cuda

from allotrope.attention.rehearsal import compile_for, rehearsing

SWITCH = "ALLOTROPE_EARLY_LAUNCH"
"""Variable of the environment; 0: kernels begin when the one before them has ended."""

OPTIONS = {"enable_fp_fusion": True}
"""What every kernel is compiled with. Products and sums become one instruction; from Triton 3.10 on not by default."""


def await_turn(_semantic: Any = None) -> None:
    """Nothing where the chip does not know it, nor in the interpreter."""
    if _semantic is not None and _waits(_semantic.builder.options):
        cuda.gdc_wait(_semantic=_semantic)
        cuda.gdc_launch_dependents(_semantic=_semantic)


# For the compiler a function of its own language; the interpreter calls it as it stands.
setattr(await_turn, core.TRITON_BUILTIN, True)


def _waits(options: Any) -> bool:
    return getattr(options, "backend_name", "") == "cuda" and int(options.arch.removeprefix("sm")) >= 90


def early_jit(function: Any = None, **options: Any) -> Any:
    """As `triton.jit`, launched early where the chip knows how."""
    if function is None:
        return lambda function: early(triton.jit(function, **options))
    return early(triton.jit(function, **options))


def early(made: Any) -> Any:
    """A compiled function that is launched early where the chip knows how, and not at all in a rehearsal."""
    made.run = _Launcher(made.run, True)
    return made


def in_turn_jit(function: Any = None, **options: Any) -> Any:
    """As `triton.jit`: launched when the kernel before has ended, and not at all in a rehearsal."""
    if function is None:
        return functools.partial(in_turn_jit, **options)
    made = triton.jit(function, **options)
    made.run = _Launcher(made.run, False)
    return made


def launched_early(kernel: Any) -> bool:
    """Whether a compiled function has been through `early`."""
    return isinstance(kernel.run, _Launcher) and kernel.run.early


@dataclass(frozen=True)
class _Launcher:
    """Triton's `run` of a kernel, and what it is told beside the kernel's arguments."""

    plain: Callable[..., Any]
    early: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        options = OPTIONS | {"launch_pdl": True} if self.early and _knows_how() else OPTIONS
        if rehearsing():
            return compile_for(self.plain, *args, **kwargs, **options)
        return self.plain(*args, **kwargs, **options)


@functools.cache
def _knows_how() -> bool:
    wanted = os.environ.get(SWITCH, "1") != "0"
    return (
        wanted
        and torch.version.cuda is not None
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability()[0] >= 9
    )
