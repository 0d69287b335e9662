"""One rank but 0 as a Ray actor: it loads when it is told to, runs the steps that it is sent, shows what it does.

Owns the actor's threads: one runs the rank, one takes what is sent, one answers looks. Must not know who places it, or
what follows from a fault.
"""

from __future__ import annotations

import functools
import os
import platform
import sys
import traceback
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any, NoReturn

import torch

from allotrope import __version__
from allotrope.cache.memory import MemoryPlan
from allotrope.config import EngineConfig
from allotrope.engine.call_stack import failed_in_collective
from allotrope.engine.packed_step import PackedStep, Words
from allotrope.engine.ranks.rank_board import LOADED, RankBoard, Signs
from allotrope.engine.ranks.rank_group import RankGroup
from allotrope.engine.ranks.rank_monitor import RankMonitor, describe_error
from allotrope.engine.ranks.ray_placement import device_of, gpu_ids_here
from allotrope.engine.ranks.step_channel import Command
from allotrope.engine.ranks.worker_loop import run_rank
from allotrope.errors import AllotropeError

# Threads of the actor beside the one that runs the rank.
STEPS, WATCH = "steps", "watch"
GROUPS = {STEPS: 1, WATCH: 1}

Sent = Words | Command | MemoryPlan
"""A packed step, or a command; before these, the memory plan."""


@dataclass(frozen=True)
class Facts:
    """Where an actor runs, and what it runs. `gpus`: those that Ray gave it."""

    process: int
    address: str
    gpus: tuple[str, ...]
    versions: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Failure:
    """Why a rank ended. `follows`: it failed in a collective, which may be another rank's fault."""

    error: str
    follows: bool


def versions() -> tuple[tuple[str, str], ...]:
    """What must be the same on every host."""
    return ("allotrope", __version__), ("torch", str(torch.__version__)), ("Python", platform.python_version())


class RayWorker:
    """Rank `rank` of `size`."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._board = RankBoard.make(size)
        self._sent: SimpleQueue[Sent] = SimpleQueue()
        self._early: dict[int, Sent] = {}
        self._next = 0
        # The host's own process of Ray.
        self._parent = os.getppid()

    def facts(self) -> Facts:
        """Where this actor runs."""
        import ray

        return Facts(os.getpid(), ray.util.get_node_ip_address(), tuple(gpu_ids_here()), versions())

    def run(self, config: EngineConfig, meeting: str, port: int) -> Failure:
        """Run the rank for as long as the actor lives; return why it fails. `meeting`, `port`: of rank 0's store."""
        try:
            return self._run(config, meeting, port)
        except BaseException as error:
            # The border of the process: whatever went wrong, rank 0 must hear of it in one line.
            follows = failed_in_collective(error)
            if not follows and not isinstance(error, AllotropeError):
                traceback.print_exc()
            return Failure(describe_error(error), follows)

    def send(self, number: int, sent: Sent) -> None:
        """Queue what rank 0 sends, in the order of the numbers from 0 on."""
        self._early[number] = sent
        while self._next in self._early:
            self._sent.put(self._early.pop(self._next))
            self._next += 1

    def look(self, signs: Signs) -> Signs:
        """Show what this rank does. `signs`: of rank 0."""
        self._board.rows[0].signs = signs
        return self._board.rows[self._rank].signs

    def _run(self, config: EngineConfig, meeting: str, port: int) -> NoReturn:
        facts = self.facts()
        self._board.rows[0].host = meeting
        monitor = RankMonitor(self._rank, self._board, config.watchdog_seconds, self._watch)
        monitor.start()
        device = device_of(facts.gpus[0]) if facts.gpus else "cpu"
        run_rank(
            replace(config, device=device),
            monitor,
            lambda: RankGroup.connect(self._rank, self._size, meeting, port, facts.address),
            self._memory_plan,
            lambda pinned: functools.partial(self._receive, pinned),
        )
        raise AssertionError("an actor's rank is released by nobody")

    def _receive(self, pinned: bool) -> PackedStep | Command:
        sent = self._sent.get()
        assert not isinstance(sent, MemoryPlan), "the memory plan comes once"
        return sent if isinstance(sent, Command) else _packed(sent, pinned=pinned)

    def _memory_plan(self) -> MemoryPlan:
        sent: Any = self._sent.get()
        assert isinstance(sent, MemoryPlan), sent
        return sent

    def _watch(self, monitor: RankMonitor) -> None:
        """End this process where rank 0 is silent, or where Ray's process on this host has ended, which would end this
        one: a host that the cluster has lost must not hold up the others. Ray ends it where rank 0 is gone."""
        if os.getppid() != self._parent:
            os._exit(1)
        silence, row = monitor.silent(0, monitor.rank - 1), monitor.board.rows[0]
        # Between steps, code of the process that uses the engine may hold up its threads for as long as it likes.
        if silence is not None and (row.phase != LOADED or row.in_step):
            print(f"allotrope: {silence}; rank {monitor.rank} ends.", file=sys.stderr, flush=True)
            os._exit(1)


def _packed(words: Words, *, pinned: bool) -> PackedStep:
    """A step in memory of this process: what Ray brings may be shared and read-only."""
    own = torch.empty(len(words), dtype=torch.int64, pin_memory=pinned)
    own.numpy()[:] = words
    return PackedStep(own)
