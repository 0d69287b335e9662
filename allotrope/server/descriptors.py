"""File descriptors: how many this process may open, and how many connections that leaves.

It must not know HTTP.
"""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

# Far above what one process serves; some systems allow a billion, and some programs close each of them at a fork.
_MAX_DESCRIPTORS = 65536
# Left for files, pipes and sockets that are not connections of clients.
_RESERVED = 64
# Connections beyond the bound that are taken all the same, to be told so and to answer /health.
SPARE_CONNECTIONS = 16
_MAX_CONNECTIONS = 8192


def raise_descriptor_limit() -> int:
    """Raise the soft limit of file descriptors to the hard one (65536 at most); returns the limit that holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return _MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    with contextlib.suppress(OSError, ValueError):
        # Some systems refuse what they have named as the hard limit.
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft


def default_max_connections(descriptors: int) -> int:
    """Connections that fit beside what is open now. `descriptors`: the limit of file descriptors."""
    spare = descriptors - _count_open() - _RESERVED - SPARE_CONNECTIONS
    return max(1, min(spare, _MAX_CONNECTIONS))


def _count_open() -> int:
    directory = Path("/proc/self/fd")
    return sum(1 for _ in directory.iterdir()) if directory.exists() else _RESERVED
