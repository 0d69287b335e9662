"""Commands of `bench/engine.py` that share GPUs: all load, and one at a time is measured, while the others stand still.

Owns when a command starts, when it is measured and when it is stopped. Must not know what it measures. Linux alone: it
finds the processes of a command in /proc.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections import deque
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


def take_turns(
    turns: Iterable[Turn], gigabytes: float, cores: Sequence[int], say: Callable[[str], object] = print
) -> dict[str, bool]:
    """Run all of `turns`, which have the same GPUs of `gigabytes` each, on CPUs `cores`. A turn starts as soon as it
    and those before it fit. Returns by name whether its engines were stopped while they loaded: then the time that they
    took to start means nothing.
    """
    waiting, running = deque(turns), list[_Running]()
    stopped: dict[str, bool] = {}
    try:
        while waiting or running:
            while waiting and (not running or _used(running) + waiting[0].gigabytes <= gigabytes):
                running.append(_start(waiting.popleft(), cores))
                say(f"{running[-1].turn.name}: loads")
            ready = next((one for one in running if one.is_ready()), None)
            if ready is None:
                time.sleep(_POLL_S)
                continue
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


def _start(turn: Turn, cores: Sequence[int]) -> _Running:
    pinned = ["taskset", "--cpu-list", ",".join(map(str, cores)), *turn.command]
    with turn.log.open("wb") as log:
        environment = {**os.environ, **turn.environment}
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
