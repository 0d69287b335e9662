"""The executor: rank 0 in the engine's process, each further rank in a worker process of its own.

Rank 0 decides everything. A worker process gets each `StepPlan` as plain integers, runs the same pass on its share of
the weights, and decides nothing. A rank that fails takes the engine with it (`WorkerProcesses`). Tensor parallel size 1
is the case without worker processes.
"""

from __future__ import annotations

import os
import signal
import socket
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, Self

import torch
import torch.distributed as dist

from allotrope.cache.memory import MemoryPlan
from allotrope.config import EngineConfig
from allotrope.engine.cache_plan import plan_caches
from allotrope.engine.executor import Executor, OnDeath
from allotrope.engine.inputs import StepPlan
from allotrope.engine.load_plan import LoadPlan
from allotrope.engine.rank_board import JOINING, LOADED, RankBoard
from allotrope.engine.rank_group import RankGroup
from allotrope.engine.rank_monitor import RankMonitor, reported, watch_from_worker
from allotrope.engine.step_limits import GPU_TOKENS
from allotrope.engine.worker import Worker, prepare_rank
from allotrope.engine.worker_processes import WorkerProcesses
from allotrope.errors import ConfigError
from allotrope.layers.decoder import Decoder


@dataclass(frozen=True)
class Capture:
    """The message that takes the place of a plan when a graph is to be captured, which all ranks must do at once."""


class MultiprocessExecutor(Executor):
    """`worker`: rank 0."""

    @classmethod
    def start(cls, config: EngineConfig, on_death: OnDeath | None, preferred_tokens: int) -> Self:
        size = config.tensor_parallel_size
        if size > 1 and dist.is_initialized():
            raise ConfigError(
                "tensor_parallel_size > 1 needs a process of its own, but torch.distributed is in use here."
            )
        # Every rank can be planned before any process is: a head count that does not divide is refused at once.
        load_plan = prepare_rank(config, 0, preferred_tokens)
        on_gpu = load_plan.build.device.type == "cuda"
        # A CPU's memory is planned while it is still free, a GPU's when it is known what a step takes of it.
        planned = None if on_gpu else plan_caches(load_plan, config)
        # The other ranks take the limits of a step from here: each would choose by the memory of its own GPU.
        limits = load_plan.limits
        shared = replace(config, max_num_seqs=limits.max_num_seqs, max_num_batched_tokens=limits.step_tokens)
        return cls(load_plan, shared if size > 1 else config, planned, on_death)

    def __init__(
        self, load_plan: LoadPlan, config: EngineConfig, planned: MemoryPlan | None, on_death: OnDeath | None
    ) -> None:
        """Start the worker processes and rank 0. `planned`: the memory plan, where it is made before loading."""
        self.load_plan = load_plan
        self._connections: list[Connection] = []
        self._ranks = RankGroup.open(config.tensor_parallel_size)
        self._workers = WorkerProcesses(config, on_death)
        self._workers.aborts.append(self._ranks.abort)
        try:
            with self._workers.loading():
                for rank in range(1, config.tensor_parallel_size):
                    self._start_worker(rank, config)
                self._workers.wait_until_joining()
                self.worker = Worker.start(load_plan, config, self._ranks, self._share_memory_plan, planned)
        except BaseException:
            self._ranks.leave()
            raise

    def _share_memory_plan(self, memory: MemoryPlan | None) -> MemoryPlan:
        assert memory is not None, "rank 0 plans the memory"
        self.memory = memory
        self._send(memory)
        return memory

    @property
    def model(self) -> Decoder:
        return self.worker.model

    @property
    def graph_replays(self) -> int:
        return self.worker.graph_replays

    def step(self) -> AbstractContextManager[None]:
        return self._workers.step()

    def run(self, plan: StepPlan, prev_sampled: torch.Tensor | None = None) -> torch.Tensor:
        if prev_sampled is not None and self._connections:
            raise ValueError("only rank 0 knows the sampled tokens: a plan for several ranks must name them")
        with self._workers.step():
            self._send(plan)
            return self.worker.run(plan, prev_sampled)

    def capture_next(self) -> bool:
        with self._workers.step():
            self._send(Capture())
            return self.worker.capture_next()

    def process_ids(self) -> list[int]:
        return self._workers.process_ids

    def close(self) -> None:
        """End the worker processes and let go of the model."""
        self._workers.close()
        for connection in self._connections:
            connection.close()
        self.worker.close()
        self._ranks.leave()

    def _send(self, message: StepPlan | MemoryPlan | Capture) -> None:
        for connection in self._connections:
            connection.send(message)

    def _start_worker(self, rank: int, config: EngineConfig) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._workers.start(rank, theirs.fileno())
        connection = Connection(ours.detach())
        connection.send((self._ranks.port, config))
        self._connections.append(connection)


def run_worker_process(rank: int, messages: int, board: int) -> None:
    """Run one rank other than 0: the entry point of its process. Ends when rank 0 does, see `end_with_parent`.

    `messages`: descriptor of the socket to rank 0. `board`: that of the rank board.
    """
    # A terminal's Ctrl-C reaches the whole group; rank 0 decides when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for descriptor in (messages, board):
        os.set_inheritable(descriptor, False)
    shown = RankBoard(board)
    with reported(rank, shown):
        connection = Connection(messages)
        port, config = _receive(connection)
        monitor = RankMonitor(rank, shown, config.watchdog_seconds, watch_from_worker)
        monitor.start()
        load_plan = prepare_rank(config, rank, GPU_TOKENS)
        monitor.row.phase = JOINING
        ranks = RankGroup.connect(rank, config.tensor_parallel_size, port)
        worker = Worker.start(load_plan, config, ranks, lambda planned: _receive(connection))
        monitor.row.phase = LOADED
        _worker_loop(worker, connection, monitor)


def _worker_loop(worker: Worker, connection: Connection, monitor: RankMonitor) -> None:
    """Run each plan of rank 0 as it comes."""
    while True:
        message = _receive(connection)
        with monitor.step():
            if isinstance(message, Capture):
                worker.capture_next()
            else:
                worker.run(message)


def _receive(connection: Connection) -> Any:
    """The next message of rank 0; the process ends where there is none."""
    try:
        return connection.recv()
    except (EOFError, OSError):
        # Rank 0 has ended or let go; nothing is owed to anyone.
        os._exit(0)
