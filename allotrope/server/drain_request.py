"""Reads a request's body to its end, so that the client can read an early answer.

The server knows an answer such as 413 or 401 before the body has arrived. If it closed the connection then, the
arriving bytes would make the system reset it, and the client would often see the reset and lose the answer. Plain
ASGI; this module must not know routes.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class ReadToTheEnd:
    """Wraps the application `app`: reads and drops the rest of the request before it ends the answer.

    The client has the whole answer by then. The connection's own deadline bounds the wait.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass messages on, and hold the answer's end back until the request has ended."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Set once the whole request has arrived or its client has disconnected.
        ended = asyncio.Event()

        async def watched() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect" or not message.get("more_body", False):
                ended.set()
            return message

        async def ending(message: Message) -> None:
            is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if not is_last or ended.is_set():
                await send(message)
                return
            await send({**message, "more_body": True})
            while not ended.is_set():
                await watched()
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        await self._app(scope, watched, ending)
