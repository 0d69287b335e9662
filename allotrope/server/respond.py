"""Sends an answer, whole or as a stream of events, and aborts the generation when the client disconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Generic, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from allotrope.errors import AllotropeError
from allotrope.server.answers import Answer
from allotrope.server.errors import as_http, error_response
from allotrope.server.guard import path_of
from allotrope.server.request_log import note

log = logging.getLogger("allotrope.server")

_encode = msgspec.json.Encoder().encode
_DONE = b"data: [DONE]\n\n"
_COMMENT = b": keep-alive\n\n"


D = TypeVar("D")


class GenerationResponse(Response, Generic[D]):
    """Sends `deltas` in the JSON form of `answer`.

    The response sends its first byte with the first delta, so that a request that fails before it gets a plain HTTP
    error. Clients and proxies close idle connections, so a stream sends a comment after every `keep_alive_seconds`
    without an event (0: never), and begins with one if the first delta takes that long.
    """

    def __init__(
        self,
        answer: Answer[D],
        deltas: AsyncGenerator[D, None],
        *,
        stream: bool,
        headers: Mapping[str, str],
        keep_alive_seconds: float = 0.0,
    ) -> None:
        super().__init__()
        self._answer = answer
        self._deltas = deltas
        self._stream = stream
        self._extra_headers = headers
        self._keep_alive_seconds = keep_alive_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer. Cancellation and a disconnect of the client abort the generation."""
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
        async with aclosing(self._deltas):
            try:
                await self._send_deltas(scope, receive, send)
            finally:
                usage = self._answer.usage()
                note(prompt_tokens=usage["prompt_tokens"], completion_tokens=usage["completion_tokens"])

    async def _send_deltas(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._stream:
            await self._send_stream(scope, receive, send)
            return
        try:
            deltas = [delta async for delta in self._deltas]
        except AllotropeError as error:
            await self._refuse(error, scope, receive, send)
            return
        body = _encode(self._answer.whole(deltas))
        await Response(body, headers=dict(self._extra_headers), media_type="application/json")(scope, receive, send)

    async def _refuse(self, error: AllotropeError, scope: Scope, receive: Receive, send: Send) -> None:
        response = error_response(as_http(error), self._extra_headers, path=path_of(scope))
        await response(scope, receive, send)

    async def _send_stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = _EventStream(send, self._extra_headers, named=self._answer.named_events)
        beats = asyncio.create_task(events.keep_alive(self._keep_alive_seconds))
        opening = self._answer.opening
        try:
            async for delta in self._deltas:
                # The opening reports prompt tokens and logprobs, which are known with the first delta.
                await events.send([*opening(), *self._answer.chunks(delta)])
                opening = list
            await events.send(self._answer.closing())
        except AllotropeError as error:
            if not events.has_begun:
                await self._refuse(error, scope, receive, send)
                return
            await events.send(self._answer.failure(as_http(error)))
        except Exception as error:
            if not events.has_begun:
                raise
            # The status line is sent already, so an event carries the error. The log gets the traceback.
            log.exception("a stream broke off")
            await events.send(self._answer.failure(as_http(error)))
        finally:
            beats.cancel()
        await events.end()


class _EventStream:
    """Sends server-sent events to one client. The first event sends the head of the response too.

    `named`: each event has its `type` as its name, and none marks the end of the stream.
    """

    def __init__(self, send: Send, headers: Mapping[str, str], *, named: bool) -> None:
        self._send = send
        self._named = named
        self._headers = headers
        self._sent_at = asyncio.get_running_loop().time()
        # The lock keeps a comment from being sent between the head and the first event.
        self._sending = asyncio.Lock()
        self.has_begun = False

    async def send(self, events: list[dict[str, Any]]) -> None:
        """Send `events` at once."""
        body = b"".join(self._head_of(event) + _encode(event) + b"\n\n" for event in events)
        if body:
            await self._write(body)

    async def end(self) -> None:
        """Send the last event and end the response."""
        await self._write(b"" if self._named else _DONE, more=False)

    def _head_of(self, event: dict[str, Any]) -> bytes:
        return b"event: " + str(event["type"]).encode() + b"\ndata: " if self._named else b"data: "

    async def keep_alive(self, seconds: float) -> None:
        """Send a comment after every `seconds` without an event, until cancelled. 0 sends none and returns at once."""
        while seconds:
            left = self._sent_at + seconds - asyncio.get_running_loop().time()
            if left <= 0:
                await self._write(_COMMENT)
            await asyncio.sleep(max(left, 0.0) or seconds)

    async def _write(self, body: bytes, *, more: bool = True) -> None:
        async with self._sending:
            if not self.has_begun:
                self.has_begun = True
                await self._send(self._head())
            self._sent_at = asyncio.get_running_loop().time()
            await self._send({"type": "http.response.body", "body": body, "more_body": more})

    def _head(self) -> Message:
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            **self._headers,
        }
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        return {"type": "http.response.start", "status": 200, "headers": raw}


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
