"""A client's connection with deadlines: a request that arrives too slowly gets a 408, and the connection closes.

Owns the deadlines for heads and bodies of requests. It must not know routes, nor the limit of connections.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from allotrope.server.errors import HttpError, error_body

# The deadline of a body grows by one second for each of these bytes, so that large bodies arrive over slow lines.
_BYTES_PER_SECOND = 64 * 1024
# After the answer, the rest of the body is read for this long. Closing at once would reset the connection, and the
# client could lose the answer.
_LINGER_SECONDS = 10.0
_CLOSE_SECONDS = 5.0

_Protocol: Any = AutoHTTPProtocol


@dataclass(frozen=True)
class Deadlines:
    """`head`: seconds for the request line and headers. `body`: seconds for the body, plus one for each 64 KiB."""

    head: float
    body: float


class Connection(_Protocol):
    """Uvicorn's protocol with deadlines. `check` must be called a few times a second."""

    def __init__(self, deadlines: Deadlines, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._deadlines = deadlines
        self._head_since: float | None = None
        self._body_since = 0.0
        self._body_bytes = 0
        self._answered_since: float | None = None
        self._closing_since: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start the deadline of the first request's head."""
        super().connection_made(transport)
        self._head_since = self.loop.time()

    def data_received(self, data: bytes) -> None:
        """Read bytes of a request, and start the deadline of its body or of the next head."""
        if self._closing_since is not None:
            return
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._head_since, self._answered_since = None, None
            self._body_since, self._body_bytes = self.loop.time(), len(data)
        elif before is not None and before.more_body:
            self._body_bytes += len(data)
        elif self._head_since is None and before is not None and before.response_complete:
            self._head_since = self.loop.time()

    @property
    def waits_since(self) -> float | None:
        """The time since which the connection waits for a request. None during a request and while it closes."""
        if self.transport.is_closing():
            return None
        if self._head_since is not None:
            return self._head_since
        cycle = self.cycle
        return self._body_since if cycle.response_complete and not cycle.more_body else None

    def check(self, now: float) -> None:
        """Close the connection if its request is past a deadline. `now`: time of the event loop, in seconds."""
        if self._closing_since is not None:
            if now - self._closing_since > _CLOSE_SECONDS:
                self.transport.abort()
        elif self._head_since is not None:
            if now - self._head_since > self._deadlines.head:
                what = "the line and headers of the request" if self.cycle is None else "the next request's headers"
                self._give_up(what, f"{self._deadlines.head:g} s", "--header-timeout", now)
        elif self.cycle.more_body:
            self._check_body(now)

    def _check_body(self, now: float) -> None:
        if self.cycle.response_started:
            self._answered_since = self._answered_since or now
            if now - self._answered_since > _LINGER_SECONDS:
                self.transport.abort()
            return
        allowed = self._deadlines.body + self._body_bytes / _BYTES_PER_SECOND
        if now - self._body_since > allowed:
            self._give_up(f"the body ({self._body_bytes} bytes so far)", f"{allowed:.0f} s", "--body-timeout", now)

    def _give_up(self, what: str, allowed: str, option: str, now: float) -> None:
        self._answer_and_close(HttpError(408, f"{what} did not arrive within {allowed} ({option})."), now)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP; uvicorn calls this."""
        self._answer_and_close(HttpError(400, msg), self.loop.time())

    def _answer_and_close(self, error: HttpError, now: float) -> None:
        """Write the answer directly to the transport: the protocol's state machine is in the middle of a request."""
        body = msgspec.json.encode(error_body(error))
        reason = {400: "Bad Request", 408: "Request Timeout"}[error.status]
        self.transport.write(
            f"HTTP/1.1 {error.status} {reason}\r\ncontent-type: application/json\r\nconnection: close\r\n"
            f"content-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        self._closing_since = now
        self.transport.close()
