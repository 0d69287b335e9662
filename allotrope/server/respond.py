"""Sends an answer, whole or as a stream of events, and drops the work as soon as the client has gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from allotrope.errors import AllotropeError
from allotrope.server.answers import Answer
from allotrope.server.errors import as_http, error_body, error_response
from allotrope.server.generation import Piece

log = logging.getLogger("allotrope.server")

_encode = msgspec.json.Encoder().encode
_DONE = b"data: [DONE]\n\n"


class Generated(Response):
    """The answer that `pieces` make, in the form of `answer`.

    No byte is sent before the first piece has come, so that a request that fails until then gets a plain HTTP error.
    """

    def __init__(
        self, answer: Answer, pieces: AsyncGenerator[Piece, None], *, stream: bool, headers: Mapping[str, str]
    ) -> None:
        super().__init__()
        self._answer = answer
        self._pieces = pieces
        self._stream = stream
        self._extra_headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it; being cancelled, or the client's going away, aborts the generation."""
        work = asyncio.create_task(self._send(scope, receive, send))
        gone = asyncio.create_task(_client_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            left_early = not work.done()
            work.cancel()
            gone.cancel()
            outcomes = await asyncio.gather(work, gone, return_exceptions=True)
        if isinstance(outcomes[0], Exception) and not left_early:
            raise outcomes[0]

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._pieces):
            try:
                first = await anext(self._pieces)
                if not self._stream:
                    pieces = [first] + [piece async for piece in self._pieces]
            except AllotropeError as error:
                await error_response(as_http(error), self._extra_headers)(scope, receive, send)
                return
            if self._stream:
                await self._send_events(first, send)
            else:
                body = _encode(self._answer.whole(pieces))
                await Response(body, headers=dict(self._extra_headers), media_type="application/json")(
                    scope, receive, send
                )

    async def _send_events(self, first: Piece, send: Send) -> None:
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            **self._extra_headers,
        }
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        await _send_body(send, self._answer.opening() + self._answer.chunks(first))
        try:
            async for piece in self._pieces:
                await _send_body(send, self._answer.chunks(piece))
            await _send_body(send, self._answer.closing())
        except AllotropeError as error:
            await _send_body(send, [error_body(as_http(error))])
        except Exception as error:
            # The status line is out, so the client can hear of this only here; the traceback goes to the log.
            log.exception("a stream broke off")
            await _send_body(send, [error_body(as_http(error))])
        await send({"type": "http.response.body", "body": _DONE, "more_body": False})


async def _send_body(send: Send, events: list[dict[str, Any]]) -> None:
    body = b"".join(b"data: " + _encode(event) + b"\n\n" for event in events)
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
