"""Copies of tensors into parameters, of large ones by several threads while the next tensors are looked up.

A copy from a mapped file waits for its pages, and one to a device for their transfer: one thread leaves most of the
bandwidth of both unused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch

from allotrope.kernels.threads import threads_of

# Threads of a rank; more of them wait for each other.
_MOST_THREADS = 8
# Tensors that were made in memory, such as dequantized ones, wait no longer than so many bytes are ahead of them.
_BYTES_AHEAD = 1 << 30
# Of fewer bytes, such as scales, the copy takes less than handing it to a thread.
_LEAST_BYTES = 1 << 17


class Copies:
    """Use as a context manager: at its end all copies are made. An exception of one is raised by a later call or the
    end.

    `ranks`: that load on this host at once.
    """

    def __init__(self, ranks: int) -> None:
        self._pool = ThreadPoolExecutor(threads_of(ranks, _MOST_THREADS), "allotrope-load")
        self._ahead: deque[tuple[Future[None], int]] = deque()
        self._bytes = 0
        # Parameters of a host may be made in inference mode, and written in it alone; a thread has a mode of its own.
        self._inference = torch.is_inference_mode_enabled()

    def __enter__(self) -> Copies:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._wait(0)
        finally:
            self._pool.shutdown(cancel_futures=True)

    def add(self, size: int, copy: Callable[[], None]) -> None:
        """Have `copy` called, which moves `size` bytes: before the end, and not always by this thread."""
        if size < _LEAST_BYTES:
            copy()
            return
        self._ahead.append((self._pool.submit(self._make, copy), size))
        self._bytes += size
        self._wait(_BYTES_AHEAD)

    def _make(self, copy: Callable[[], None]) -> None:
        with torch.inference_mode(self._inference):
            copy()

    def _wait(self, most: int) -> None:
        """Until at most so many bytes are ahead."""
        while self._ahead and (self._bytes > most or not most):
            done, size = self._ahead.popleft()
            done.result()
            self._bytes -= size
