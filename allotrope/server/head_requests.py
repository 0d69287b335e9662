"""HEAD requests: the headers of what GET would answer. It must not know routes."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class HeadAsGet:
    """Wraps the application `app`, which sees GET where the client asked HEAD; the server beneath drops the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] == "http" and scope["method"] == "HEAD":
            # A copy: the server reads the method of its own when it sends the answer.
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)
