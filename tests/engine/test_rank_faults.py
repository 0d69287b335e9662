"""A rank that raises, is killed or hangs ends the engine in seconds, in any phase, and no process is left."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from rank_faults import DEVICE, WATCHDOG_SECONDS, Ended, FaultyEngine

from allotrope.engine.call_stack import compiles_kernel
from allotrope.engine.ranks.rank_board import RankBoard
from allotrope.engine.ranks.rank_monitor import RankMonitor
from allotrope.kernels.c.compiler import CannotCompile, load

# What the fault takes to be known, at most, and what may follow.
KNOWN_SECONDS = {"raise": 0.0, "SIGKILL": 0.0, "SIGSTOP": WATCHDOG_SECONDS + 1.0, "hang": WATCHDOG_SECONDS + 2.0}
END_SECONDS = 10.0
SAID = {
    "raise": r"rank {rank} \(process \d+\): RuntimeError: injected fault",
    "SIGKILL": r"rank {rank} \(process \d+\) was killed by SIGKILL",
    "SIGSTOP": r"rank {rank} \(process \d+\) has shown no sign of life for {seconds:g} s \(it is stopped, as by SIG",
    "hang": r"a step has not ended for {seconds:g} s: {others}rank {rank} \(process \d+\) is in hang \(sitecustomize",
}
QUICK = [
    *(("loading", "raise"), ("loading", "SIGSTOP")),
    *(("idle", "SIGKILL"), ("idle", "SIGSTOP")),
    ("prefill", "SIGKILL"),
    *(("decode", "raise"), ("decode", "SIGKILL"), ("decode", "SIGSTOP"), ("decode", "hang")),
]
SLOW = [
    *(("start", "raise"), ("start", "SIGKILL"), ("start", "SIGSTOP"), ("loading", "SIGKILL")),
    *(("prefill", "raise"), ("prefill", "SIGSTOP"), ("prefill", "hang")),
]
CAPTURE = [("capture", "raise"), ("capture", "SIGKILL"), ("capture", "SIGSTOP"), ("capture", "hang")]
needs_two_gpus = pytest.mark.skipif(DEVICE != "cuda", reason="graphs are captured on two GPUs, which are not here")


def assert_ended(ended: Ended, fault: str, rank: int = 1) -> None:
    """With what the rank had to say, in time, and whole."""
    told = f"{ended.output}\n{ended.errors}"
    assert ended.left == [], told
    assert ended.seconds < KNOWN_SECONDS[fault] + END_SECONDS, told
    assert ended.status == 1, told
    assert re.search(said(fault, rank), ended.said), told


def said(fault: str, rank: int) -> str:
    """A pattern of what is said of a fault."""
    # Which rank waits for others is not known of one that waits for its GPU.
    return SAID[fault].format(rank=rank, seconds=WATCHDOG_SECONDS, others=".*" if DEVICE == "cuda" else "")


@pytest.mark.parametrize(
    ("phase", "fault"),
    [
        *QUICK,
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
        *(pytest.param(*case, marks=needs_two_gpus) for case in CAPTURE),
    ],
)
def test_a_fault_of_rank_1_ends_the_engine_with_its_message(phase: str, fault: str, tmp_path: Path) -> None:
    ended = FaultyEngine(tmp_path, phase, fault).wait()
    assert_ended(ended, fault)
    assert ended.said.startswith("EngineDead: "), ended.said
    assert ("Traceback" in ended.errors) == (fault == "raise"), ended.errors


@pytest.mark.parametrize("fault", ["SIGKILL", pytest.param("raise", marks=pytest.mark.slow), "hang"])
def test_a_step_that_is_launched_and_not_collected_ends_too(fault: str, tmp_path: Path) -> None:
    assert_ended(FaultyEngine(tmp_path, "decode", fault, async_scheduling="on").wait(), fault)


@pytest.mark.parametrize("fault", ["raise", pytest.param("SIGKILL", marks=pytest.mark.slow), "hang"])
def test_a_fault_of_a_later_stage_ends_the_engine_with_its_message(fault: str, tmp_path: Path) -> None:
    stages = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}
    assert_ended(FaultyEngine(tmp_path, "decode", fault, **stages).wait(), fault)


@pytest.mark.parametrize("fault", ["raise", pytest.param("SIGSTOP", marks=pytest.mark.slow)])
def test_a_fault_of_the_first_stage_ends_the_later_ones(fault: str, tmp_path: Path) -> None:
    stages = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}
    ended = FaultyEngine(tmp_path, "decode", fault, rank=0, **stages).wait()
    assert ended.left == [], ended
    assert ended.seconds < KNOWN_SECONDS[fault] + END_SECONDS
    assert re.search(said(fault, rank=0), ended.said), ended


def test_a_model_error_of_rank_1_keeps_its_text(tmp_path: Path) -> None:
    ended = FaultyEngine(tmp_path, "start", "refuse").wait()
    assert (ended.status, ended.left, ended.errors) == (1, [], "")
    assert re.search(r"rank 1 \(process \d+\): tiny: one=1 \(needs 2\); two=2 \(needs 3\)", ended.said), ended.said


@pytest.mark.parametrize(
    "fault", ["raise", pytest.param("SIGKILL", marks=pytest.mark.slow), pytest.param("hang", marks=pytest.mark.slow)]
)
def test_the_first_fault_of_four_ranks_is_named(fault: str, tmp_path: Path) -> None:
    """The collectives of the other three break because of it."""
    assert_ended(FaultyEngine(tmp_path, "decode", fault, rank=2, size=4).wait(), fault, rank=2)


def test_an_error_of_rank_0_ends_the_others(tmp_path: Path) -> None:
    ended = FaultyEngine(tmp_path, "decode", "raise", rank=0).wait()
    assert_ended(ended, "raise", rank=0)
    assert ended.said.startswith("EngineDead: "), ended.said


def test_an_error_of_rank_0_while_it_loads_is_raised_as_it_is(tmp_path: Path) -> None:
    ended = FaultyEngine(tmp_path, "loading", "refuse", rank=0).wait()
    assert (ended.status, ended.left, ended.errors) == (1, [], "")
    assert ended.said == "ModelError: tiny:", ended.said
    assert ended.seconds < END_SECONDS


def test_a_step_of_rank_0_that_never_ends_ends_its_process(tmp_path: Path) -> None:
    """Nothing wakes its thread: the process says why and is gone."""
    ended = FaultyEngine(tmp_path, "decode", "hang", rank=0).wait()
    assert_ended(ended, "hang", rank=0)
    assert ended.value("said") is None


def test_rank_0_that_hangs_is_ended_by_the_others(tmp_path: Path) -> None:
    ended = FaultyEngine(tmp_path, "decode", "SIGSTOP", rank=0).wait()
    assert ended.left == [] and ended.status == -signal.SIGKILL, ended
    assert ended.seconds < KNOWN_SECONDS["SIGSTOP"] + END_SECONDS
    assert re.search(said("SIGSTOP", rank=0), ended.said), ended


@pytest.mark.parametrize(
    "phase",
    ["loading", "decode", pytest.param("start", marks=pytest.mark.slow), pytest.param("idle", marks=pytest.mark.slow)],
)
def test_no_process_outlives_rank_0(phase: str, tmp_path: Path) -> None:
    ended = FaultyEngine(tmp_path, phase, "SIGKILL", rank=0).wait()
    assert ended.left == [] and ended.status == -signal.SIGKILL, ended
    assert ended.seconds < END_SECONDS


def test_a_stopped_process_does_not_outlive_rank_0(tmp_path: Path) -> None:
    running = FaultyEngine(tmp_path, "pause", "none")
    running.wait_until_ready()
    for pid in running.workers():
        os.kill(pid, signal.SIGSTOP)
    running.signal(signal.SIGKILL)
    assert running.wait().left == []


@pytest.mark.parametrize("fault", ["SIGSTOP", pytest.param("SIGKILL", marks=pytest.mark.slow)])
def test_close_returns_whatever_a_rank_does(fault: str, tmp_path: Path) -> None:
    ended = FaultyEngine(tmp_path, "close", fault).wait()
    assert ended.left == [] and ended.status == 0, ended
    assert float(ended.value("closed") or "nan") < 5.0, ended


def test_a_process_may_hold_up_its_threads_between_steps(tmp_path: Path) -> None:
    ended = FaultyEngine(tmp_path, "hold", "none").wait()
    assert (ended.left, ended.status, ended.errors) == ([], 0, ""), ended
    assert (ended.value("tokens") or "").count(",") == 7


def test_an_engine_that_is_not_closed_leaves_no_process(tmp_path: Path) -> None:
    ended = FaultyEngine(tmp_path, "exit", "none").wait()
    assert (ended.left, ended.status) == ([], 0) and "Traceback" not in ended.errors, ended


def test_processes_that_are_stopped_together_go_on_together(tmp_path: Path) -> None:
    """As by Ctrl-Z and `fg`: for longer than the watchdog waits."""
    running = FaultyEngine(tmp_path, "pause", "none")
    running.wait_until_ready()
    running.signal_all(signal.SIGSTOP)
    time.sleep(2.0 * WATCHDOG_SECONDS)
    running.signal_all(signal.SIGCONT)
    ended = running.wait()
    assert ended.left == [] and ended.status == 0, ended
    assert (ended.value("tokens") or "").count(",") == 7


def watched(seconds: float = 2.0) -> tuple[RankMonitor, RankMonitor]:
    """The monitors of rank 0 and of rank 1, which look at nothing by themselves."""
    board = RankBoard.make(2)
    first, second = (RankMonitor(rank, board, seconds, lambda monitor: None) for rank in range(2))
    return first, second


def looks(monitor: RankMonitor, count: int) -> list[str]:
    """What a monitor says of steps in so many looks."""
    return [said for _ in range(count) if (said := monitor.stuck()) is not None]


def test_a_step_in_which_a_kernel_compiles_may_take_longer() -> None:
    monitor, other = watched()
    other.row.progress = 1
    assert looks(monitor, 5) == []
    other.row.compiling = 1
    assert looks(monitor, 100) == []
    # From its end on the limit is the step's own.
    other.row.compiling = 0
    assert looks(monitor, 4) == []
    assert looks(monitor, 3)[-1].startswith("a step has not ended for 2 s: rank 1 (process ")


@pytest.mark.parametrize("seconds", [0.0, float("inf")])
def test_no_silence_and_no_step_is_too_long_where_the_watchdog_is_off(seconds: float) -> None:
    monitor, other = watched(seconds)
    other.row.progress = 1
    assert looks(monitor, 1000) == [] and monitor.silent(1) is None


def _compile(source: Path) -> None:
    with contextlib.suppress(CannotCompile):
        load(source, torch.float32)


def test_a_compiler_at_work_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "slow_cc"
    compiler.write_text("#!/bin/sh\nsleep 1\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("ALLOTROPE_CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "empty.c"
    source.write_text("")
    assert not compiles_kernel()
    compiling = threading.Thread(target=_compile, args=(source,))
    compiling.start()
    while not compiles_kernel():
        assert compiling.is_alive(), "the compiler ended and was never seen"
    compiling.join()
    assert not compiles_kernel()
