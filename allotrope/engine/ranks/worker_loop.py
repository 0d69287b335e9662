"""A rank other than 0: it loads its share of the model, runs the steps that rank 0 sends, and decides nothing.

Owns the loop of a rank, and that of a worker process, which runs ranks of one engine after the other. Must not know
who placed it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NoReturn, TypeVar

import torch

from allotrope.cache.memory import MemoryPlan
from allotrope.config import EngineConfig
from allotrope.engine.frozen_heap import frozen_heap
from allotrope.engine.packed_step import PackedStep
from allotrope.engine.ranks.rank_board import JOINING, LOADED, RankBoard
from allotrope.engine.ranks.rank_group import LOOPBACK, RankGroup
from allotrope.engine.ranks.rank_monitor import RankMonitor, reported, watch_from_worker
from allotrope.engine.ranks.step_channel import Command, Ring, StepReceiver
from allotrope.engine.ranks.worker_process import Assignment, announce_release
from allotrope.engine.step_limits import GPU_TOKENS
from allotrope.engine.worker import Worker, prepare_rank

T = TypeVar("T")


def run_worker_process(control: int) -> NoReturn:
    """Run ranks other than 0, one engine's after the other: the entry point of a worker process. Ends when the parent
    does, see `end_with_parent`.

    `control`: descriptor of the socket from which assignments come.
    """
    # A terminal's Ctrl-C reaches the whole group; rank 0 decides when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.set_inheritable(control, False)
    with socket.socket(fileno=control) as parent:
        while (assignment := _or_end(lambda: Assignment.receive(parent))) is not None:
            _run_assignment(assignment)
            # What referred to the model in circles, and the memory of all of it.
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            announce_release(parent)
    os._exit(0)


def _run_assignment(assignment: Assignment) -> None:
    """Run a rank until rank 0 releases it."""
    rank, shown = assignment.rank, RankBoard(assignment.board)
    with reported(rank, shown), contextlib.closing(Connection(assignment.messages)) as connection:
        port, config = _or_end(connection.recv)
        address = config.distributed_address or LOOPBACK
        monitor = RankMonitor(rank, shown, config.watchdog_seconds, watch_from_worker)
        monitor.start()
        with contextlib.closing(Ring(assignment.steps, config.layout.size - 1)) as ring:
            run_rank(
                config,
                monitor,
                lambda: RankGroup.connect(rank, config.layout.size, address, port),
                lambda: _or_end(connection.recv),
                lambda pinned: functools.partial(
                    _or_end, StepReceiver(ring, rank - 1, connection, pinned=pinned).receive
                ),
            )
        monitor.stop()
    shown.close()


def run_rank(
    config: EngineConfig,
    monitor: RankMonitor,
    connect: Callable[[], RankGroup],
    receive_memory_plan: Callable[[], MemoryPlan],
    receiver: Callable[[bool], Callable[[], PackedStep | Command]],
) -> None:
    """Load a rank other than 0 and do what rank 0 says, until it releases the rank, in the thread that `monitor` was
    made in.

    `connect`: meets the other ranks. `receiver`: told whether steps are sent on to a GPU, returns what waits for the
    next step or command.
    """
    load_plan = prepare_rank(config, monitor.rank, GPU_TOKENS)
    monitor.row.phase = JOINING
    ranks = connect()
    worker = Worker.start(load_plan, config, ranks, lambda planned: receive_memory_plan())
    monitor.row.phase = LOADED
    receive = receiver(load_plan.build.device.type == "cuda")
    with frozen_heap():
        while (sent := receive()) is not Command.RELEASE:
            with monitor.step():
                worker.follow(sent)
    worker.close()
    ranks.leave()
    # Another engine's group can be joined once this one is left.
    RankGroup.settled()


def _or_end(receive: Callable[[], T]) -> T:
    """The next message of rank 0; the process ends where there is none."""
    try:
        return receive()
    except (EOFError, OSError):
        # Rank 0 has ended or let go; nothing is owed to anyone.
        os._exit(0)
