"""From the first second of a server to its last: loading, draining, and deaths on either side."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from server_process import ServerProcess, is_alive, wait_until_running
from tiny_model import VOCAB_SIZE

from allotrope.architectures.registry import find_architecture

LONG = {"prompt": [5], "max_tokens": 400, "ignore_eos": True, "temperature": 0}
Starter = Callable[..., ServerProcess]


@pytest.fixture
def start(tiny_model: Path) -> Iterator[Starter]:
    """Starts servers that end with the test."""
    started: list[ServerProcess] = []

    def make(model: Path | str = tiny_model, **options: object) -> ServerProcess:
        started.append(ServerProcess(model, **options))  # type: ignore[arg-type]
        return started[-1]

    yield make
    for running in started:
        running.close()


class Background:
    """A request in a thread of its own."""

    def __init__(self, url: str, **more: object) -> None:
        self.status: int | None = None
        self.text = ""
        self.first_line = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(url, LONG | more), daemon=True)
        self._thread.start()

    def join(self) -> Background:
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self

    def _run(self, url: str, body: dict[str, object]) -> None:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as response:
            self.status = response.status_code
            for line in response.iter_lines():
                self.text += line + "\n"
                self.first_line.set()


def test_health_while_loading_and_after_the_engine_is_killed(start: Starter) -> None:
    server = start()
    os.kill(server.engine_pid, signal.SIGSTOP)
    loading = httpx.get(f"{server.url}/health")
    early = httpx.get(f"{server.url}/v1/models")
    assert loading.status_code == early.status_code == 503
    assert "loading" in early.json()["error"]["message"]
    os.kill(server.engine_pid, signal.SIGCONT)
    server.wait_until_ready()
    assert httpx.get(f"{server.url}/health").status_code == 200

    streamed = Background(server.url, stream=True)
    plain = Background(server.url, prompt=[6])
    with server.http() as http:
        wait_until_running(http, 2)
    assert streamed.first_line.wait(10)
    os.kill(server.engine_pid, signal.SIGKILL)
    started = time.monotonic()
    assert server.wait(timeout=5) == 1
    assert time.monotonic() - started < 5
    *_, event, done = [line for line in streamed.join().text.splitlines() if line]
    assert json.loads(event.removeprefix("data: "))["error"]["code"] == "engine_dead"
    assert done == "data: [DONE]"
    assert plain.join().status == 500
    assert json.loads(plain.text)["error"]["code"] == "engine_dead"
    reasons = [line for line in server.log if "SIGKILL" in line]
    assert len(reasons) == 1 and f"the engine process (pid {server.engine_pid}) was killed by SIGKILL" in reasons[0]
    assert not [line for line in server.log if "Traceback" in line]


def test_a_terminated_server_drains(start: Starter) -> None:
    server = start().wait_until_ready()
    running = Background(server.url, stream=True)
    assert running.first_line.wait(10)
    with server.http() as http:
        http.get("/version")
        server.signal(signal.SIGTERM)
        server.wait_for_line("stopping; open requests get")
        refused = http.post("/v1/completions", json=LONG)
        assert refused.status_code == http.get("/health").status_code == 503
        assert "shutting down" in refused.json()["error"]["message"]
    assert server.wait(timeout=15) == 0
    assert running.join().text.count('"text"') == 1 + running.text.count('"finish_reason":null')
    assert '"finish_reason":"length"' in running.text and running.text.rstrip().endswith("data: [DONE]")
    assert not is_alive(server.engine_pid)


def test_a_drain_ends_at_its_timeout(start: Starter) -> None:
    server = start(drain_timeout=0.1).wait_until_ready()
    running = Background(server.url, stream=True, n=8)
    assert running.first_line.wait(10)
    server.signal(signal.SIGINT)
    assert server.wait(timeout=8) == 0
    *_, event, done = [line for line in running.join().text.splitlines() if line]
    assert "it was stopped" in json.loads(event.removeprefix("data: "))["error"]["message"]
    assert done == "data: [DONE]"
    assert not is_alive(server.engine_pid)


def test_the_engine_ends_with_its_server(start: Starter) -> None:
    server = start()
    server.wait_for_line("engine: importing")
    assert is_alive(server.engine_pid)
    server.signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while is_alive(server.engine_pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(server.engine_pid)


def test_counts_of_experts_are_written_when_the_server_ends(start: Starter, tiny_model: Path, tmp_path: Path) -> None:
    model, counts = tmp_path / "model", tmp_path / "counts.json"
    shutil.copytree(tiny_model, model)
    own = find_architecture({"architectures": ["Qwen3MoeForCausalLM"]}, "").tiny()
    (model / "config.json").write_text(json.dumps(own | {"vocab_size": VOCAB_SIZE}))
    server = start(model, engine={"expert_load_file": str(counts)}).wait_until_ready()
    with server.http() as http:
        body = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
        assert http.post("/v1/completions", json=body).status_code == 200
    server.signal(signal.SIGTERM)
    assert server.wait(20) == 0
    loads = json.loads(counts.read_text())
    assert loads and {sum(load) for load in loads.values()} == {6 * own["num_experts_per_tok"]}


def test_a_signal_while_loading_stops_at_once(start: Starter) -> None:
    server = start()
    server.signal(signal.SIGTERM)
    assert server.wait(timeout=5) == 0
    assert not is_alive(server.engine_pid)


def test_a_model_that_cannot_be_loaded_is_one_line(start: Starter, tiny_model: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_model / "config.json").read_text())
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["NoSuchModel"]}))
    server = start(tmp_path)
    assert server.wait(timeout=60) == 1
    errors = [line for line in server.log if "ERROR" in line]
    assert len(errors) == 1 and "NoSuchModel" in errors[0]
    assert not [line for line in server.log if "Traceback" in line]


def test_a_port_in_use_is_refused(start: Starter, tiny_model: Path) -> None:
    from allotrope.config import EngineConfig, ServerConfig
    from allotrope.errors import ConfigError
    from allotrope.server.app import serve

    taken = start()
    port = int(taken.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"port={port}"):
        serve(EngineConfig(model=str(tiny_model)), ServerConfig(port=port))
