"""Memory that a process has freed goes back to the system.

The C library keeps what large tensors leave, and loading and long prompts leave much. Must not know who freed it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


@functools.cache
def _trim() -> Callable[[int], int] | None:
    """glibc's `malloc_trim`; other C libraries have none."""
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim


def give_back() -> None:
    """Return whole free pages to the system; the next large tensors get new ones."""
    trim = _trim()
    if trim is not None:
        trim(0)
