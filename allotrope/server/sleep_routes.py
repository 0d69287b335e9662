"""Routes that put the engine to sleep and wake it: /sleep, /wake_up and /is_sleeping."""

from __future__ import annotations

import asyncio
import logging

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from allotrope.errors import InvalidRequest
from allotrope.server.errors import HttpError
from allotrope.server.guard import IS_SLEEPING, SLEEP, WAKE_UP
from allotrope.server.state import Phase, ServerState
from allotrope.server.status_routes import json_response
from allotrope.server.values import describe_value

log = logging.getLogger("allotrope.server")

_LEVEL = "1"
_NO_PARTS = "the engine sleeps and wakes whole"


def add_sleep_routes(router: APIRouter, state: ServerState) -> None:
    """Add to `router` the routes that change whether `state` sleeps."""
    changing = asyncio.Lock()

    @router.post(SLEEP)
    async def sleep(http: HttpRequest) -> Response:
        """Let open requests end, then drop the caches and move a GPU's weights to host memory. Query: level=1."""
        _check(state)
        level = http.query_params.get("level", _LEVEL)
        if level != _LEVEL:
            raise InvalidRequest(
                f"level={describe_value(level)} is not supported: weights are kept in host memory (level 1), and never "
                "given up; stop the server instead.",
                "level",
            )
        for name in ("tags", "mode"):
            if name in http.query_params:
                raise InvalidRequest(f"{name} is not supported: {_NO_PARTS}, once open requests have ended.", name)
        async with changing:
            if state.phase is Phase.SERVING:
                await _sleep(state)
        return json_response({"is_sleeping": state.phase is Phase.SLEEPING})

    @router.post(WAKE_UP)
    async def wake_up(http: HttpRequest) -> Response:
        """End a sleep."""
        _check(state)
        if "tags" in http.query_params:
            raise InvalidRequest(f"tags is not supported: {_NO_PARTS}.", "tags")
        async with changing:
            if state.phase is Phase.SLEEPING:
                await state.ready().engine.wake()
                log.info("awake")
                _leave(state)
        return json_response({"is_sleeping": state.phase is Phase.SLEEPING})

    @router.get(IS_SLEEPING)
    async def is_sleeping() -> Response:
        """Whether the engine sleeps."""
        return json_response({"is_sleeping": state.phase is Phase.SLEEPING})


async def _sleep(state: ServerState) -> None:
    """Take no requests from here on, let the open ones end, and put the engine to sleep."""
    state.phase = Phase.SLEEPING
    seconds = state.config.drain_timeout
    asleep = False
    try:
        if not await state.idle(seconds):
            raise HttpError(
                409, f"Requests still run after {seconds:g} s (--drain-timeout), so the server stays awake. Try later."
            )
        await state.ready().engine.sleep()
        asleep = True
        log.info("asleep until POST %s", WAKE_UP)
    finally:
        if not asleep:
            _leave(state)


def _leave(state: ServerState) -> None:
    # The server may be ending by now.
    if state.phase is Phase.SLEEPING:
        state.phase = Phase.SERVING


def _check(state: ServerState) -> None:
    if not state.config.enable_sleep_mode:
        raise HttpError(403, "This server was started without --enable-sleep-mode, so it does not sleep.")
