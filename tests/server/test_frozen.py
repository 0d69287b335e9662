"""An engine that stands still, answers that take long, and bodies that are larger than is read."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from server_process import ServerProcess, wait_until_idle, wait_until_running
from tiny_model import MAX_MODEL_LEN

LONG = {"prompt": [5], "max_tokens": 400, "ignore_eos": True, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}
LIMIT = 100_000


@pytest.fixture(scope="module")
def watched(tiny_model: Path) -> Iterator[ServerProcess]:
    """A server that finds its engine silent after a second, and whose streams say something four times a second."""
    running = ServerProcess(
        tiny_model,
        health_timeout=1.0,
        sse_keep_alive_interval=0.25,
        default_max_tokens=7,
        max_body_bytes=LIMIT,
        api_key=["key"],
    )
    try:
        yield running.wait_until_ready()
    finally:
        running.close()


@pytest.fixture
def keyed(watched: ServerProcess) -> Iterator[httpx.Client]:
    with watched.http(headers={"authorization": "Bearer key"}) as client:
        yield client


@contextlib.contextmanager
def frozen(server: ServerProcess) -> Iterator[None]:
    """The engine of `server` stands still for the length of the block."""
    os.kill(server.engine_pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.engine_pid, signal.SIGCONT)


def wait_for_health(client: httpx.Client, status: int) -> httpx.Response:
    """Poll /health until it answers `status`."""
    deadline = time.monotonic() + 30
    while (answer := client.get("/health")).status_code != status:
        assert time.monotonic() < deadline, f"/health stays {answer.status_code}"
        time.sleep(0.05)
    return answer


def test_a_server_that_was_held_up_sends_fewer_longer_parts(watched: ServerProcess, keyed: httpx.Client) -> None:
    wait_until_idle(keyed)
    asked = LONG | {"stream": True, "stream_options": {"include_usage": True}}
    whole = keyed.post("/v1/completions", json=LONG).json()
    with keyed.stream("POST", "/v1/completions", json=asked, timeout=60) as response:
        lines = response.iter_lines()
        texts = [json.loads(next(lines).removeprefix("data: "))["choices"][0]["text"]]
        watched.signal(signal.SIGSTOP)
        time.sleep(1)
        watched.signal(signal.SIGCONT)
        *events, usage, _ = [json.loads(line[6:]) for line in lines if line.startswith("data: {")] + [None]
    texts += [event["choices"][0]["text"] for event in events]
    assert "".join(texts) == whole["choices"][0]["text"]
    assert usage["usage"] == whole["usage"] and whole["usage"]["completion_tokens"] == LONG["max_tokens"]
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert len(events) <= LONG["max_tokens"] - 20
    assert max(map(len, texts)) > 5 * min(len(text) for text in texts if text)


def test_a_frozen_engine_is_not_healthy(watched: ServerProcess, keyed: httpx.Client) -> None:
    wait_until_idle(keyed)
    with frozen(watched):
        time.sleep(1.5)
        # Nobody has asked it for anything.
        assert keyed.get("/health").status_code == 200
        url = httpx.URL(watched.url)
        with socket.create_connection((url.host, url.port)) as waiting:
            waiting.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer key\r\ncontent-length: 15\r\n\r\n"
                b'{"prompt": [5]}'
            )
            started = time.monotonic()
            error = wait_for_health(keyed, 503).json()["error"]
            assert time.monotonic() - started > 0.5
            assert "ended no step for" in error["message"] and "--health-timeout 1" in error["message"]
        # That its client has gone does not mend it.
        time.sleep(0.3)
        assert keyed.get("/health").status_code == 503
    wait_for_health(keyed, 200)
    assert keyed.post("/v1/completions", json=LONG | {"max_tokens": 2}).status_code == 200


def test_a_client_that_does_not_read_leaves_the_engine_healthy(watched: ServerProcess, keyed: httpx.Client) -> None:
    body = json.dumps(LONG | {"stream": True, "n": 8, "logprobs": 20}).encode()
    url = httpx.URL(watched.url)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((url.host, url.port))
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer key\r\ncontent-length: %d\r\n\r\n"
            % len(body)
            + body
        )
        wait_until_running(keyed, 8)
        wait_until_idle(keyed, timeout=60)
        time.sleep(1.5)
        assert keyed.get("/health").status_code == 200


def test_an_idle_stream_sends_comments(watched: ServerProcess, keyed: httpx.Client) -> None:
    wait_until_idle(keyed)
    # A timeout that the comments alone keep from passing.
    with frozen(watched), keyed.stream("POST", "/v1/completions", json=LONG | {"stream": True}, timeout=10) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        assert [next(lines) for _ in range(6)] == [": keep-alive", ""] * 3
        os.kill(watched.engine_pid, signal.SIGCONT)
        rest = [line for line in lines if line and line != ": keep-alive"]
    assert len(rest) > 2 and all(line.startswith("data: ") for line in rest)
    assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]


def test_a_stream_that_is_refused_at_once_has_its_status(keyed: httpx.Client) -> None:
    answer = keyed.post("/v1/completions", json=LONG | {"stream": True, "n": 128, "prompt": [[5]] * 20})
    assert answer.status_code == 400


def test_a_chat_without_a_limit_has_the_servers(keyed: httpx.Client) -> None:
    choice, usage = (keyed.post("/v1/chat/completions", json=CHAT).json()[key] for key in ("choices", "usage"))
    assert (usage["completion_tokens"], choice[0]["finish_reason"]) == (7, "length")
    longer = keyed.post("/v1/chat/completions", json=CHAT | {"max_tokens": 9}).json()
    assert longer["usage"]["completion_tokens"] == 9
    least = keyed.post("/v1/chat/completions", json=CHAT | {"min_tokens": 11}).json()
    assert least["usage"]["completion_tokens"] == 11
    # Where the context has less room than that, it decides alone.
    message = {"role": "user", "content": "the cat " * 250}
    full = keyed.post("/v1/chat/completions", json=CHAT | {"messages": [message], "truncate_prompt_tokens": 509}).json()
    assert full["usage"]["total_tokens"] == MAX_MODEL_LEN


@pytest.mark.parametrize("kind", ["declared", "chunked"])
@pytest.mark.parametrize(("key", "status"), [("key", 413), ("wrong", 401)])
def test_a_client_can_read_an_early_answer(watched: ServerProcess, kind: str, key: str, status: int) -> None:
    """By a client that sends everything before it reads, on a connection that it wants closed."""
    url = httpx.URL(watched.url)
    for _ in range(3):
        connection = http.client.HTTPConnection(url.host, url.port, timeout=30)
        headers = {"connection": "close", "authorization": f"Bearer {key}"}
        deltas = [b" " * 1_000_000] * 20
        body = b"".join(deltas) if kind == "declared" else iter(deltas)
        connection.request("POST", "/v1/completions", body, headers)
        answer = connection.getresponse()
        assert answer.status == status
        assert b'"message"' in answer.read()
        connection.close()


def test_a_body_without_end_is_read_for_a_while_only(watched: ServerProcess) -> None:
    url = httpx.URL(watched.url)
    with socket.create_connection((url.host, url.port), timeout=30) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000000\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 401 ")
        started = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - started < 30:
                client.sendall(b" " * 1000)
                time.sleep(0.05)
        assert 5 < time.monotonic() - started < 30
