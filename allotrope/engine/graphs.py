"""Captured decode steps: one CUDA graph per batch size, captured one by one while requests are served eagerly.

Owns sizes, capture and replay. Must not know a step: its body reads and writes static buffers.
"""

from __future__ import annotations

import bisect
import functools
import gc
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from allotrope.kernels.chip import free_memory

log = logging.getLogger("allotrope.engine")


def decode_sizes(max_size: int) -> list[int]:
    """Batch sizes that decode steps are padded to: 1, 2, 4, then multiples of 8, of 16 above 64, of 32 above 256."""
    sizes = [size for size in (1, 2, 4, *range(8, 65, 8), *range(80, 257, 16)) if size < max_size]
    return [*sizes, *range(288, max_size, 32), max_size]


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of every capture: libraries keep a workspace for each stream."""
    return torch.cuda.Stream(device)


def padded_size(sizes: Sequence[int], requests: int) -> int:
    """The least of ascending `sizes` that holds `requests`; the largest where none does."""
    return sizes[min(bisect.bisect_left(sizes, requests), len(sizes) - 1)]


class DecodeGraphs:
    """Runs `body(size)` for the sizes of `decode_sizes(max_size)`: as a captured graph once there is one.

    `idle()` makes the static buffers those of a step without requests. `alone`: no other rank runs the body with this
    one. `name`: of what the body runs, for the log.
    """

    def __init__(
        self,
        body: Callable[[int], None],
        idle: Callable[[], None],
        max_size: int,
        device: torch.device,
        *,
        capture: bool,
        alone: bool = True,
        name: str = "decode steps",
    ) -> None:
        self.sizes = decode_sizes(max_size)
        self._body, self._idle, self._device = body, idle, device
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        # Largest first: smaller ones then fit into the memory that it took.
        self._wanted = self.sizes[::-1] if capture else []
        self._pending = [*self._wanted]
        self._alone, self._name = alone, name
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._seconds, self._bytes = 0.0, 0
        self.replays = self.eager = 0

    def padded(self, requests: int) -> int:
        """The size at which a step of `requests` requests runs."""
        return self.sizes[bisect.bisect_left(self.sizes, requests)]

    @property
    def captured(self) -> Sequence[int]:
        """The sizes that have a graph."""
        return sorted(self._graphs)

    @property
    def pending(self) -> bool:
        """Whether there is a size left to capture."""
        return bool(self._pending)

    def run(self, size: int) -> None:
        """Run the body at one of the sizes."""
        graph = self._graphs.get(size)
        if graph is None:
            self.eager += 1
            self._body(size)
        else:
            self.replays += 1
            graph.replay()

    def capture_next(self) -> bool:
        """Capture one more size. Returns whether there was one to capture.

        Not while the buffers hold a step that has yet to run. If a capture fails, the reason is logged and the sizes
        without a graph stay eager.
        """
        if not self._pending:
            return False
        size = self._pending.pop(0)
        started, free = time.monotonic(), free_memory(self._device)
        prepared = False
        try:
            self._prepare(size)
            prepared = True
            self._graphs[size] = self._capture(size)
        except RuntimeError as error:
            if not (prepared or self._alone):
                # The other ranks wait in a collective of the body: this is no failure to capture.
                raise
            self._pending.clear()
            log.warning("%s of %d requests cannot be captured, they run eager: %s", self._name, size, error)
            return False
        self._seconds += time.monotonic() - started
        self._bytes += free - free_memory(self._device)
        if not self._pending:
            log.info(
                "captured %s of %s requests in %.1f s; their graphs take %.2f GB beside weights and caches",
                *(self._name, self._listed(), self._seconds, self._bytes / 1e9),
            )
        return True

    def stop_capturing(self) -> None:
        """Leave the sizes that have no graph eager."""
        self._pending.clear()

    def _listed(self) -> str:
        return ", ".join(map(str, self.captured))

    def _prepare(self, size: int) -> None:
        """Run the body once for real: kernels are compiled and libraries take their workspaces."""
        if self._stream is None:
            self._stream = _capture_stream(self._device)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        self._idle()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._body(size)

    def _capture(self, size: int) -> torch.cuda.CUDAGraph:
        """The body as a graph, once it is prepared."""
        assert self._stream is not None
        graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        # Memory that is freed by a collection in the middle of a capture would break it.
        gc.disable()
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    self._body(size)
                finally:
                    graph.capture_end()
        finally:
            if collecting:
                gc.enable()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return graph

    def reset(self) -> None:
        """Let go of all graphs, and capture them anew: what they read has moved."""
        self._graphs.clear()
        self._pending = [*self._wanted]
        self._pool = None

    def close(self) -> None:
        """Let go of all graphs."""
        self._pending.clear()
        self._graphs.clear()
