"""How many threads a rank may start."""

from __future__ import annotations

import os


def threads_of(ranks: int, most: int) -> int:
    """Up to `most`: its part of the cores that this process may use. `ranks`: that share them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(most, cores // ranks))
