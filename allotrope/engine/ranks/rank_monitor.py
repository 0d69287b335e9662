"""The watchdog of each rank: shows the others that this one is alive and what its step does, and watches them.

A watcher counts its own looks at a value that does not change, never seconds: processes that are stopped together, as
by Ctrl-Z, go on together. Owns what is a fault. Must not know what follows from one.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from allotrope.engine.call_stack import compiles_kernel, failed_in_collective, place_of
from allotrope.engine.ranks.rank_board import LOADED, RankBoard, RankRow
from allotrope.errors import AllotropeError
from allotrope.logs import one_line

_SECONDS = 0.5
"""Between two looks."""

# A process that starts loads libraries of gigabytes, for as long as the disk takes, and its threads wait for that.
_START_SECONDS = 600.0


class Unchanged:
    """Counts how often a value was seen since it last changed."""

    def __init__(self) -> None:
        self._value: object = None
        self._looks = 0

    def look(self, value: object) -> int:
        self._looks = self._looks + 1 if value == self._value else 0
        self._value = value
        return self._looks


class RankMonitor:
    """One rank's watchdog: a thread that looks every half second from `start` on.

    `seconds`: the limit of a silence and of a step; 0: none is ever too long. `look`: called at each look.
    """

    def __init__(self, rank: int, board: RankBoard, seconds: float, look: Callable[[RankMonitor], None]) -> None:
        self.rank, self.board, self.seconds = rank, board, seconds
        self.row = board.rows[rank]
        self.row.process = os.getpid()
        self._look = look
        self._thread = threading.get_ident()
        self._own = Unchanged()
        self._silences = [Unchanged() for _ in board.rows]
        self._steps = [Unchanged() for _ in board.rows]
        self._stopped = threading.Event()

    def start(self) -> None:
        """Start to beat, and to look at the others."""
        self._beat()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """What is done inside is a step: it must end within the limit, while no kernel compiles."""
        self._thread = threading.get_ident()
        self.row.place = ""
        self.row.progress += 1
        try:
            yield
        finally:
            self.row.progress += 1

    def silent(self, rank: int, more: int = 0) -> str | None:
        """What to say of a rank that has shown no sign of life for the limit and `more` looks; None: not so long."""
        row = self.board.rows[rank]
        looks = self._silences[rank].look((row.heartbeat, row.progress))
        seconds = self.seconds if row.heartbeat else max(self.seconds, _START_SECONDS)
        if not self.seconds or looks < _looks(seconds) + more:
            return None
        return f"{name_rank(rank, row)} has shown no sign of life for {seconds:g} s{_state(row)}{_doing(row)}"

    def stuck(self) -> str | None:
        """What to say of ranks whose steps have not ended for the limit; None: there are none."""
        rows = self.board.rows
        compiling = any(row.compiling for row in rows)
        # One look more than a silence takes: a rank that is silent is named as such.
        limit = _looks(self.seconds) + 2
        looks = [counter.look((row.progress, compiling)) for counter, row in zip(self._steps, rows, strict=True)]
        if not self.seconds or compiling:
            return None
        if not any(row.in_step and count >= limit for row, count in zip(rows, looks, strict=True)):
            return None
        # Those that wait, for others or for a GPU that may wait for others, come last.
        order = sorted(range(len(rows)), key=lambda rank: (not rows[rank].in_step, rows[rank].waits))
        said = "; ".join(f"{name_rank(rank, rows[rank])} is {_doing_now(rows[rank])}" for rank in order)
        return f"a step has not ended for {self.seconds:g} s: {said}"

    def _watch(self) -> None:
        while not self._stopped.wait(_SECONDS):
            self._beat()
            self._look(self)

    def _beat(self) -> None:
        row = self.row
        unchanged = self._own.look(row.progress)
        if (row.in_step or row.phase != LOADED) and unchanged:
            row.compiling = compiles_kernel()
            row.place, row.waits = place_of(self._thread)
        else:
            row.compiling, row.waits, row.place = 0, 0, ""
        row.heartbeat += 1


def watch_from_worker(monitor: RankMonitor) -> None:
    """What a worker process looks at: rank 0, which watches all others. Ends both where rank 0 is silent."""
    # The first of them says it and ends rank 0, and with it the others.
    silence, row = monitor.silent(0, monitor.rank - 1), monitor.board.rows[0]
    # Between steps, code of the process that uses the engine may hold up its threads for as long as it likes.
    if silence is None or (row.phase == LOADED and not row.in_step and not _state(row)):
        return
    print(f"allotrope: {silence}; rank {monitor.rank} ends it.", file=sys.stderr, flush=True)
    if os.getppid() == row.process:
        os.kill(os.getppid(), signal.SIGKILL)
    os._exit(1)


@contextlib.contextmanager
def reported(rank: int, board: RankBoard) -> Iterator[None]:
    """Show rank 0 why this rank failed, where it does, and end the process with status 1."""
    try:
        yield
    except BaseException as error:
        # The border of the process: whatever went wrong, rank 0 must hear of it in one line.
        follows = failed_in_collective(error)
        board.rows[rank].fail(describe_error(error), follows=follows)
        if not follows and not isinstance(error, AllotropeError):
            traceback.print_exc()
        sys.stderr.flush()
        # Threads of libraries may wait for other ranks for ever.
        os._exit(1)


def describe_error(error: BaseException) -> str:
    """An error in one line; those of ours need no name."""
    if isinstance(error, AllotropeError):
        return one_line(str(error))
    return one_line(f"{type(error).__name__}: {error}").removesuffix(":")


def name_rank(rank: int, row: RankRow) -> str:
    """A rank as messages name it."""
    host = f" on {row.host}" if row.host else ""
    return f"rank {rank} (process {row.process}{host})"


def _looks(seconds: float) -> float:
    return seconds if math.isinf(seconds) else math.ceil(seconds / _SECONDS)


def _doing(row: RankRow) -> str:
    if row.phase != LOADED:
        return f" while loading, last seen in {row.place}" if row.place else " while loading"
    return f" in a step, last seen in {row.place}" if row.in_step and row.place else " in a step" if row.in_step else ""


def _doing_now(row: RankRow) -> str:
    if not row.in_step:
        return "in no step"
    return f"{'waiting ' if row.waits else ''}in {row.place or 'a step'}"


def _state(row: RankRow) -> str:
    """What the system says of a process that is stopped."""
    if row.host:
        return ""
    with contextlib.suppress(OSError, IndexError):
        state = Path(f"/proc/{row.process}/stat").read_text().rpartition(")")[2].split()[0]
        if state in "Tt":
            return " (it is stopped, as by SIGSTOP)"
    return ""
