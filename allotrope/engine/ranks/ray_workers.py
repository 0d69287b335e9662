"""The other ranks as Ray actors, perhaps on other hosts: every step is a call of each actor.

Owns the actors of one engine. Ray says when one is gone; signs of life come as answers to calls. What follows from a
fault is that of all `Workers`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import Any

from allotrope.cache.memory import MemoryPlan
from allotrope.config import EngineConfig
from allotrope.engine.executor import OnDeath
from allotrope.engine.packed_step import PackedStep
from allotrope.engine.ranks.rank_group import RankGroup, start_thread
from allotrope.engine.ranks.rank_monitor import RankMonitor, name_rank
from allotrope.engine.ranks.ray_placement import ACTOR_ENVIRONMENT, RayPlacement
from allotrope.engine.ranks.ray_worker import GROUPS, STEPS, WATCH, Facts, Failure, RayWorker, Sent, versions
from allotrope.engine.ranks.step_channel import Command
from allotrope.engine.ranks.workers import Workers
from allotrope.env import spin_setting
from allotrope.errors import ConfigError
from allotrope.logs import one_line

log = logging.getLogger("allotrope.engine")

# An actor is a process that imports PyTorch, on a host that may be slow.
_START_SECONDS = 600.0
# Ray's own calls wait for a cluster that does not answer.
_CALL_SECONDS = 2.0


class RayWorkers(Workers):
    """The actors of all ranks but 0, in the order of the ranks."""

    # Ray takes five looks, three seconds apart, until a host that is gone counts as dead.
    cause_seconds = 20.0

    def __init__(self, config: EngineConfig, placement: RayPlacement, on_death: OnDeath | None) -> None:
        super().__init__(config, placement.size, on_death)
        self._placement = placement
        self._actors: list[Any] = []
        self._facts: list[Facts] = []
        self._waiting: list[threading.Thread] = []
        # Per rank, the look that is under way.
        self._looks: list[Any] = []
        self._number = 0

    @property
    def process_ids(self) -> list[int]:
        return [facts.process for facts in self._facts]

    def start(self, config: EngineConfig, ranks: RankGroup) -> None:
        if self.size == 1:
            return
        import ray

        worker = ray.remote(concurrency_groups=GROUPS, max_restarts=0, max_task_retries=0)(RayWorker)
        environment = {"env_vars": ACTOR_ENVIRONMENT | spin_setting()}
        for rank in range(1, self.size):
            options = self._placement.actor_options(rank)
            self._actors.append(worker.options(runtime_env=environment, **options).remote(rank, self.size))
        try:
            asked = [actor.facts.options(concurrency_group=WATCH).remote() for actor in self._actors]
            self._facts = ray.get(asked, timeout=_START_SECONDS)
        except ray.exceptions.RayError as error:
            raise ConfigError(f"Ray could not start the ranks: {_last_line(error)}") from error
        _refuse_versions(self._facts)
        for rank, (actor, facts) in enumerate(zip(self._actors, self._facts, strict=True), 1):
            row = self._board.rows[rank]
            row.process, row.host = facts.process, facts.address
            life = actor.run.remote(config, ranks.address, ranks.port)
            waiting = threading.Thread(target=self._wait, args=(rank, life), name=f"rank {rank}", daemon=True)
            waiting.start()
            self._waiting.append(waiting)

    def share_memory_plan(self, memory: MemoryPlan) -> None:
        self._send(memory)

    def send(self, packed: PackedStep) -> None:
        if self._actors:
            self.raise_fault()
            self._send(packed.words.numpy())

    def command(self, command: Command) -> None:
        self._send(command)

    def close(self) -> None:
        super().close()
        self._placement.release()

    def _send(self, sent: Sent) -> None:
        for actor in self._actors:
            actor.send.options(concurrency_group=STEPS).remote(self._number, sent)
        self._number += 1

    def _wait(self, rank: int, life: Any) -> None:
        """Wait for the end of a rank."""
        import ray

        row = self._board.rows[rank]
        try:
            failure: Failure = ray.get(life)
        except BaseException as error:
            # Whatever Ray says: this rank runs no step any more.
            lost = isinstance(error, ray.exceptions.ActorUnavailableError)
            what = "is lost, or its host is" if lost else "has ended"
            self.fail(f"{name_rank(rank, row)} {what}: {_last_line(error)}")
            return
        if failure.follows:
            time.sleep(self.cause_seconds)
        self.fail(f"{name_rank(rank, row)}: {failure.error}")

    def _look(self, monitor: RankMonitor) -> None:
        import ray

        if self._facts and len(self._waiting) == len(self._actors):
            self._looks = self._looks or [None] * len(self._actors)
            for i, (actor, asked) in enumerate(zip(self._actors, self._looks, strict=True)):
                with contextlib.suppress(ray.exceptions.RayError):
                    if asked is not None:
                        if not ray.wait([asked], timeout=0)[0]:
                            continue
                        self._looks[i] = None
                        self._board.rows[i + 1].signs = ray.get(asked)
                    look = actor.look.options(concurrency_group=WATCH)
                    self._looks[i] = look.remote(monitor.row.signs)
        super()._look(monitor)

    def _let_go(self) -> None:
        """Nothing is owed to the actors."""

    def _kill(self) -> None:
        start_thread(self._kill_actors, "kill", _CALL_SECONDS)

    def _kill_actors(self) -> None:
        import ray

        for actor in self._actors:
            with contextlib.suppress(Exception):
                # The cluster may be what has failed; Ray ends the actors with this process as well.
                ray.kill(actor)

    def _reap(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for thread in self._waiting:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))


def _refuse_versions(ranks: list[Facts]) -> None:
    """Raise ConfigError where ranks run other software than rank 0."""
    own, wrong = dict(versions()), []
    for rank, facts in enumerate(ranks, 1):
        others = [f"{name} {one}" for name, one in facts.versions if own[name] != one]
        if others:
            wrong.append(f"rank {rank} on {facts.address} has {', '.join(others)}")
    if wrong:
        here = ", ".join(f"{name} {one}" for name, one in own.items())
        raise ConfigError(f"all hosts must run the same: {'; '.join(wrong)}; rank 0 has {here}. Install the same.")


def _last_line(error: BaseException) -> str:
    """What Ray says of an actor's end, without the names of its parts."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("\t")]
    said = (lines[-1] if lines else type(error).__name__).partition(" Some common causes")[0]
    for start in ("The actor is dead because ", "RpcError: "):
        said = said.partition(start)[2] or said
    return one_line(said.removesuffix(". The task may or may not have been executed on the actor."))
