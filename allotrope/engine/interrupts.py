"""Ctrl-C beside steps: within one, what the engine has noted of pages and states is not yet what they hold."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def interrupts_wait() -> Iterator[None]:
    """A SIGINT within is handled behind it; a second one does not wait. Does nothing outside the main thread, which has
    the signals, and where no handler of Python's is set."""
    former = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(former):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []

    def take(number: int, frame: FrameType | None) -> None:
        came.append((number, frame))
        if len(came) > 1:
            former(number, frame)

    signal.signal(signal.SIGINT, take)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
    if came:
        former(*came[0])
