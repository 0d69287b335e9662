"""The executor: rank 0 in the engine's process, each further rank in a worker process of its own.

Rank 0 decides everything. A worker process gets each step as plain integers, through shared memory, runs the same pass
on its share of the weights, and decides nothing: the tokens that rank 0 samples reach it over the device, so that rank
0's host may be steps ahead. A rank that fails takes the engine with it (`WorkerProcesses`). Tensor parallel size 1 is
the case without worker processes.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Self, TypeVar

import torch
import torch.distributed as dist

from allotrope.cache.memory import MemoryPlan
from allotrope.config import EngineConfig
from allotrope.engine.cache_plan import plan_caches
from allotrope.engine.executor import DraftedTokens, Executor, OnDeath
from allotrope.engine.inputs import StepPlan
from allotrope.engine.load_plan import LoadPlan
from allotrope.engine.rank_board import JOINING, LOADED, RankBoard
from allotrope.engine.rank_group import RankGroup
from allotrope.engine.rank_monitor import RankMonitor, reported, watch_from_worker
from allotrope.engine.step_channel import Ring, StepReceiver, StepSender
from allotrope.engine.step_limits import GPU_TOKENS
from allotrope.engine.worker import Worker, prepare_rank
from allotrope.engine.worker_processes import WorkerProcesses
from allotrope.errors import ConfigError, InvalidRequest
from allotrope.kernels.chip import gpu_count
from allotrope.layers.decoder import Decoder

T = TypeVar("T")


class MultiprocessExecutor(Executor):
    """`worker`: rank 0."""

    @classmethod
    def start(cls, config: EngineConfig, on_death: OnDeath | None, preferred_tokens: int) -> Self:
        size = config.layout.size
        if size > 1 and dist.is_initialized():
            raise ConfigError(f"{config.layout} needs a process of its own, but torch.distributed is in use here.")
        refuse_layout(config)
        refuse_devices(config)
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
        self._ranks = RankGroup.open(config.layout.size)
        self._workers = WorkerProcesses(config, on_death)
        self._workers.aborts.append(self._ranks.abort)
        self._ring: Ring | None = None
        self._steps: StepSender | None = None
        try:
            with self._workers.loading():
                if config.layout.size > 1:
                    readers = config.layout.size - 1
                    self._ring = Ring(Ring.create(readers), readers)
                    self._steps = StepSender(self._ring, self._connections)
                for rank in range(1, config.layout.size):
                    self._start_worker(rank, config)
                self._workers.wait_until_joining()
                self.worker = Worker.start(load_plan, config, self._ranks, self._share_memory_plan, planned)
        except BaseException:
            self._ranks.leave()
            raise
        self._closed = False
        if config.layout.size > 1:
            # Libraries would wait for the other ranks when the interpreter ends.
            atexit.register(_close_at_exit, weakref.ref(self), os.getpid())

    def _share_memory_plan(self, memory: MemoryPlan | None) -> MemoryPlan:
        assert memory is not None, "rank 0 plans the memory"
        self.memory = memory
        for connection in self._connections:
            connection.send(memory)
        return memory

    @property
    def model(self) -> Decoder:
        return self.worker.model

    @property
    def ranks(self) -> int:
        return self.load_plan.build.parallel.layout.size

    @property
    def graph_replays(self) -> int:
        return self.worker.graph_replays

    def step(self) -> AbstractContextManager[None]:
        return self._workers.step()

    def run(self, plan: StepPlan, prev_sampled: torch.Tensor | None = None) -> torch.Tensor:
        packed = self.worker.pack(plan)
        if self._steps is not None:
            self._steps.send(packed, self._workers.raise_fault)
        return self.worker.run(packed, prev_sampled)

    def share_sampled(self, token_ids: torch.Tensor) -> None:
        self.worker.share_sampled(token_ids)

    def run_drafts(self, token_ids: torch.Tensor, *, shared: bool) -> DraftedTokens:
        if not shared and len(token_ids):
            self.worker.share_sampled(token_ids)
        return self.worker.run_drafts(token_ids)

    @property
    def static_decodes(self) -> bool:
        return self.worker.static_decodes

    def capture_next(self) -> bool:
        with self._workers.step():
            if self._steps is not None and self.worker.captures:
                self._steps.send_capture()
            return self.worker.capture_next()

    def sleep(self) -> None:
        if self.ranks > 1 and self.load_plan.build.device.type == "cuda":
            raise InvalidRequest(
                f"{self.ranks} ranks cannot sleep: they hold addresses of each other's memory. Stop the server.",
                "level",
            )
        self.worker.sleep()

    def wake(self) -> None:
        self.worker.wake()

    def process_ids(self) -> list[int]:
        return self._workers.process_ids

    def close(self) -> None:
        """End the worker processes and let go of the model. May be called again."""
        if self._closed:
            return
        self._closed = True
        self._workers.close()
        for connection in self._connections:
            connection.close()
        if self._ring is not None:
            self._ring.close()
        self.worker.close()
        self._ranks.leave()

    def _start_worker(self, rank: int, config: EngineConfig) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            assert self._ring is not None, "there are no other ranks"
            self._workers.start(rank, theirs.fileno(), self._ring.descriptor)
        connection = Connection(ours.detach())
        connection.send((self._ranks.port, config))
        self._connections.append(connection)


def _close_at_exit(executor: weakref.ref[MultiprocessExecutor], process: int) -> None:
    found = executor()
    # The processes are not those of a process that was forked from this one.
    if found is not None and os.getpid() == process:
        found.close()


def run_worker_process(rank: int, messages: int, steps: int, board: int) -> None:
    """Run one rank other than 0: the entry point of its process. Ends when rank 0 does, see `end_with_parent`.

    `messages`: descriptor of the socket to rank 0. `steps`: that of the ring of steps. `board`: of the rank board.
    """
    # A terminal's Ctrl-C reaches the whole group; rank 0 decides when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for descriptor in (messages, steps, board):
        os.set_inheritable(descriptor, False)
    shown = RankBoard(board)
    with reported(rank, shown):
        connection = Connection(messages)
        port, config = _or_end(connection.recv)
        monitor = RankMonitor(rank, shown, config.watchdog_seconds, watch_from_worker)
        monitor.start()
        load_plan = prepare_rank(config, rank, GPU_TOKENS)
        monitor.row.phase = JOINING
        ranks = RankGroup.connect(rank, config.layout.size, port)
        worker = Worker.start(load_plan, config, ranks, lambda planned: _or_end(connection.recv))
        monitor.row.phase = LOADED
        ring = Ring(steps, config.layout.size - 1)
        receiver = StepReceiver(ring, rank - 1, connection, pinned=load_plan.build.device.type == "cuda")
        _worker_loop(worker, receiver, monitor)


def _worker_loop(worker: Worker, receiver: StepReceiver, monitor: RankMonitor) -> None:
    """Run each step of rank 0 as it comes."""
    while True:
        packed = _or_end(receiver.receive)
        with monitor.step():
            if packed is None:
                worker.capture_next()
            else:
                worker.follow(packed)


def _or_end(receive: Callable[[], T]) -> T:
    """The next message of rank 0; the process ends where there is none."""
    try:
        return receive()
    except (EOFError, OSError):
        # Rank 0 has ended or let go; nothing is owed to anyone.
        os._exit(0)


def refuse_layout(config: EngineConfig) -> None:
    """Raise ConfigError, with every reason, for a layout of ranks that is not served yet."""
    layout, reasons = config.layout, []
    if layout.pipeline > 1:
        reasons.append(f"pipeline_parallel_size={layout.pipeline} (needs 1: there are no stages yet)")
    if reasons:
        raise ConfigError("this layout of ranks cannot be served: " + "; ".join(reasons) + ".")


def refuse_devices(config: EngineConfig) -> None:
    """Raise ConfigError where the ranks cannot have a GPU each."""
    size, device = config.layout.size, config.device
    if size > 1 and device.startswith("cuda:"):
        raise ConfigError(
            f"device={device!r} names one GPU, but {config.layout} takes GPUs 0 to {size - 1}. Give "
            f"--device cuda, and set CUDA_VISIBLE_DEVICES to choose among the GPUs."
        )
    gpus = gpu_count()
    if device != "cpu" and 0 < gpus < size:
        raise ConfigError(
            f"{config.layout} needs a GPU for each of {size} ranks, but PyTorch sees {gpus}. Try fewer ranks or "
            f"--device cpu."
        )
