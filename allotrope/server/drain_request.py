"""Lets a client read an answer that came before the end of its request.

An answer such as 413 or 401 is known before the body has arrived. If the connection closed then, the bytes that still
come would make the system reset it, and the client would often see the reset and never the answer. Plain ASGI; it must
not know routes.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class ReadToTheEnd:
    """Wraps the application `app`: an answer ends only when the request has, whose rest is read and dropped.

    The whole answer has been sent by then. The connection's own deadline bounds the wait.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what comes and goes, holding back the answer's end."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Set once the request has come whole, or its client has gone.
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
