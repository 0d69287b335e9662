"""One server for most tests of this folder, and one that is strict, keyed and small."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from scripted_chat import write_scripted_chat
from scripted_model import write_scripted_model
from server_process import API_KEY, ServerProcess
from tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny model."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def server(tiny_model: Path) -> Iterator[ServerProcess]:
    """A server with default options."""
    running = ServerProcess(tiny_model, max_body_bytes=16_000_000)
    try:
        yield running.wait_until_ready()
    finally:
        running.close()


@pytest.fixture(scope="session")
def keyed_server(tiny_model: Path) -> Iterator[ServerProcess]:
    """A server that is strict, asks for a key, exports aliases, and whose queue is short."""
    running = ServerProcess(
        tiny_model,
        {"max_num_seqs": 1, "max_num_waiting": 4},
        strict=True,
        api_key=[API_KEY],
        metrics_compat="vllm",
        max_body_bytes=100_000,
    )
    try:
        yield running.wait_until_ready()
    finally:
        running.close()


@pytest.fixture(scope="session")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    """Plain HTTP to `server`."""
    with server.http() as client:
        yield client


@pytest.fixture(scope="session")
def scripted_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose answers are known, see `scripted_model`."""
    running = ServerProcess(
        write_scripted_model(tmp_path_factory.mktemp("scripted")),
        {"load_format": "auto", "generation_config": "none"},
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
        enable_sleep_mode=True,
    )
    try:
        yield running.wait_until_ready()
    finally:
        running.close()


@pytest.fixture(scope="session")
def chat_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server for the model of `scripted_chat`, which calls tools and reasons."""
    running = ServerProcess(write_scripted_chat(tmp_path_factory.mktemp("chat")), {"load_format": "auto"})
    try:
        yield running.wait_until_ready()
    finally:
        running.close()
