"""The limit of file descriptors, and the number of connections that fit into it.

It must not know HTTP.
"""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

# One process serves far fewer connections. Some systems allow a billion descriptors, and some programs close each
# possible descriptor at a fork.
_MAX_DESCRIPTORS = 65536
# Descriptors that stay free for files, pipes and other sockets.
_RESERVED = 64
# Connections accepted beyond --max-connections: they get a 503, or an answer of /health.
SPARE_CONNECTIONS = 16
_MAX_CONNECTIONS = 8192


def raise_descriptor_limit() -> int:
    """Raise the soft limit of file descriptors to the hard one (65536 at most). Returns the new soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return _MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    with contextlib.suppress(OSError, ValueError):
        # Some systems refuse a soft limit equal to the hard limit that they report.
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft


def default_max_connections(descriptors: int) -> int:
    """The number of connections that fit beside the open descriptors. `descriptors`: the limit of descriptors."""
    spare = descriptors - _count_open() - _RESERVED - SPARE_CONNECTIONS
    return max(1, min(spare, _MAX_CONNECTIONS))


def _count_open() -> int:
    directory = Path("/proc/self/fd")
    return sum(1 for _ in directory.iterdir()) if directory.exists() else _RESERVED
