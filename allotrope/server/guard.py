"""What every request passes before its route: the key, the server's phase, and the count of open requests.

Plain ASGI, because a stream must reach the client unbuffered and its end must be seen.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from allotrope.server.errors import HttpError, error_response

if TYPE_CHECKING:
    from allotrope.server.state import ServerState

_HEALTH = "/health"
_TOO_MANY = "Too many clients are connected (--max-connections). Try again in a moment."


class Guard:
    """Wraps the application `app`; `state` says whether requests are taken."""

    def __init__(self, app: ASGIApp, state: ServerState, api_key: str | None) -> None:
        self._app = app
        self._state = state
        self._api_key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with an error, or let the request through and count it until its answer has ended."""
        if scope["type"] != "http":
            return
        error = self._refuse(scope)
        if error is not None:
            # While clients are too many, each one that is refused leaves.
            headers = {"connection": "close"} if self._state.is_full() else None
            await error_response(error, headers)(scope, receive, send)
        elif scope["path"] == _HEALTH:
            await self._app(scope, receive, send)
        else:
            with self._state.open_request():
                await self._app(scope, receive, send)

    def _refuse(self, scope: Scope) -> HttpError | None:
        if scope["path"] == _HEALTH:
            reason = self._state.why_unhealthy
        elif not self._has_key(Headers(scope=scope).get("authorization", "")):
            return HttpError(401, "A valid key is needed: send the header 'Authorization: Bearer KEY' (--api-key).")
        elif self._state.is_full():
            reason = _TOO_MANY
        else:
            reason = self._state.why_not_ready
        return None if reason is None else HttpError(503, reason)

    def _has_key(self, authorization: str) -> bool:
        if self._api_key is None:
            return True
        scheme, _, key = authorization.partition(" ")
        # Headers are latin-1; a comparison in constant time gives nothing away about the key.
        return scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode("latin-1"), self._api_key)
