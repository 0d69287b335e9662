"""Running commands: the type of the `run` fixture, and what a command wrote to a terminal."""

from __future__ import annotations

import os
from collections.abc import Callable

from typer.testing import Result

Run = Callable[..., Result]


def read_terminal(descriptor: int) -> bytes:
    """All that is written to a pseudo-terminal until its last writer ends; `descriptor` is closed then."""
    shown = b""
    try:
        while piece := os.read(descriptor, 1 << 16):
            shown += piece
    except OSError:
        # The terminal of a process that has ended.
        pass
    os.close(descriptor)
    return shown
