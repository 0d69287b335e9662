"""The executor: rank 0 in the engine's process, each further rank in a worker process of its own.

Rank 0 decides everything. A worker process gets each step as plain integers, through shared memory, runs the same pass
on its share of the weights, and decides nothing: the tokens that rank 0 samples reach it over the device, so that rank
0's host may be steps ahead. A worker process that ends takes the engine with it. Tensor parallel size 1 is the case
without worker processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Self, TypeVar

import torch
import torch.distributed as dist

from allotrope.cache.memory import MemoryPlan
from allotrope.config import EngineConfig
from allotrope.engine.cache_plan import plan_caches
from allotrope.engine.executor import Executor, OnDeath
from allotrope.engine.inputs import StepPlan
from allotrope.engine.load_plan import LoadPlan
from allotrope.engine.rank_group import RankGroup
from allotrope.engine.step_channel import Ring, StepReceiver, StepSender
from allotrope.engine.step_limits import GPU_TOKENS
from allotrope.engine.worker import Worker, prepare_rank
from allotrope.env import spin_setting
from allotrope.errors import ConfigError, EngineDead
from allotrope.kernels.chip import gpu_count
from allotrope.layers.decoder import Decoder

T = TypeVar("T")


class MultiprocessExecutor(Executor):
    """`worker`: rank 0."""

    @classmethod
    def start(cls, config: EngineConfig, on_death: OnDeath | None, preferred_tokens: int) -> Self:
        size = config.tensor_parallel_size
        if size > 1 and dist.is_initialized():
            raise ConfigError(
                "tensor_parallel_size > 1 needs a process of its own, but torch.distributed is in use here."
            )
        _refuse_devices(config)
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
        self._closed = False
        self._died: str | None = None
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ranks = RankGroup.open(config.tensor_parallel_size)
        self._steps: StepSender | None = None
        if config.tensor_parallel_size > 1:
            readers = config.tensor_parallel_size - 1
            self._ring = Ring(Ring.create(readers), readers)
            for rank in range(1, config.tensor_parallel_size):
                self._spawn(rank, self._ranks.port, config)
            self._steps = StepSender(self._ring, self._connections)
        for rank, process in enumerate(self._processes, start=1):
            threading.Thread(target=self._watch, args=(rank, process, on_death), daemon=True).start()
        with self._explained():
            self.worker = Worker.start(load_plan, config, self._ranks, self._share_memory_plan, planned)

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
    def graph_replays(self) -> int:
        return self.worker.graph_replays

    def run(self, plan: StepPlan, prev_sampled: torch.Tensor | None = None) -> torch.Tensor:
        with self._explained():
            packed = self.worker.pack(plan)
            if self._steps is not None:
                self._steps.send(packed, self._check)
            return self.worker.run(packed, prev_sampled)

    def share_sampled(self, token_ids: torch.Tensor) -> None:
        with self._explained():
            self.worker.share_sampled(token_ids)

    def capture_next(self) -> bool:
        with self._explained():
            if self._steps is not None and self.worker.captures:
                self._steps.send_capture()
            return self.worker.capture_next()

    def process_ids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """End the worker processes and let go of the model."""
        self._closed = True
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.wait()
        self._ranks.leave()
        if self._steps is not None:
            self._ring.close()
        self.worker.close()

    def _spawn(self, rank: int, port: int, config: EngineConfig) -> None:
        ours, theirs = socket.socketpair()
        command = (
            f"from allotrope.engine.multiprocess_executor import run_worker_process; "
            f"run_worker_process({theirs.fileno()})"
        )
        # The worker is a process of ours, whatever this one's threads do while they wait.
        environment = os.environ | spin_setting()
        self._processes.append(
            subprocess.Popen(
                [sys.executable, "-c", command], pass_fds=[theirs.fileno(), self._ring.descriptor], env=environment
            )
        )
        theirs.close()
        connection = Connection(ours.detach())
        connection.send((rank, port, config, self._ring.descriptor))
        self._connections.append(connection)

    def _check(self) -> None:
        """Raise EngineDead if a worker process has ended."""
        if self._died is not None:
            raise EngineDead(f"{self._died}; the engine cannot go on.")

    def _watch(self, rank: int, process: subprocess.Popen[bytes], on_death: OnDeath | None) -> None:
        status = process.wait()
        if self._closed:
            return
        self._died = f"rank {rank} (process {process.pid}) ended with status {status}"
        if on_death is not None:
            on_death(self._died)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Name the rank that ended, where a collective fails because one did."""
        try:
            yield
        except (RuntimeError, OSError) as error:
            for rank, process in enumerate(self._processes, start=1):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(timeout=1)
                    self._died = self._died or f"rank {rank} (process {process.pid}) ended with status {status}"
            if self._died is None:
                raise
            raise EngineDead(f"{self._died}; the engine cannot go on.") from error


def run_worker_process(descriptor: int) -> None:
    """Run one rank other than 0: the entry point of its process. Ends when rank 0 does."""
    # A terminal's Ctrl-C reaches the whole group; rank 0 decides when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    rank, port, config, shared = connection.recv()
    os.set_inheritable(shared, False)
    load_plan = prepare_rank(config, rank, GPU_TOKENS)
    ranks = RankGroup.connect(rank, config.tensor_parallel_size, port)
    worker = Worker.start(load_plan, config, ranks, lambda planned: _or_end(connection.recv))
    ring = Ring(shared, config.tensor_parallel_size - 1)
    receiver = StepReceiver(ring, rank - 1, connection, pinned=load_plan.build.device.type == "cuda")
    while True:
        packed = _or_end(receiver.receive)
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


def _refuse_devices(config: EngineConfig) -> None:
    """Raise ConfigError where the ranks cannot have a GPU each."""
    size, device = config.tensor_parallel_size, config.device
    if size > 1 and device.startswith("cuda:"):
        raise ConfigError(
            f"device={device!r} names one GPU, but tensor_parallel_size={size} takes GPUs 0 to {size - 1}. Give "
            f"--device cuda, and set CUDA_VISIBLE_DEVICES to choose among the GPUs."
        )
    gpus = gpu_count()
    if device != "cpu" and 0 < gpus < size:
        raise ConfigError(
            f"tensor_parallel_size={size} needs a GPU for each rank, but PyTorch sees {gpus}. Try "
            f"--tensor-parallel-size {gpus} or --device cpu."
        )
