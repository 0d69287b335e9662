"""Answers HEAD with the headers of GET. This module must not know routes."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class HeadAsGet:
    """Wraps the application `app`: turns HEAD into GET. Uvicorn drops the body of the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] == "http" and scope["method"] == "HEAD":
            # The scope is copied, because uvicorn reads its method again when it sends the answer.
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)
