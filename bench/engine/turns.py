"""Commands of `bench/engine.py` that share GPUs: all load, and one at a time is measured, while the others stand still.

Owns when a command starts, when it is measured and when it is stopped. Must not know what it measures. Linux alone: it
finds the processes of a command in /proc.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Between looks at what is ready, and for kernels on their way to end.
_POLL_S, _SETTLE_S = 0.2, 1.0


@dataclass(frozen=True)
class Turn:
    """A command that leaves files `awaited`.* when its engines are ready, and measures once `awaited` is there.

    `engines`: that leave such a file. `gigabytes`: of each GPU, until it ends.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    awaited: Path
    engines: int
    gigabytes: float


@dataclass(frozen=True)
class Share:
    """Of a host, what commands have that take turns: GPUs of `gigabytes` each, and CPUs."""

    gpus: Sequence[int]
    gigabytes: float
    cores: Sequence[int]


class Waiting:
    """Turns that nobody has taken yet, in their order. Several shares may take from it at once."""

    def __init__(self, turns: Iterable[Turn]) -> None:
        self._turns, self._lock = list(turns), threading.Lock()

    def take(self, max_gigabytes: float | None) -> Turn | None:
        """The first one that needs no more than that; None: any number."""
        with self._lock:
            for place, turn in enumerate(self._turns):
                if max_gigabytes is None or turn.gigabytes <= max_gigabytes:
                    return self._turns.pop(place)
            return None


@dataclass
class _Running:
    turn: Turn
    process: subprocess.Popen[bytes]
    was_stopped: bool = False

    def is_ready(self) -> bool:
        found = self.turn.awaited.parent.glob(f"{self.turn.awaited.name}.*")
        return self.process.poll() is not None or len(list(found)) >= self.turn.engines

    def send(self, what: signal.Signals) -> None:
        for pid in family(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, what)


def take_turns(waiting: Waiting, share: Share, say: Callable[[str], object] = print) -> dict[str, bool]:
    """Run turns on a share until none is waiting. One starts as soon as it fits beside those that run; on
    several GPUs, where those that run have all been measured: a rank that is stopped would leave the kernels of others
    waiting for it on their GPUs. Returns by name whether its engines were stopped while they loaded: then the time that
    they took to start means nothing.
    """
    running = list[_Running]()
    stopped: dict[str, bool] = {}
    together, measures = len(share.gpus) > 1, False
    try:
        while True:
            measures = measures and bool(running)
            # One at a time: a share that has none may be about to ask.
            room = share.gigabytes - _used(running) if running else None
            turn = None if measures else waiting.take(room)
            if turn is not None:
                running.append(_start(turn, share))
                say(f"{turn.name}: loads")
            if not running:
                break
            are_ready = [one for one in running if one.is_ready()]
            if not are_ready or (together and len(are_ready) < len(running)):
                time.sleep(_POLL_S)
                continue
            measures, ready = together, are_ready[0]
            _measure(ready, [one for one in running if one is not ready])
            running.remove(ready)
            stopped[ready.turn.name] = ready.was_stopped
            say(f"{ready.turn.name}: ended with code {ready.process.returncode}")
    finally:
        for one in running:
            one.send(signal.SIGKILL)
            one.process.wait()
    return stopped


def _used(running: Iterable[_Running]) -> float:
    return sum(one.turn.gigabytes for one in running)


def _start(turn: Turn, share: Share) -> _Running:
    pinned = ["taskset", "--cpu-list", ",".join(map(str, share.cores)), *turn.command]
    gpus = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, share.gpus))}
    with turn.log.open("wb") as log:
        environment = {**os.environ, **gpus, **turn.environment}
        return _Running(turn, subprocess.Popen(pinned, env=environment, stdout=log, stderr=subprocess.STDOUT))


def _measure(ready: _Running, others: Sequence[_Running]) -> None:
    for one in others:
        one.was_stopped |= not one.is_ready()
        one.send(signal.SIGSTOP)
    try:
        if others:
            time.sleep(_SETTLE_S)
        ready.turn.awaited.touch()
        ready.process.wait()
    finally:
        for one in others:
            one.send(signal.SIGCONT)


def family(pid: int) -> list[int]:
    """A process and all that descend from it, children behind their parents."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The name of the command, in parentheses, may have any character.
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found
