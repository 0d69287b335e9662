"""The ranks of one engine but rank 0, each in a child of rank 0's process, reached through memory that both map.

Owns how they are reached, and when their processes end with the engine. What follows from a fault is that of all
`Workers`.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import socket
import time
from multiprocessing.connection import Connection

from allotrope.cache.memory import MemoryPlan
from allotrope.config import EngineConfig
from allotrope.engine.executor import OnDeath
from allotrope.engine.packed_step import PackedStep
from allotrope.engine.ranks.rank_board import LOADED
from allotrope.engine.ranks.rank_group import RankGroup
from allotrope.engine.ranks.rank_monitor import name_rank
from allotrope.engine.ranks.step_channel import Command, Ring, StepSender
from allotrope.engine.ranks.worker_process import Assignment, WorkerProcess, kept_processes
from allotrope.engine.ranks.workers import Workers

# Worker processes get this long to end by themselves, and to let go of their rank where they are kept.
_CLOSE_SECONDS, _RELEASE_SECONDS = 2.0, 5.0


class MultiprocessWorkers(Workers):
    """The processes of all ranks but 0, in the order of the ranks."""

    def __init__(self, config: EngineConfig, size: int, on_death: OnDeath | None) -> None:
        super().__init__(config, size, on_death)
        self._processes: list[WorkerProcess] = []
        self._connections: list[Connection] = []
        self._ring: Ring | None = None
        self._steps: StepSender | None = None

    @property
    def process_ids(self) -> list[int]:
        return [process.id for process in self._processes]

    def start(self, config: EngineConfig, ranks: RankGroup) -> None:
        if self.size == 1:
            return
        self._ring = Ring(Ring.create(self.size - 1), self.size - 1)
        self._steps = StepSender(self._ring, self._connections)
        kept = kept_processes()
        for rank in range(1, self.size):
            process = (None if kept is None else kept.take(rank)) or WorkerProcess()
            # A process that is stopped before it can say so has an id too.
            self._board.rows[rank].process = process.id
            process.watch(functools.partial(self._ended, rank))
            self._processes.append(process)
            ours, theirs = socket.socketpair()
            with theirs:
                process.assign(Assignment(rank, theirs.fileno(), self._ring.descriptor, self._board.descriptor))
            connection = Connection(ours.detach())
            self._connections.append(connection)
            with contextlib.suppress(OSError):
                connection.send((ranks.port, config))

    def share_memory_plan(self, memory: MemoryPlan) -> None:
        for connection in self._connections:
            connection.send(memory)

    def send(self, packed: PackedStep) -> None:
        if self._steps is not None:
            self._steps.send(packed, self.raise_fault)

    def command(self, command: Command) -> None:
        if self._steps is not None:
            self._steps.command(command)

    def close(self) -> None:
        super().close()
        for connection in self._connections:
            connection.close()
        if self._ring is not None:
            self._ring.close()
            self._ring = None

    def _ended(self, rank: int, status: int) -> None:
        row = self._board.rows[rank]
        if not row.failed_at:
            self.fail(f"{name_rank(rank, row)} {_how_it_ended(status)}")
            return
        if row.follows:
            time.sleep(self.cause_seconds)
        self.fail(f"{name_rank(rank, row)}: {row.error}")

    def _let_go(self) -> None:
        self._release()
        for process in self._processes:
            process.let_go()
        self._reap(_CLOSE_SECONDS)

    def _release(self) -> None:
        """Leave the processes that let go of their rank to the next engine, where they are kept."""
        kept = kept_processes()
        # Rank 0 has loaded once all others have.
        if kept is None or self.fault is not None or self._board.rows[0].phase != LOADED:
            return
        with contextlib.suppress(OSError):
            self.command(Command.RELEASE)
            deadline = time.monotonic() + _RELEASE_SECONDS
            for rank, process in enumerate(list(self._processes), 1):
                if process.released(max(0.01, deadline - time.monotonic())):
                    kept.put(rank, process)
                    self._processes.remove(process)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    def _reap(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for process in self._processes:
            while not process.ended and time.monotonic() < deadline:
                process.wait(0.01)


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-status).name}"
    return f"was killed by signal {-status}"
