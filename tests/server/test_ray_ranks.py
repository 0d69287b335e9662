"""A server whose ranks are on two hosts of a Ray cluster: it answers like one rank, and the loss of a host ends it.

Both hosts are this machine, under two addresses of its loopback interface.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess, is_alive

pytest.importorskip("ray", reason="the package ray is not installed: pip install 'allotrope[ray]'")
if not Path("/proc/self/net/tcp").exists():
    pytest.skip("addresses 127.0.0.2 and 127.0.0.3 are Linux's", allow_module_level=True)

ASKED: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 12, "ignore_eos": True, "temperature": 0, "logprobs": 2}
LONG = ASKED | {"max_tokens": 500, "stream": True}
OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu"}


@pytest.fixture
def second_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The process of Ray on the second of two hosts; `RAY_ADDRESS` is their cluster."""
    from ray.cluster_utils import Cluster

    # Its sockets have long names. The cluster of the user, if there is one, stays the one that is found.
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    monkeypatch.setenv("RAY_TMPDIR", folder)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    options = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=options | {"node_ip_address": "127.0.0.2"})
    try:
        second = cluster.add_node(node_ip_address="127.0.0.3", **options)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        yield second.all_processes["raylet"][0].process.pid
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def choices(server: ServerProcess) -> Any:
    with server.http() as client:
        return client.post("/v1/completions", json=ASKED).json()["choices"]


@pytest.mark.parametrize("sizes", ["tensor", pytest.param("pipeline", marks=pytest.mark.slow)])
def test_two_hosts_answer_like_one_rank_and_the_loss_of_one_ends_the_server(
    sizes: str, tiny_model: Path, second_host: int
) -> None:
    alone = ServerProcess(tiny_model, engine=OPTIONS)
    try:
        want = choices(alone.wait_until_ready())
    finally:
        alone.close()
    ranks = {f"{sizes}_parallel_size": 2, "distributed_executor_backend": "ray"}
    server = ServerProcess(tiny_model, engine=OPTIONS | ranks)
    try:
        found = choices(server.wait_until_ready())
        assert [one["text"] for one in found] == [one["text"] for one in want]
        assert found[0]["logprobs"]["tokens"] == want[0]["logprobs"]["tokens"]
        rank = rank_on_second_host()
        with server.http() as client, client.stream("POST", "/v1/completions", json=LONG) as answer:
            events = answer.iter_lines()
            next(events)
            killed = time.monotonic()
            os.kill(second_host, signal.SIGKILL)
            # Whether its end or that of the connection is seen first.
            reason = f"failed: rank 1 (process {rank} on 127.0.0.3) "
            seen = list(events)
            assert any(reason in event and "error" in event for event in seen), "".join(seen[-5:] + server.log[-40:])
        assert time.monotonic() - killed < 30
        assert server.wait(timeout=30) == 1
        assert any(reason in line for line in server.log), "".join(server.log)
        deadline = time.monotonic() + 10
        while is_alive(rank) or is_alive(server.engine_pid):
            assert time.monotonic() < deadline, (is_alive(rank), is_alive(server.engine_pid))
            time.sleep(0.1)
    finally:
        server.close()


def rank_on_second_host() -> int:
    """The process of the only actor."""
    named = [path for path in Path("/proc").glob("[0-9]*/cmdline") if path.read_bytes().startswith(b"ray::RayWorker")]
    assert len(named) == 1, named
    return int(named[0].parent.name)
