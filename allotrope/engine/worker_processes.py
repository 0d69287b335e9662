"""The worker processes: each rank but 0 as a child of rank 0's process, reached through memory that both map.

Owns the start and the end of these processes. What follows from a fault is that of all `Workers`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection

from allotrope.cache.memory import MemoryPlan
from allotrope.config import EngineConfig
from allotrope.engine.executor import OnDeath
from allotrope.engine.packed_step import PackedStep
from allotrope.engine.rank_group import RankGroup
from allotrope.engine.rank_monitor import name_rank
from allotrope.engine.step_channel import Command, Ring, StepSender
from allotrope.engine.workers import Workers
from allotrope.env import spin_setting

# Worker processes get this long to end by themselves.
_CLOSE_SECONDS = 2.0
_BOOT = (
    "from allotrope.engine.lifeline import end_with_parent; end_with_parent({lifeline}, {parent}); "
    "from allotrope.engine.multiprocess_executor import run_worker_process; "
    "run_worker_process({rank}, {messages}, {steps}, {board})"
)


class WorkerProcesses(Workers):
    """The processes of all ranks but 0, in the order of the ranks."""

    def __init__(self, config: EngineConfig, size: int, on_death: OnDeath | None) -> None:
        super().__init__(config, size, on_death)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lifelines: list[socket.socket] = []
        self._waiting: list[threading.Thread] = []
        self._connections: list[Connection] = []
        self._ring: Ring | None = None
        self._steps: StepSender | None = None

    @property
    def process_ids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def start(self, config: EngineConfig, ranks: RankGroup) -> None:
        if self.size == 1:
            return
        self._ring = Ring(Ring.create(self.size - 1), self.size - 1)
        self._steps = StepSender(self._ring, self._connections)
        for rank in range(1, self.size):
            ours, theirs = socket.socketpair()
            with theirs:
                self._start_process(rank, theirs.fileno(), self._ring.descriptor)
            connection = Connection(ours.detach())
            connection.send((ranks.port, config))
            self._connections.append(connection)

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

    def _start_process(self, rank: int, messages: int, steps: int) -> None:
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
            time.sleep(self.cause_seconds)
        self.fail(f"{name_rank(rank, row)}: {row.error}")

    def _let_go(self) -> None:
        for lifeline in self._lifelines:
            with contextlib.suppress(OSError):
                # Also where a process that was forked from this one holds a copy.
                lifeline.shutdown(socket.SHUT_RDWR)
            lifeline.close()
        self._reap(_CLOSE_SECONDS)

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
