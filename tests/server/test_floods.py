"""More clients than there is room for, clients that never finish a request, and errors without end."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from server_process import ServerProcess

from allotrope.server.log_limiter import RepeatFilter

HALF = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-"
SLOW_BODY = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{"


def connect(server: ServerProcess, sent: bytes = b"") -> socket.socket:
    """A connection to `server` on which `sent` was sent."""
    url = httpx.URL(server.url)
    client = socket.create_connection((url.host, url.port), timeout=30)
    client.sendall(sent)
    return client


def read_all(client: socket.socket) -> bytes:
    """What the server sends until it closes."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while delta := client.recv(65536):
            data += delta
    return data


def read_status(client: socket.socket) -> int:
    """The status of the next answer, which is read to its end."""
    response = http.client.HTTPResponse(client)
    response.begin()
    response.read()
    return response.status


@pytest.fixture(scope="module")
def hasty(tiny_model: Path) -> Iterator[ServerProcess]:
    """A server that waits for requests for a second only."""
    running = ServerProcess(tiny_model, header_timeout=1.0, body_timeout=1.0)
    try:
        yield running.wait_until_ready()
    finally:
        running.close()


@pytest.fixture(scope="module")
def narrow(tiny_model: Path) -> Iterator[ServerProcess]:
    """A server whose process may open 256 files and no more."""
    running = ServerProcess(tiny_model, descriptors=(200, 256))
    try:
        yield running.wait_until_ready()
    finally:
        running.close()


def test_half_sent_requests_beyond_the_descriptors(narrow: ServerProcess) -> None:
    """Four hundred of them, with room for less than two hundred: /health answers and the log stays short."""
    with contextlib.ExitStack() as stack:
        for _ in range(400):
            stack.enter_context(connect(narrow, HALF))
        deadline = time.monotonic() + 12
        asked = 0
        while time.monotonic() < deadline and asked < 8:
            assert httpx.get(f"{narrow.url}/health", timeout=30).status_code == 200
            asked += 1
        assert asked == 8
        body = {"prompt": [5], "max_tokens": 2}
        assert httpx.post(f"{narrow.url}/v1/completions", json=body, timeout=30).status_code == 200
    errors = [line for line in narrow.log if "ERROR" in line]
    assert errors and len(errors) < 60
    assert "--max-connections" in errors[0] and "had sent no complete request" in errors[0]


def test_the_soft_limit_is_raised_to_the_hard_one(narrow: ServerProcess) -> None:
    limits = Path(f"/proc/{narrow.pid}/limits").read_text()
    line = next(line for line in limits.splitlines() if line.startswith("Max open files"))
    assert line.split()[3:5] == ["256", "256"]


@pytest.mark.parametrize(
    ("sent", "named"), [(HALF, "--header-timeout"), (b"G", "--header-timeout"), (SLOW_BODY, "--body-timeout")]
)
def test_a_request_that_does_not_arrive(hasty: ServerProcess, sent: bytes, named: str) -> None:
    with connect(hasty, sent) as client:
        started = time.monotonic()
        head, _, body = read_all(client).partition(b"\r\n\r\n")
        assert 0.9 < time.monotonic() - started < 20
    assert head.startswith(b"HTTP/1.1 408 ") and b"connection: close" in head
    error = json.loads(body)["error"]
    assert error["code"] == "request_timeout" and named in error["message"]


def test_a_request_that_trickles(hasty: ServerProcess) -> None:
    """A byte now and then does not renew what a head or a body may take."""
    for sent in (HALF, SLOW_BODY):
        with connect(hasty, sent) as client:
            started = time.monotonic()
            with contextlib.suppress(ConnectionError):
                while time.monotonic() - started < 20:
                    client.sendall(b" ")
                    client.settimeout(0.2)
                    with contextlib.suppress(TimeoutError):
                        if client.recv(100).startswith(b"HTTP/1.1 408 "):
                            break
            assert time.monotonic() - started < 20


def test_the_next_request_of_a_connection_has_a_deadline_too(hasty: ServerProcess) -> None:
    with connect(hasty, b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n") as client:
        assert read_status(client) == 200
        # Idle for longer than a head may take is no fault.
        time.sleep(1.6)
        client.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
        assert read_status(client) == 200
        client.sendall(b"GET /vers")
        assert read_status(client) == 408


def test_slow_answers_are_no_fault_of_the_client(hasty: ServerProcess) -> None:
    body = {"prompt": [5], "max_tokens": 500, "n": 16, "ignore_eos": True}
    answer = httpx.post(f"{hasty.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 16 * 500


def test_bytes_that_are_not_http(hasty: ServerProcess) -> None:
    with connect(hasty, b"\x16\x03\x01 nonsense\r\n\r\n") as client:
        head, _, body = read_all(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_more_requests_than_connections(tiny_model: Path) -> None:
    """Where all that are served are busy, the next client is told so, and /health answers."""
    server = ServerProcess(tiny_model, max_connections=2)
    try:
        server.wait_until_ready()
        request = json.dumps({"prompt": [5], "max_tokens": 500, "ignore_eos": True, "stream": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(request)
        with connect(server, head + request) as one, connect(server, head + request) as other:
            assert one.recv(1000).startswith(b"HTTP/1.1 200 ") and other.recv(1000).startswith(b"HTTP/1.1 200 ")
            assert httpx.get(f"{server.url}/health").status_code == 200
            refused = httpx.get(f"{server.url}/v1/models")
            assert refused.status_code == 503 and "--max-connections" in refused.json()["error"]["message"]
            assert (refused.headers["connection"], refused.headers["retry-after"]) == ("close", "1")
        deadline = time.monotonic() + 20
        while httpx.get(f"{server.url}/v1/models").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        server.close()


def test_a_kind_of_error_is_one_line_a_second() -> None:
    lines: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Collector()
    handler.addFilter(RepeatFilter(handler, seconds=0.3))
    logger = logging.Logger("allotrope.flooded")
    logger.addHandler(handler)
    for number in range(1000):
        logger.error("it broke for the %d. time", number)
        logger.info("and went on")
    logger.error("something else")
    deadline = time.monotonic() + 10
    while not any("more of this kind" in line for line in lines) and time.monotonic() < deadline:
        time.sleep(0.02)
    errors = [line for line in lines if line != "and went on"]
    assert len(lines) - len(errors) == 1000
    assert errors[0] == "it broke for the 0. time" and "something else" in errors
    told = [line for line in errors if "more of this kind" in line]
    assert sum(int(line.rpartition("(")[2].split()[0]) for line in told) + len(errors) - len(told) - 2 == 999
    assert len(told) < 20
