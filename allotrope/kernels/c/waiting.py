"""How an OpenMP thread waits at a barrier: on a busy machine it sleeps at once in place of spinning.

Spinning for a moment before sleeping is the quickest where nothing else runs. On a busy machine it burns the CPU time
that the awaited thread needs. GCC's OpenMP runtime reads how long threads spin once, when it
is loaded; but while there are more OpenMP threads than CPUs they hardly spin at all (GOMP_SPINCOUNT in its manual). So
a second team, which sleeps, is there as long as the machine is busy.

Owns when that is. It must not know what is computed: the number of threads, and so every result, stays as it is.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from allotrope.kernels.c.compiler import CannotCompile, load

log = logging.getLogger("allotrope.kernels")

# Seconds between looks; shares of the time that the thread was ready to run and had no CPU.
_INTERVAL = 0.2
_BUSY, _QUIET = 0.2, 0.1
_SCHEDSTAT = Path("/proc/thread-self/schedstat")


def waited_for_cpu() -> float | None:
    """Seconds that this thread has been ready to run without a CPU; None where the system does not count them."""
    try:
        return int(_SCHEDSTAT.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


class Crowd:
    """A second team of OpenMP threads, asleep, until `end`. Raises CannotCompile where it cannot be made."""

    def __init__(self) -> None:
        library = load(Path(__file__).with_name("openmp_team.c"), torch.float32)
        # With those of the first team, more than the process has CPUs; the calling thread is one of them.
        self._threads = len(os.sched_getaffinity(0)) + 1
        self._ended = threading.Event()
        ready = threading.Event()

        def hold() -> None:
            library.crowd(self._threads)
            ready.set()
            self._ended.wait()

        self._holder = threading.Thread(target=hold, name="crowd", daemon=True)
        self._holder.start()
        ready.wait()

    def end(self) -> None:
        """Let the team go: threads spin again."""
        self._ended.set()
        self._holder.join()


class Waiting:
    """Watches, from the thread that computes, whether others want the CPU, and lets threads wait accordingly.

    `waited`: as `waited_for_cpu`. `clock`: seconds. `crowd`: makes what keeps threads from spinning until its `end`.
    """

    def __init__(
        self,
        waited: Callable[[], float | None] = waited_for_cpu,
        clock: Callable[[], float] = time.monotonic,
        crowd: Callable[[], Crowd] = Crowd,
    ) -> None:
        self._waited, self._clock, self._make = waited, clock, crowd
        self._crowd: Crowd | None = None
        self._seen_at, before = clock(), waited()
        self._before = before or 0.0
        self._watches = before is not None and torch.get_num_threads() > 1

    @property
    def asleep_at_once(self) -> bool:
        """Whether threads that wait do not spin now."""
        return self._crowd is not None

    def look(self) -> None:
        """Look whether it is time, which costs nothing else: to be called before every step."""
        now = self._clock()
        elapsed = now - self._seen_at
        if not self._watches or elapsed < _INTERVAL:
            return
        waited = self._waited() or 0.0
        share = (waited - self._before) / elapsed
        self._seen_at, self._before = now, waited
        if share > _BUSY and self._crowd is None:
            try:
                self._crowd = self._make()
            except CannotCompile as reason:
                log.info("threads go on spinning on this busy machine: %s", reason)
                self._watches = False
        elif share < _QUIET:
            self.close()

    def close(self) -> None:
        """Let threads wait as they do on a quiet machine."""
        if self._crowd is not None:
            self._crowd.end()
            self._crowd = None
