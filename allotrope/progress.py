"""Progress of loading weights: the loader reports it, and a command or the engine's process displays it.

Owns the channel between the two (a logger of its own, without a handler by default) and the display. It must not know
checkpoints.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import TextIO

_channel = logging.getLogger("allotrope.progress")
_channel.propagate = False
_LINE_SECONDS, _BAR_SECONDS = 10.0, 0.1
_WIDTH = 24
_CLEAR = "\r\x1b[K"


def report_bytes(done: int, total: int) -> None:
    """Report that `done` of `total` bytes of weights are read."""
    _channel.debug("read %d of %d bytes", done, total, extra={"done": done, "total": total})


def show_progress() -> None:
    """Display progress on standard error from now on."""
    _channel.handlers = [ProgressDisplay(lambda: sys.stderr)]
    _channel.setLevel(logging.DEBUG)


class ProgressDisplay(logging.Handler):
    """Displays a bar on a terminal, and removes it at the end. Elsewhere it writes a line every 10 seconds."""

    def __init__(self, stream: Callable[[], TextIO], clock: Callable[[], float] = time.monotonic) -> None:
        """`stream`: returns the output stream, called for each record. `clock`: returns monotonic seconds."""
        super().__init__()
        self._stream, self._clock = stream, clock
        self._started: float | None = None
        self._due = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        """Display a record of `report_bytes`, if the last one is long enough ago."""
        done, total = int(record.__dict__["done"]), int(record.__dict__["total"])
        now = self._clock()
        stream = self._stream()
        terminal = not stream.closed and stream.isatty()
        if self._started is None:
            self._started = now
            self._due = now if terminal else now + _LINE_SECONDS
        if done >= total:
            self._started = None
            if terminal:
                _write(stream, _CLEAR)
            return
        if now < self._due:
            return
        self._due = now + (_BAR_SECONDS if terminal else _LINE_SECONDS)
        text = f"{_amounts(done, total)}{_left(now - self._started, done, total)}"
        filled = _WIDTH * done // total
        bar = "#" * filled + "." * (_WIDTH - filled)
        _write(stream, f"{_CLEAR}loading [{bar}] {text}" if terminal else f"loading weights: {text}\n")


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
        stream.flush()
    except (OSError, ValueError):
        # The stream is closed; loading continues without a display.
        pass


def _amounts(done: int, total: int) -> str:
    unit, name = next(((size, name) for size, name in ((1e9, "GB"), (1e6, "MB")) if total >= size), (1e3, "kB"))
    return f"{done / unit:.1f} of {total / unit:.1f} {name} ({100 * done // total} %)"


def _left(elapsed: float, done: int, total: int) -> str:
    if not done or elapsed <= 0:
        return ""
    seconds = round(elapsed * (total - done) / done)
    return f", {seconds // 60} min {seconds % 60} s left" if seconds >= 60 else f", {seconds} s left"
