"""A server over two ranks: it answers like one, and the death of a rank is the end of it, said in one line."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from server_process import ServerProcess, is_alive

ASKED = {"prompt": [5, 6, 7], "max_tokens": 8, "ignore_eos": True, "temperature": 0}


def test_killing_a_rank_ends_the_server(tiny_model: Path) -> None:
    server = ServerProcess(tiny_model, engine={"tensor_parallel_size": 2}).wait_until_ready()
    try:
        with server.http() as client:
            assert client.post("/v1/completions", json=ASKED).json()["usage"]["completion_tokens"] == 8
        rank = next(pid for pid in children(server.engine_pid) if is_alive(pid))
        killed = time.monotonic()
        os.kill(rank, signal.SIGKILL)
        assert server.wait(timeout=30) == 1
        assert time.monotonic() - killed < 10
        assert sum(f"rank 1 (process {rank}) was killed by SIGKILL" in line for line in server.log) == 1, server.log
        assert not any("Traceback" in line for line in server.log), "".join(server.log)
    finally:
        server.close()


def children(pid: int) -> list[int]:
    """Processes that `pid` started."""
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
