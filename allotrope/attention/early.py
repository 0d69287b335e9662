"""Kernels that begin while the one before them ends: programmatic dependent launch, on NVIDIA chips from Hopper on.

A kernel is made by `early_jit` in place of `triton.jit` (or goes through `early`), and its first line is
`await_turn()`: it waits there until the kernel before it has written everything, and lets the next one come as far as
that. So every one of them has to call it, even one that needs nothing of the kernel before: what follows relies on all
that came before. A kernel of plain `triton.jit` begins when the one before it has ended, and does not call it.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import triton
from triton.language import core
from triton.language.extra import cuda

SWITCH = "ALLOTROPE_EARLY_LAUNCH"
"""Variable of the environment; 0: kernels begin when the one before them has ended."""


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
    """A compiled function that is launched early where the chip knows how."""
    if isinstance(made, triton.runtime.JITFunction):
        plain = made.run

        def run(*args: Any, **kwargs: Any) -> Any:
            return plain(*args, **kwargs, **({"launch_pdl": True} if _knows_how() else {}))

        made.run = run
    return made


def launched_early(kernel: Any) -> bool:
    """Whether a compiled function has been through `early`."""
    return "run" in vars(kernel)


@functools.cache
def _knows_how() -> bool:
    wanted = os.environ.get(SWITCH, "1") != "0"
    return (
        wanted
        and torch.version.cuda is not None
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability()[0] >= 9
    )
