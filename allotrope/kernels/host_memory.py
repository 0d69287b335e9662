"""Memory that a process no longer needs goes back to the system.

The C library keeps what large tensors leave, and loading and long prompts leave much. Of the libraries' code, most of
what start-up ran is never run again. Must not know who used it.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path

_SMAPS = Path("/proc/self/smaps")


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


@functools.cache
def unmap_code(after: str) -> None:
    """Take the pages of libraries out of this process, once for each name of what has run; what is needed again is
    mapped at its next use, from the system's copy of the file. Does nothing where the system does not list them."""
    if not _SMAPS.exists():
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for start, end in _unwritten(_SMAPS.read_text()):
        advise(start, end - start, mmap.MADV_DONTNEED)


def _unwritten(smaps: str) -> Iterator[tuple[int, int]]:
    """Where files are mapped that the process can only read, and of which no page is a copy of its own."""
    span: tuple[int, int] | None = None
    for line in smaps.splitlines():
        key, _, rest = line.partition(" ")
        if not key.endswith(":"):
            start, _, end = key.partition("-")
            access, _, _, inode = rest.split()[:4]
            span = (int(start, 16), int(end, 16)) if access in ("r-xp", "r--p") and inode != "0" else None
        elif key == "Anonymous:" and span is not None and rest.split()[0] == "0":
            yield span
