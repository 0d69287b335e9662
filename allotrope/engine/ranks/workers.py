"""The other ranks as rank 0 sees them, wherever they run: the first fault of any rank, and what follows from it.

Owns what follows from a fault: the other ranks are killed, what waits for them is aborted, and the call that is under
way raises `EngineDead`. Must not know how a rank is started or reached, or what the ranks compute.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from allotrope.cache.memory import MemoryPlan
from allotrope.config import EngineConfig
from allotrope.engine.executor import OnDeath
from allotrope.engine.packed_step import PackedStep
from allotrope.engine.ranks.rank_board import LOADED, STARTING, RankBoard
from allotrope.engine.ranks.rank_group import RankGroup, start_thread
from allotrope.engine.ranks.rank_monitor import RankMonitor, describe_error, name_rank
from allotrope.engine.ranks.step_channel import Command
from allotrope.errors import AllotropeError, EngineDead

# After a fault, the call that is under way gets this long to raise its error.
_UNWIND_SECONDS = 5.0
# The other ranks get this long once they are killed.
REAP_SECONDS = 1.0


class Workers(ABC):
    """All ranks but 0. `fault`: the first one of any rank, in one line; None while there is none.

    `size`: ranks, rank 0 among them. `aborts`: called once the other ranks are gone, each from a thread of its own, to
    end what waits for them. May be called again. `on_death`: as of the executor.
    """

    cause_seconds = 1.0
    """A rank whose collective broke waits this long for the fault that broke it to become known."""

    def __init__(self, config: EngineConfig, size: int, on_death: OnDeath | None) -> None:
        self.fault: str | None = None
        self.aborts: list[Callable[[], None]] = []
        self.size = size
        self._on_death = on_death
        self._board = RankBoard.make(size)
        self._monitor = RankMonitor(0, self._board, config.watchdog_seconds, self._look)
        self._lock = threading.Lock()
        self._known = threading.Event()
        self._closed = False
        # Calls that are under way, one inside the other.
        self._calls = 0
        if size > 1:
            self._monitor.start()

    @property
    @abstractmethod
    def process_ids(self) -> list[int]:
        """The processes of the other ranks, each on its own host."""

    @abstractmethod
    def start(self, config: EngineConfig, ranks: RankGroup) -> None:
        """Start every rank but 0; none has joined when this returns. `ranks`: the group as rank 0 opened it."""

    @abstractmethod
    def share_memory_plan(self, memory: MemoryPlan) -> None:
        """Let every rank have rank 0's memory plan, before any step."""

    @abstractmethod
    def send(self, packed: PackedStep) -> None:
        """Let every rank run a step, in the order of the calls. Raises EngineDead where a rank has failed."""

    @abstractmethod
    def command(self, command: Command) -> None:
        """Tell every rank, in the order of the steps."""

    @abstractmethod
    def _let_go(self) -> None:
        """Ask the ranks to end. They get a moment before they are killed."""

    @abstractmethod
    def _kill(self) -> None:
        """End the ranks at once, those that are stopped as well."""

    @abstractmethod
    def _reap(self, seconds: float) -> None:
        """Wait for the end of the ranks, no longer than that."""

    def wait_until_joining(self) -> None:
        """Wait until every other rank is ready to join the process group, which does not notice if one ends.

        Raises EngineDead where one has ended.
        """
        while any(row.phase == STARTING for row in self._board.rows[1:]):
            self._known.wait(0.01)
            self.raise_fault()

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Load inside. An error of rank 0 ends the other ranks and is raised as it is, a fault of another rank as
        EngineDead.
        """
        try:
            with self._call():
                yield
            self.raise_fault()
        except BaseException as error:
            follows = not isinstance(error, AllotropeError) and self._has_cause(error)
            self.close()
            if follows:
                raise self._dead() from error
            raise
        self._monitor.row.phase = LOADED

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Run a step inside. A fault of any rank, before or meanwhile, is raised as EngineDead; so is an error of rank
        0, because the other ranks would be in the middle of a step that it has left. Where there are no others, nothing
        is different.
        """
        if self._calls or self.size == 1:
            yield
            return
        self.raise_fault()
        try:
            with self._call(), self._monitor.step():
                yield
        except EngineDead:
            raise
        except BaseException as error:
            if not self._has_cause(error):
                if isinstance(error, Exception) and not isinstance(error, AllotropeError):
                    traceback.print_exc()
                self.fail(f"{name_rank(0, self._monitor.row)}: {describe_error(error)}")
            self._reap(REAP_SECONDS)
            if self.fault is None or not isinstance(error, Exception):
                # After `close` nothing is a fault any more.
                raise
            raise self._dead() from error
        self.raise_fault()

    def fail(self, reason: str) -> None:
        """End the engine: the first fault counts."""
        with self._lock:
            if self._closed or self.fault is not None:
                return
            self.fault = reason
        self._kill()
        self._known.set()
        self._abort()
        threading.Thread(target=self._end_stuck_call, name="fault", daemon=True).start()
        if self._on_death is not None:
            self._on_death(reason)

    def close(self) -> None:
        """End the other ranks, within seconds. May be called again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._let_go()
        self._kill()
        self._reap(REAP_SECONDS)
        # A step that was launched and not collected waits for the other ranks.
        self._abort()
        self._monitor.stop()
        self._board.close()

    def _look(self, monitor: RankMonitor) -> None:
        for rank in range(1, len(self._board.rows)):
            if (silence := monitor.silent(rank)) is not None:
                self.fail(silence)
        if (stuck := monitor.stuck()) is not None:
            self.fail(stuck)

    def _has_cause(self, error: BaseException) -> bool:
        """Whether an error of rank 0 follows from the fault of another rank, which may become known a little later."""
        if self.size > 1 and isinstance(error, RuntimeError | OSError):
            # Longer than another rank waits whose collective broke as well.
            self._known.wait(self.cause_seconds + 0.5)
        return self.fault is not None

    def _dead(self) -> EngineDead:
        return EngineDead(f"{self.fault}; the engine cannot go on.")

    def raise_fault(self) -> None:
        """Raise EngineDead if there is a fault."""
        if self.fault is not None:
            self._reap(REAP_SECONDS)
            raise self._dead()

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        with self._lock:
            self._calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1

    def _end_stuck_call(self) -> None:
        """End this process where a call does not return: its thread waits in a library that nothing can wake."""
        deadline = time.monotonic() + _UNWIND_SECONDS
        while self._calls and time.monotonic() < deadline:
            time.sleep(0.05)
        if self._calls:
            print(f"allotrope: {self.fault}; the engine cannot go on.", file=sys.stderr, flush=True)
            os._exit(1)

    def _abort(self) -> None:
        for abort in self.aborts:
            start_thread(abort, "abort")
