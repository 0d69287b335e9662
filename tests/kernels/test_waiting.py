"""Threads that wait sleep at once while other processes want the CPU, and spin where nobody does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from allotrope.kernels.c.compiler import CannotCompile
from allotrope.kernels.c.waiting import Waiting, waited_for_cpu

ROOT = Path(__file__).parents[2]
# Spins for seconds where it may: CPU time that passes while nothing is computed is that of waiting threads.
SPINNING = """
import time, torch
torch.set_num_threads(2)
from allotrope.kernels.c.waiting import Crowd
numbers = torch.ones(1 << 22)
def idle():
    numbers.add_(1)
    before = time.process_time()
    time.sleep(0.5)
    return time.process_time() - before
spun = idle()
crowd = Crowd()
slept = idle()
crowd.end()
# The system ends its threads a moment after Python has joined the one that holds them.
for _ in range(20):
    again = idle()
    if again > slept:
        break
print(spun, slept, again)
"""


class Machine:
    """A machine of which the test says how busy it is."""

    def __init__(self) -> None:
        self.now = self.waited = 0.0
        self.crowds: list[str] = []

    def passes(self, seconds: float, share: float) -> None:
        self.now += seconds
        self.waited += seconds * share

    def crowd(self) -> Any:
        machine = self
        machine.crowds.append("made")

        class Made:
            def end(self) -> None:
                machine.crowds.append("ended")

        return Made()

    def watched(self, make: Any = None) -> Waiting:
        return Waiting(lambda: self.waited, lambda: self.now, make or self.crowd)


@pytest.fixture(autouse=True)
def several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)


def test_a_busy_machine_and_then_a_quiet_one() -> None:
    machine = Machine()
    waiting = machine.watched()
    for share, expected in ((0.0, False), (0.5, True), (0.6, True), (0.15, True), (0.02, False), (0.15, False)):
        machine.passes(1.0, share)
        waiting.look()
        assert waiting.asleep_at_once is expected, share
    assert machine.crowds == ["made", "ended"]


def test_a_moment_says_nothing() -> None:
    machine = Machine()
    waiting = machine.watched()
    machine.passes(0.05, 1.0)
    waiting.look()
    assert not waiting.asleep_at_once


def test_closing_ends_the_second_team() -> None:
    machine = Machine()
    waiting = machine.watched()
    machine.passes(1.0, 1.0)
    waiting.look()
    waiting.close()
    waiting.close()
    assert machine.crowds == ["made", "ended"]


def test_without_a_compiler_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def cannot() -> Any:
        raise CannotCompile("no compiler")

    machine = Machine()
    waiting = machine.watched(cannot)
    with caplog.at_level("INFO", "allotrope.kernels"):
        for _ in range(3):
            machine.passes(1.0, 1.0)
            waiting.look()
    assert [record.getMessage() for record in caplog.records].count(
        "threads go on spinning on this busy machine: no compiler"
    ) == 1


@pytest.mark.skipif(waited_for_cpu() is None, reason="the system does not count how long threads wait for a CPU")
def test_the_system_counts_the_wait() -> None:
    first = waited_for_cpu()
    second = waited_for_cpu()
    assert first is not None and second is not None and second >= first >= 0


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU: no thread waits for another")
def test_a_second_team_ends_the_spinning() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GOMP_SPINCOUNT": "100000000000", "OMP_NUM_THREADS": "2"}
    environment.pop("OMP_WAIT_POLICY", None)
    done = subprocess.run(
        [sys.executable, "-c", SPINNING], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    spun, slept, again = map(float, done.stdout.split())
    assert spun > 0.05, "a waiting thread spins"
    assert slept < spun / 3
    assert again > slept, "it spins again"
