"""Checks every request before its route: its key, the server's phase and its load. Counts the open requests.

Plain ASGI, so that a stream reaches the client unbuffered and the guard sees its end.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from allotrope.server.errors import HttpError, error_response

if TYPE_CHECKING:
    from allotrope.server.state import ServerState

PAGE = "/"
PROBES = ("/health", "/ping")
METRICS = "/metrics"
DOCS = "/docs"
_TOO_MANY = "Too many clients are connected (--max-connections). Try again in a moment."


def path_of(scope: Scope) -> str:
    """The path of a request without `--root-path`, the prefix under which a proxy serves it."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path.removeprefix(root) if root and path.startswith(f"{root}/") else path


class Guard:
    """Wraps the application `app`. `state` says whether the server takes requests; its config has the keys."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._keys = [key.encode() for key in state.config.api_key]
        self._metrics_keys = [key.encode() for key in state.config.metrics_api_key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with an error, or pass the request on and count it as open until its answer ends."""
        if scope["type"] != "http":
            return
        path = path_of(scope)
        error = self._refuse(path, scope)
        if error is not None:
            # A full server closes the connection of every client that it refuses.
            headers = {"connection": "close"} if self._state.is_full() else None
            await error_response(error, headers)(scope, receive, send)
        elif path in PROBES:
            await self._app(scope, receive, send)
        else:
            with self._state.open_request():
                await self._app(scope, receive, send)

    def _refuse(self, path: str, scope: Scope) -> HttpError | None:
        if path == PAGE:
            # The page asks for a key itself, and waits while the model loads.
            return HttpError(503, _TOO_MANY) if self._state.is_full() else None
        if path in PROBES:
            reason = self._state.why_unhealthy
        elif not self._may_ask(path, Headers(scope=scope).get("authorization", "")):
            return HttpError(401, "A valid key is needed: send the header 'Authorization: Bearer KEY' (--api-key).")
        elif self._state.is_full():
            reason = _TOO_MANY
        else:
            reason = self._state.why_not_ready
        return None if reason is None else HttpError(503, reason)

    def _may_ask(self, path: str, authorization: str) -> bool:
        # The page holds no data of the model, and a browser that opens it cannot send a key.
        if path == DOCS:
            return True
        keys = [*self._keys, *self._metrics_keys] if path == METRICS else self._keys
        if not keys:
            return True
        scheme, _, sent_key = authorization.partition(" ")
        # Headers are latin-1. Constant-time comparisons with all keys leak nothing about them.
        matches = [hmac.compare_digest(sent_key.strip().encode("latin-1"), key) for key in keys]
        return scheme.lower() == "bearer" and any(matches)
