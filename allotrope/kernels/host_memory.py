"""What a process asks of the system for its memory: huge pages for weights, and to take back what is not needed.

The C library keeps what large tensors leave, and loading and long prompts leave much. Of the libraries' code, most of
what was run once is never run again. Must not know who used it.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch

_MAPS = Path("/proc/self/maps")
_HUGE_PAGE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")


@functools.cache
def _function(name: str, *argtypes: type) -> Callable[..., int] | None:
    """A function of the C library; None where it has none of this name."""
    found: Any = getattr(ctypes.CDLL(None), name, None)
    if found is not None:
        found.argtypes = argtypes
    return cast(Callable[..., int] | None, found)


@functools.cache
def _huge_page() -> int:
    """Bytes of a huge page; 0 where there are none."""
    return int(_HUGE_PAGE.read_text()) if _HUGE_PAGE.exists() else 0


def _advise() -> Callable[..., int] | None:
    return _function("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _trim_heap() -> None:
    """Return whole free pages of the C library to the system."""
    if trim := _function("malloc_trim", ctypes.c_size_t):
        trim(0)


class _Trim:
    """`_trim_heap`, once for each `every` bytes that it is told of."""

    def __init__(self, every: int) -> None:
        self.every, self._bytes = every, 0

    def after(self, size: int) -> None:
        self._bytes += size
        if self._bytes >= self.every:
            _trim_heap()
            self._bytes = 0


_trim = _Trim(1 << 27)


def empty_weight(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor as of `torch.empty`, on huge pages where the system lends them: weights are read from end to end at
    every step, and need fewer translations of addresses then. A mapping of its own: what the C library hands out has
    been in use, in small pages."""
    size = torch.Size(shape).numel() * dtype.itemsize
    page, advise = _huge_page(), _advise()
    if not page or size < page or advise is None:
        return torch.empty(shape, dtype=dtype)
    # What weights are packed from is freed as they are, and would not be used again.
    _trim.after(size)
    memory = mmap.mmap(-1, size + page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    found = torch.frombuffer(memory, dtype=torch.uint8)
    offset = -found.data_ptr() % page
    # Of the last page others may have the rest.
    advise(found.data_ptr() + offset, size // page * page, mmap.MADV_HUGEPAGE)
    return found[offset : offset + size].view(dtype).view(torch.Size(shape))


def give_back() -> None:
    """Return whole free pages to the system, and those of code. The next large tensors get new ones; code that runs
    again is mapped anew, from the system's copy of its file."""
    _trim_heap()
    if _MAPS.exists() and (advise := _advise()):
        for start, end in _code(_MAPS.read_text()):
            advise(start, end - start, mmap.MADV_DONTNEED)


def _code(maps: str) -> Iterator[tuple[int, int]]:
    """Where the code of files is mapped, which nobody writes and nobody unmaps. `maps`: /proc/PID/maps."""
    for line in maps.splitlines():
        if " r-xp " in line:
            place, _, _, _, inode = line.split()[:5]
            if inode != "0":
                start, _, end = place.partition("-")
                yield int(start, 16), int(end, 16)
