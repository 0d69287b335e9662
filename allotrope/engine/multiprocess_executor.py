"""Tensor parallel: one process per rank, all following the plans of rank 0.

Rank 0 lives in the engine's process and decides everything; the others get each `StepPlan` as plain integers, run the
same pass on their share of the weights, and decide nothing. A rank that ends takes the engine with it.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from allotrope.config import EngineConfig
from allotrope.engine.cache_plan import plan_caches
from allotrope.engine.executor import InProcess
from allotrope.engine.inputs import StepPlan
from allotrope.engine.load_plan import LoadPlan, resolve_load_plan
from allotrope.env import cpu_quota, keep_freed_memory, spin_setting, thread_count
from allotrope.errors import ConfigError, EngineDead
from allotrope.layers.decoder import Decoder
from allotrope.layers.parallel import Parallel

log = logging.getLogger("allotrope.engine")

OnDeath = Callable[[str], None]

# Longer than any load or step should take; a rank that hangs that long is as good as dead.
_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class Capture:
    """What the other ranks are told instead of a plan when a graph is to be captured, which all must do at once."""


class Ranks:
    """Rank 0 here, the others in processes of their own. `on_death(reason)` is called from a thread if one ends."""

    def __init__(self, config: EngineConfig, on_death: OnDeath | None, preferred_tokens: int) -> None:
        if dist.is_initialized():
            raise ConfigError(
                "tensor_parallel_size > 1 needs a process of its own, but torch.distributed is in use here."
            )
        size = config.tensor_parallel_size
        # Every rank can be made before any process is: a head count that does not divide is refused at once.
        self.load_plan = resolve_load_plan(config, Parallel(0, size), preferred_tokens=preferred_tokens)
        # The others take the limits of a step from here: each would choose by the memory of its own GPU.
        limits = self.load_plan.limits
        config = replace(config, max_num_seqs=limits.max_num_seqs, max_num_batched_tokens=limits.step_tokens)
        on_gpu = self.load_plan.build.device.type == "cuda"
        # A CPU's memory is planned while it is still free.
        planned = None if on_gpu else plan_caches(self.load_plan, config)
        self._closed = False
        self._died: str | None = None
        self._links: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        store = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
        for rank in range(1, size):
            self._spawn(rank, store.port, config)
        for rank, process in enumerate(self._processes, start=1):
            threading.Thread(target=self._watch, args=(rank, process, on_death), daemon=True).start()
        with self._explained():
            _join(store, 0, size, self.load_plan.build.device)
            self._local = InProcess(self.load_plan, config)
            self.memory = self._local.plan() if planned is None else planned
            for link in self._links:
                link.send(self.memory)
            self._local.allocate(self.memory)
            dist.barrier()

    @property
    def model(self) -> Decoder:
        return self._local.model

    @property
    def graph_replays(self) -> int:
        return self._local.graph_replays

    def run(self, plan: StepPlan, chosen: torch.Tensor | None = None) -> torch.Tensor:
        if chosen is not None:
            raise ValueError("only rank 0 knows which tokens were chosen: a plan for several ranks must name them")
        with self._explained():
            for link in self._links:
                link.send(plan)
            return self._local.run(plan)

    def capture_next(self) -> bool:
        with self._explained():
            for link in self._links:
                link.send(Capture())
            return self._local.capture_next()

    def process_ids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """End the other ranks."""
        self._closed = True
        for link in self._links:
            link.close()
        for process in self._processes:
            process.wait()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _spawn(self, rank: int, port: int, config: EngineConfig) -> None:
        ours, theirs = socket.socketpair()
        command = f"from allotrope.engine.multiprocess_executor import follow; follow({theirs.fileno()})"
        # The rank is a process of ours, whatever this one's threads do while they wait.
        environment = os.environ | spin_setting()
        self._processes.append(
            subprocess.Popen([sys.executable, "-c", command], pass_fds=[theirs.fileno()], env=environment)
        )
        theirs.close()
        link = Connection(ours.detach())
        link.send((rank, port, config))
        self._links.append(link)

    def _watch(self, rank: int, process: subprocess.Popen[bytes], on_death: OnDeath | None) -> None:
        status = process.wait()
        if self._closed:
            return
        self._died = f"rank {rank} (process {process.pid}) ended with status {status}"
        if on_death is not None:
            on_death(self._died)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Say which rank ended, where a collective fails because one did."""
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


def follow(descriptor: int) -> None:
    """Run one rank other than 0: the entry point of its process. Ends when rank 0 does."""
    # A terminal's Ctrl-C reaches the whole group; rank 0 decides when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.set_inheritable(descriptor, False)
    link = Connection(descriptor)
    rank, port, config = link.recv()
    _follow(link, rank, port, config)


def _follow(link: Connection, rank: int, port: int, config: EngineConfig) -> None:
    size = config.tensor_parallel_size
    keep_freed_memory()
    share_threads(config)
    load_plan: LoadPlan = resolve_load_plan(config, Parallel(rank, size))
    store = TCPStore("127.0.0.1", port, size, is_master=False, timeout=_TIMEOUT)
    _join(store, rank, size, load_plan.build.device)
    local = InProcess(load_plan, config)
    if load_plan.build.device.type == "cuda":
        # Every rank runs the step by which rank 0 plans.
        local.plan()
    local.allocate(_receive(link))
    dist.barrier()
    while True:
        order = _receive(link)
        if isinstance(order, Capture):
            local.capture_next()
        else:
            local.run(order)


def _receive(link: Connection) -> Any:
    """The next message of rank 0; the process ends where there is none."""
    try:
        return link.recv()
    except (EOFError, OSError):
        # Rank 0 has ended or let go; nothing is owed to anyone.
        os._exit(0)


def share_threads(config: EngineConfig) -> None:
    """Give each rank on a CPU its part of the cores that this process may use, or what the options say."""
    threads = config.threads
    if threads is None:
        available = torch.get_num_threads()
        threads = max(1, thread_count(available) // config.tensor_parallel_size)
        if thread_count(available) < available:
            log.info("%d threads, not %d: the control group may use %.3g CPUs", threads, available, cpu_quota())
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)


def _join(store: TCPStore, rank: int, size: int, device: torch.device) -> None:
    if device.type == "cpu":
        # All ranks are on this machine; gloo would otherwise look the host's name up.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
