"""Sends requests to the application without a network. Must not know what they ask."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from starlette.types import ASGIApp, Message


class Answered(NamedTuple):
    """A whole answer. `request_id`: the one that the server gave the request."""

    status: int
    request_id: str
    body: bytes


async def post(app: ASGIApp, path: str, body: bytes) -> Answered:
    """The answer of `app` to POST `path` with the JSON `body`. Cancellation aborts the request."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    status, headers, parts = 0, {}, []

    async def receive() -> Message:
        if pending:
            return pending.pop()
        # The client stays until it has its answer.
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], dict(message["headers"])
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": ("in-process", 0),
        "server": ("in-process", 0),
    }
    await app(scope, receive, send)
    return Answered(status, headers.get(b"x-request-id", b"").decode("latin-1"), b"".join(parts))
