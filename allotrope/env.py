"""What Allotrope asks of the process it runs in. Nothing here is needed for right answers, only for quick ones."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Let the C library reuse freed tensors instead of giving their pages back.

    glibc returns every block above some size to the system at once, and the next one of that size faults in page by
    page: on a CPU that costs more than the arithmetic on it. Does nothing with another C library.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 1 << 30)
        mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)
