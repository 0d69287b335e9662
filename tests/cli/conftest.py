"""Commands run in this process on a tiny model, and one server started by the command line."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from command_run import Run
from tiny_model import write_tiny_model
from typer.testing import CliRunner, Result

from allotrope.commands.app import build_app


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny model without weights."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def dummy(tiny: Path) -> list[str]:
    """Arguments that load the tiny model with random weights."""
    return [str(tiny), "--load-format", "dummy", "--kv-cache-memory-bytes", "32MB"]


@pytest.fixture
def run() -> Run:
    """Run a command line in this process; an error that is not an exit is raised."""

    def run_command(*args: str, typed: str | None = None) -> Result:
        result = CliRunner().invoke(build_app(), [str(arg) for arg in args], input=typed)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run_command


@pytest.fixture(scope="session")
def server_url(dummy: list[str]) -> Iterator[str]:
    """Address of `allotrope serve` on the tiny model."""
    arguments = ["serve", *dummy, "--port", "0", "--served-model-name", "tiny", "--threads", "1", "-v"]
    command = [sys.executable, "-m", "allotrope", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"listening on (http://\S+?)[;\s]", line):
                break
        else:
            pytest.fail(f"the server ended with status {process.wait()} and never listened")
        # Nobody reads on: what the server says is little, and fits the pipe.
        deadline = time.monotonic() + 60
        while httpx.get(f"{found[1]}/health").status_code != 200:
            assert time.monotonic() < deadline, "the server is not ready after 60 s"
            time.sleep(0.1)
        yield found[1]
        process.terminate()
        assert process.wait(20) == 0
