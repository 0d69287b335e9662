"""The worker processes as rank 0 sees them: it starts them, knows the first fault of any rank, and ends them all.

Owns what follows from a fault: the other ranks are killed, what waits for them is aborted, and the call that is under
way raises `EngineDead`. Must not know what the ranks compute.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from allotrope.config import EngineConfig
from allotrope.engine.executor import OnDeath
from allotrope.engine.rank_board import LOADED, STARTING, RankBoard
from allotrope.engine.rank_group import start_thread
from allotrope.engine.rank_monitor import RankMonitor, describe_error, name_rank
from allotrope.env import spin_setting
from allotrope.errors import AllotropeError, EngineDead

log = logging.getLogger("allotrope.engine")

# A rank whose collective broke waits this long for the fault that broke it to become known.
_CAUSE_SECONDS = 1.0
# After a fault, the call that is under way gets this long to raise its error.
_UNWIND_SECONDS = 5.0
# Worker processes get this long to end by themselves, and this long once they are killed.
_CLOSE_SECONDS, _REAP_SECONDS = 2.0, 1.0
_BOOT = (
    "from allotrope.engine.lifeline import end_with_parent; end_with_parent({lifeline}, {parent}); "
    "from allotrope.engine.multiprocess_executor import run_worker_process; "
    "run_worker_process({rank}, {messages}, {steps}, {board})"
)


class WorkerProcesses:
    """The processes of all ranks but 0. `fault`: the first one of any rank, in one line; None while there is none.

    `aborts`: called once the other ranks are gone, each from a thread of its own, to end what waits for them. May be
    called again. `on_death`: as of the executor.
    """

    def __init__(self, config: EngineConfig, on_death: OnDeath | None) -> None:
        self.fault: str | None = None
        self.aborts: list[Callable[[], None]] = []
        self._on_death = on_death
        self._board = RankBoard.make(config.layout.size)
        self._monitor = RankMonitor(0, self._board, config.watchdog_seconds, self._look)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lifelines: list[socket.socket] = []
        self._waiting: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._known = threading.Event()
        self._closed = False
        # Calls that are under way, one inside the other.
        self._calls = 0
        if len(self._board.rows) > 1:
            self._monitor.start()

    @property
    def process_ids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def start(self, rank: int, messages: int, steps: int) -> None:
        """Start the process of `rank`, the next one. `messages`, `steps`: descriptors of its socket and of the ring."""
        ours, theirs = socket.socketpair()
        descriptors = {"lifeline": theirs.fileno(), "messages": messages, "steps": steps}
        descriptors["board"] = self._board.descriptor
        command = [sys.executable, "-c", _BOOT.format(rank=rank, parent=os.getpid(), **descriptors)]
        started: Future[subprocess.Popen[bytes]] = Future()
        waiting = threading.Thread(
            target=self._run,
            args=(rank, command, tuple(descriptors.values()), started),
            name=f"rank {rank}",
            daemon=True,
        )
        waiting.start()
        with theirs:
            self._processes.append(started.result())
        self._lifelines.append(ours)
        self._waiting.append(waiting)

    def wait_until_joining(self) -> None:
        """Wait until every worker process is ready to join the process group, which does not notice if one ends.

        Raises EngineDead where one has ended.
        """
        while any(row.phase == STARTING for row in self._board.rows[1:]):
            self._known.wait(0.01)
            self.raise_fault()

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Load inside. An error of rank 0 ends the worker processes and is raised as it is, a fault of another rank as
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
        if self._calls or not self._processes:
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
            self._reap(_REAP_SECONDS)
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
        """End the processes, within seconds. May be called again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for lifeline in self._lifelines:
            with contextlib.suppress(OSError):
                # Also where a process that was forked from this one holds a copy.
                lifeline.shutdown(socket.SHUT_RDWR)
            lifeline.close()
        self._reap(_CLOSE_SECONDS)
        self._kill()
        self._reap(_REAP_SECONDS)
        # A step that was launched and not collected waits for the other ranks.
        self._abort()
        self._monitor.stop()
        self._board.close()

    def _run(
        self, rank: int, command: Sequence[str], descriptors: Sequence[int], started: Future[subprocess.Popen[bytes]]
    ) -> None:
        """Start a process and wait for its end; it would not outlive this thread, see `end_with_parent`."""
        try:
            # The worker is a process of ours, whatever this one's threads do while they wait.
            process = subprocess.Popen(command, pass_fds=descriptors, env=os.environ | spin_setting())
        except BaseException as error:
            started.set_exception(error)
            return
        # A process that is stopped before it can say so has an id too.
        self._board.rows[rank].process = process.pid
        started.set_result(process)
        status = process.wait()
        row = self._board.rows[rank]
        if not row.failed_at:
            self.fail(f"{name_rank(rank, row)} {_how_it_ended(status)}")
            return
        if row.follows:
            time.sleep(_CAUSE_SECONDS)
        self.fail(f"{name_rank(rank, row)}: {row.error}")

    def _look(self, monitor: RankMonitor) -> None:
        for rank in range(1, len(self._board.rows)):
            if (silence := monitor.silent(rank)) is not None:
                self.fail(silence)
        if (stuck := monitor.stuck()) is not None:
            self.fail(stuck)

    def _has_cause(self, error: BaseException) -> bool:
        """Whether an error of rank 0 follows from the fault of another rank, which may become known a little later."""
        if self._processes and isinstance(error, RuntimeError | OSError):
            # Longer than a worker process waits whose collective broke as well.
            self._known.wait(_CAUSE_SECONDS + 0.5)
        return self.fault is not None

    def _dead(self) -> EngineDead:
        return EngineDead(f"{self.fault}; the engine cannot go on.")

    def raise_fault(self) -> None:
        """Raise EngineDead if there is a fault."""
        if self.fault is not None:
            self._reap(_REAP_SECONDS)
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

    def _kill(self) -> None:
        for process in self._processes:
            # One that is stopped ends as well.
            process.kill()

    def _reap(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for thread, process in zip(self._waiting, self._processes, strict=True):
            while process.poll() is None and time.monotonic() < deadline:
                thread.join(0.01)


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-status).name}"
    return f"was killed by signal {-status}"
