"""Checks every request before its route: its key, the server's phase and its load. Counts the open requests.

Plain ASGI, so that a stream reaches the client unbuffered and the guard sees its end.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from allotrope.server.errors import HttpError, error_response
from allotrope.server.state import Phase

if TYPE_CHECKING:
    from allotrope.server.state import ServerState

PAGE = "/"
PROBES = ("/health", "/ping")
METRICS = "/metrics"
DOCS = "/docs"
SLEEP, WAKE_UP, IS_SLEEPING = "/sleep", "/wake_up", "/is_sleeping"
# Answered while the server sleeps; none of them is a request that sleep waits for.
_WHILE_SLEEPING = (SLEEP, WAKE_UP, IS_SLEEPING, METRICS, "/version", "/server_info", "/load")
_TOO_MANY = "Too many clients are connected (--max-connections). Try again in a moment."


def path_of(scope: Scope) -> str:
    """The path of a request without `--root-path`, the prefix under which a proxy serves it."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path.removeprefix(root) if root and path.startswith(f"{root}/") else path


def sent_key(scope: Scope) -> bytes:
    """The key that a request brings, as a bearer token or in `x-api-key`; empty if it has none."""
    headers = Headers(scope=scope)
    scheme, _, token = headers.get("authorization", "").partition(" ")
    # Headers are latin-1.
    return (token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")).encode("latin-1")


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
            await error_response(error, headers, path=path)(scope, receive, send)
        elif path in (*PROBES, *_WHILE_SLEEPING):
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
        elif not self._may_ask(path, sent_key(scope)):
            return HttpError(
                401,
                "A valid key is needed: send the header 'Authorization: Bearer KEY' or 'x-api-key: KEY' (--api-key).",
            )
        elif self._state.is_full():
            reason = _TOO_MANY
        elif path in _WHILE_SLEEPING and self._state.phase is Phase.SLEEPING:
            reason = None
        else:
            reason = self._state.why_not_ready
        return None if reason is None else HttpError(503, reason)

    def _may_ask(self, path: str, key: bytes) -> bool:
        # The page holds no data of the model, and a browser that opens it cannot send a key.
        if path == DOCS:
            return True
        keys = [*self._keys, *self._metrics_keys] if path == METRICS else self._keys
        if not keys:
            return True
        # Constant-time comparisons with all keys leak nothing about them.
        matches = [hmac.compare_digest(key, known) for known in keys]
        return any(matches)
