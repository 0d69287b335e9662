"""Captured steps: by size, captured one by one while requests are served eagerly.

Owns when a size is captured, and decode steps, one CUDA graph each. Must not know a step: its body reads and writes
static buffers.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import gc
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch

from allotrope.kernels.chip import free_memory

log = logging.getLogger("allotrope.engine")

Captured = TypeVar("Captured")


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


class Graphs(ABC, Generic[Captured]):
    """Steps of some `sizes`, ascending; of each, once it is captured, what replays it.

    `alone`: no other rank runs the steps with this one. `name`: of the steps, `unit`: of what sizes count, for the log.
    """

    def __init__(
        self, sizes: Sequence[int], device: torch.device, *, capture: bool, alone: bool, name: str, unit: str
    ) -> None:
        self.sizes = sizes
        self._device = device
        self._graphs: dict[int, Captured] = {}
        # Largest first: smaller ones then fit into the memory that it took.
        self._wanted = list(sizes[::-1]) if capture else []
        self._pending = [*self._wanted]
        self._alone, self._name, self._unit = alone, name, unit
        self._pool: Any = None
        self._seconds, self._bytes = 0.0, 0
        self.replays = self.eager = 0

    @abstractmethod
    def _prepare(self, size: int) -> None:
        """Run a step of `size` once for real on the capture's stream: kernels are compiled and libraries take their
        workspaces. Other ranks run it too."""

    @abstractmethod
    def _capture(self, size: int) -> Captured:
        """Capture a step that is prepared."""

    def padded(self, count: int) -> int:
        """The size at which a step of `count` requests or tokens runs."""
        return self.sizes[bisect.bisect_left(self.sizes, count)]

    @property
    def captured(self) -> Sequence[int]:
        """The sizes that have a graph."""
        return sorted(self._graphs)

    @property
    def pending(self) -> bool:
        """Whether there is a size left to capture."""
        return bool(self._pending)

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
            self.capture(size)
        except RuntimeError as error:
            if not (prepared or self._alone):
                # The other ranks wait in a collective of the step: this is no failure to capture.
                raise
            self._pending.clear()
            log.warning("%s of %d %s cannot be captured, they run eager: %s", self._name, size, self._unit, error)
            return False
        self._seconds += time.monotonic() - started
        self._bytes += free - free_memory(self._device)
        if not self._pending:
            log.info(
                "captured %s of %s %s in %.1f s; their graphs take %.2f GB beside weights and caches",
                *(self._name, ", ".join(map(str, self.captured)), self._unit, self._seconds, self._bytes / 1e9),
            )
        return True

    def capture(self, size: int) -> None:
        """Capture a size, a step of which ran on the capture's stream. Raises RuntimeError where it cannot be."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        self._graphs[size] = self._capture(size)

    def drop(self, size: int) -> None:
        """Let go of the graph of a size, and of the memory that no other one shares with it."""
        del self._graphs[size]
        torch.cuda.empty_cache()

    def stop_capturing(self) -> None:
        """Leave the sizes that have no graph eager."""
        self._pending.clear()

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Run on the capture's stream, behind and before what runs on the current one."""
        stream, current = _capture_stream(self._device), torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            yield
        current.wait_stream(stream)

    def _begin(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
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


class DecodeGraphs(Graphs[torch.cuda.CUDAGraph]):
    """Runs `body(size)` for the sizes of `decode_sizes(max_size)`: as a captured graph once there is one.

    `idle()` makes the static buffers those of a step without requests. The rest as in `Graphs`.
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
        super().__init__(decode_sizes(max_size), device, capture=capture, alone=alone, name=name, unit="requests")
        self._body, self._idle = body, idle

    def run(self, size: int) -> None:
        """Run the body at one of the sizes."""
        graph = self._graphs.get(size)
        if graph is None:
            self.eager += 1
            self._body(size)
        else:
            self.replays += 1
            graph.replay()

    def _prepare(self, size: int) -> None:
        self._idle()
        with self._on_stream():
            self._body(size)

    def _capture(self, size: int) -> torch.cuda.CUDAGraph:
        with self._on_stream(), collector_paused():
            graph = self._begin()
            try:
                self._body(size)
            finally:
                graph.capture_end()
        return graph


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Memory that is freed by a collection in the middle of a capture would break it."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
