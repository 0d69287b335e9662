"""A server over two ranks: it answers like one, and the death of a rank is the end of it, said in one line."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess, is_alive

ASKED: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 8, "ignore_eos": True, "temperature": 0}
LONG = ASKED | {"max_tokens": 500, "stream": True}


@pytest.fixture
def server(tiny_model: Path) -> Iterator[ServerProcess]:
    """A server over two ranks that has answered a request."""
    server = ServerProcess(tiny_model, engine={"tensor_parallel_size": 2, "watchdog_seconds": 3.0})
    try:
        server.wait_until_ready()
        with server.http() as client:
            assert client.post("/v1/completions", json=ASKED).json()["usage"]["completion_tokens"] == 8
        yield server
    finally:
        server.close()


def test_killing_a_rank_ends_the_server(server: ServerProcess) -> None:
    rank = rank_of(server)
    with server.http() as client, client.stream("POST", "/v1/completions", json=LONG) as answer:
        events = answer.iter_lines()
        next(events)
        killed = time.monotonic()
        os.kill(rank, signal.SIGKILL)
        reason = f"rank 1 (process {rank}) was killed by SIGKILL"
        assert any(reason in event and "error" in event for event in events)
    assert server.wait(timeout=30) == 1
    assert time.monotonic() - killed < 10
    assert sum(reason in line for line in server.log) == 1, "".join(server.log)
    assert not any("Traceback" in line for line in server.log), "".join(server.log)
    assert not is_alive(server.engine_pid)


def test_killing_a_rank_that_loads_ends_the_server(tiny_model: Path) -> None:
    server = ServerProcess(tiny_model, engine={"tensor_parallel_size": 2})
    try:
        while not (ranks := [pid for pid in children(server.engine_pid) if is_worker(pid)]):
            time.sleep(0.01)
        os.kill(ranks[0], signal.SIGKILL)
        assert server.wait(timeout=10) == 1
        said = f"cannot serve: rank 1 (process {ranks[0]}) was killed by SIGKILL"
        assert any(said in line for line in server.log), "".join(server.log)
        assert not is_alive(server.engine_pid)
    finally:
        server.close()


def test_a_rank_that_hangs_ends_the_idle_server(server: ServerProcess) -> None:
    rank = rank_of(server)
    os.kill(rank, signal.SIGSTOP)
    assert server.wait(timeout=12) == 1
    reason = f"rank 1 (process {rank}) has shown no sign of life for 3 s (it is stopped, as by SIGSTOP)"
    assert sum(reason in line for line in server.log) == 1, "".join(server.log)
    assert not is_alive(rank) and not is_alive(server.engine_pid)


def test_an_engine_that_hangs_is_ended_by_its_ranks(server: ServerProcess) -> None:
    rank = rank_of(server)
    with server.http() as client, client.stream("POST", "/v1/completions", json=LONG) as answer:
        events = answer.iter_lines()
        next(events)
        os.kill(server.engine_pid, signal.SIGSTOP)
        reason = f"the engine process (pid {server.engine_pid}) was killed by SIGKILL"
        assert any(reason in event for event in events)
    assert server.wait(timeout=12) == 1
    said = f"rank 0 (process {server.engine_pid}) has shown no sign of life for 3 s (it is stopped, as by SIGSTOP)"
    assert any(said in line for line in server.log), "".join(server.log)
    assert not is_alive(rank)


@pytest.mark.parametrize("stopped", [False, True])
def test_no_process_outlives_the_server(server: ServerProcess, stopped: bool) -> None:
    rank = rank_of(server)
    if stopped:
        os.kill(rank, signal.SIGSTOP)
    server.signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while is_alive(rank) or is_alive(server.engine_pid):
        assert time.monotonic() < deadline, (is_alive(rank), is_alive(server.engine_pid))
        time.sleep(0.05)


def rank_of(server: ServerProcess) -> int:
    """The process of rank 1."""
    return next(pid for pid in children(server.engine_pid) if is_worker(pid))


def is_worker(pid: int) -> bool:
    """Whether a process runs a rank."""
    try:
        return "run_worker_process" in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False


def children(pid: int) -> list[int]:
    """Processes that `pid` started."""
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def test_a_server_with_two_data_parallel_ranks_says_which_got_what(tiny_model: Path) -> None:
    server = ServerProcess(tiny_model, engine={"data_parallel_size": 2, "enable_prefix_caching": True})
    long = ASKED | {"prompt": list(range(2, 50))}
    try:
        server.wait_until_ready()
        with server.http() as client:
            for prompt in ([*range(2, 50)], [*range(50, 98)], [*range(2, 50), 7]):
                answer = client.post("/v1/completions", json=long | {"prompt": prompt}).json()
                assert answer["usage"]["completion_tokens"] == 8
            lines = client.get("/metrics").text.splitlines()
    finally:
        server.close()
    counts = {
        (line.partition("{")[0], line.partition('dp_rank="')[2][0]): float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith("allotrope_dp_requests") and "_created" not in line
    }
    assert sum(count for (name, _), count in counts.items() if name == "allotrope_dp_requests_total") == 3
    assert sum(count for (name, _), count in counts.items() if name == "allotrope_dp_requests_by_prefix_total") == 1
    assert {dp_rank for _, dp_rank in counts} == {"0", "1"}
