"""Runs the server as users do: a process of its own on a free port, seen only through HTTP, signals and its output."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx

MODEL_NAME = "tiny"
API_KEY = "open-sesame"
_MAIN = """
import json, resource, sys
from allotrope.config import EngineConfig, ServerConfig
from allotrope.server.app import serve
engine, server, descriptors = json.loads(sys.argv[1])
if descriptors:
    resource.setrlimit(resource.RLIMIT_NOFILE, descriptors)
server = {name: tuple(value) if isinstance(value, list) else value for name, value in server.items()}
sys.exit(serve(EngineConfig(**engine), ServerConfig(**server)))
"""


class ServerProcess:
    """A server for `model` with options by name; `log` grows while it runs.

    `descriptors`: soft and hard limit of the files that its process may open.
    """

    def __init__(
        self,
        model: Path | str,
        engine: dict[str, Any] | None = None,
        descriptors: tuple[int, int] | None = None,
        **server: Any,
    ) -> None:
        options = {"model": str(model), "load_format": "dummy", "kv_cache_memory_bytes": 32_000_000, "threads": 1}
        arguments = json.dumps(
            [options | (engine or {}), {"port": 0, "served_model_name": [MODEL_NAME]} | server, descriptors]
        )
        self.log: list[str] = []
        self._process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # The log names the address before the model is loaded.
            env=os.environ | {"OMP_NUM_THREADS": "1", "ALLOTROPE_LOGGING_LEVEL": "INFO"},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            listening = self.wait_for_line(r"listening on (http://[\d.:]+); engine process (\d+)")
        except AssertionError:
            self.close()
            raise
        self.url = listening[1]
        self.engine_pid = int(listening[2])

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_for_line(self, pattern: str, timeout: float = 150.0) -> re.Match[str]:
        """The first line of the log that matches, waiting for it."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            ended = self._process.poll() is not None and not self._reader.is_alive()
            for line in list(self.log):
                if found := re.search(pattern, line):
                    return found
            if ended:
                break
            time.sleep(0.02)
        raise AssertionError(f"no line {pattern!r} in the log:\n" + "".join(self.log))

    def wait_until_ready(self) -> ServerProcess:
        self.wait_for_line(r"serves .* at http")
        return self

    def http(self, **options: Any) -> httpx.Client:
        # Certificates take longer to load than all else that a client does here.
        return httpx.Client(base_url=self.url, timeout=60.0, verify=False, **options)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self, timeout: float) -> int:
        """The exit status."""
        status = self._process.wait(timeout)
        self._reader.join(timeout)
        return status

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.log.append(line)


def pages_in_use(http: httpx.Client) -> float:
    """Pages that sequences hold, over all cache groups, as the metrics say."""
    text = http.get("/metrics").text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if "_pages_used{" in line)


def wait_until_idle(http: httpx.Client, timeout: float = 10.0) -> None:
    """Wait until nothing runs, nothing waits and no page is in use; fail if that does not come about."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        text = http.get("/metrics").text
        busy = [
            line
            for line in text.splitlines()
            if re.match(r"allotrope_(num_requests_(running|waiting)|kv_cache_pages_used)\{", line)
            and float(line.rsplit(" ", 1)[1])
        ]
        if not busy:
            return
        time.sleep(0.05)
    raise AssertionError(f"the engine does not come to rest: {busy}")


def wait_until_running(http: httpx.Client, count: int, timeout: float = 10.0) -> None:
    """Wait until so many sequences take part in steps."""
    deadline = time.monotonic() + timeout
    while f'allotrope_num_requests_running{{model_name="{MODEL_NAME}"}} {count}.0' not in http.get("/metrics").text:
        assert time.monotonic() < deadline, f"{count} sequences never ran together"


def is_alive(pid: int) -> bool:
    """Whether a process runs (one that has ended but was not reaped does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"
