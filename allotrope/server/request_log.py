"""Gives each request an id, and logs one line at its end if --enable-log-requests is on.

Owns the log lines of requests. They hold a prompt's text only with --enable-log-prompts. Plain ASGI.
"""

from __future__ import annotations

import re
import time
import uuid
from contextvars import ContextVar
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from allotrope.logs import asked_for
from allotrope.server.errors import MESSAGES_PATH
from allotrope.server.guard import METRICS, PROBES, path_of

log = asked_for("allotrope.server.requests")

_ID = "x-request-id"
# The header that clients of the Messages API read.
_MESSAGES_ID = "request-id"
# A client's own id. It must not look like another line or field of the log.
_CLIENTS_ID = re.compile(r"[\w.:+/=@-]{1,128}", re.ASCII)
_PROMPT_CHARACTERS = 1000
_PATH_CHARACTERS = 200

_Facts = dict[str, Any]
_current: ContextVar[_Facts | None] = ContextVar("_current", default=None)


def note(**facts: Any) -> None:
    """Add `facts` to the log line of the current request."""
    current = _current.get()
    if current is not None:
        current |= facts


def note_prompt(text: str) -> None:
    """Log the beginning of a prompt of the current request. The caller checks --enable-log-prompts."""
    current = _current.get() or {}
    shown = text[:_PROMPT_CHARACTERS]
    log.info("request id=%s prompt=%r%s", current.get("id"), shown, "" if shown == text else " ...")


class RequestLog:
    """Wraps the application `app`: adds the request's id to each answer. `enabled`: log the end of requests."""

    def __init__(self, app: ASGIApp, enabled: bool) -> None:
        self._app = app
        self._enabled = enabled

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        clients_id = Headers(scope=scope).get(_ID, "")
        facts: _Facts = {"id": clients_id if _CLIENTS_ID.fullmatch(clients_id) else uuid.uuid4().hex}
        started = time.monotonic()
        status, has_ended = 0, False

        async def watched(message: Message) -> None:
            nonlocal status, has_ended
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[_ID] = facts["id"]
                if path_of(scope).startswith(MESSAGES_PATH):
                    headers[_MESSAGES_ID] = facts["id"]
            elif not message.get("more_body", False):
                has_ended = True
            await send(message)

        token = _current.set(facts)
        try:
            await self._app(scope, receive, watched)
        finally:
            _current.reset(token)
            if self._enabled and not (status == 200 and path_of(scope) in (*PROBES, METRICS)):
                _log_end(scope, facts, status if has_ended else 0, time.monotonic() - started)


def _log_end(scope: Scope, facts: _Facts, status: int, seconds: float) -> None:
    """`status`: 0 if the client disconnected before the answer ended."""
    client = scope.get("client") or ("unknown", 0)
    extra = {name: value for name, value in facts.items() if name != "id"}
    log.info(
        "request id=%s client=%s %s %s status=%s seconds=%.3f%s",
        facts["id"],
        client[0],
        scope["method"],
        # The raw path has no spaces and no query.
        scope["raw_path"].decode("ascii", "replace")[:_PATH_CHARACTERS],
        status or "aborted",
        seconds,
        "".join(f" {name}={value}" for name, value in extra.items()),
    )
