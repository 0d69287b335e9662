"""The application: routes, the middleware around them, and handlers that write errors in the form of each API."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

import allotrope
from allotrope.errors import AllotropeError
from allotrope.server.drain_request import ReadToTheEnd
from allotrope.server.errors import HttpError, as_http, error_response
from allotrope.server.guard import Guard, path_of
from allotrope.server.head_requests import HeadAsGet
from allotrope.server.openapi import describe_api
from allotrope.server.request_log import RequestLog
from allotrope.server.routes import build_router
from allotrope.server.state import ServerState

_CLIENT_CLOSED_REQUEST = 499


def build_app(state: ServerState) -> FastAPI:
    """The ASGI application. `state`: the state that its routes share."""
    app = FastAPI(
        title="Allotrope",
        version=allotrope.__version__,
        description="Language model server with the OpenAI API.",
        root_path=state.config.root_path,
        # FastAPI's own pages load scripts from another host, so they are off.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.include_router(build_router(state))
    _wrap(app, state)
    for kind in (AllotropeError, HttpError, Exception):
        app.add_exception_handler(kind, _answer_error)
    app.add_exception_handler(HTTPException, _answer_routing_error)
    app.add_exception_handler(ClientDisconnect, _answer_disconnected)
    described: list[dict[str, Any]] = []

    def openapi() -> dict[str, Any]:
        # The first call builds the description: it is slow, and it needs the limits of the loaded model.
        if not described:
            described.append(describe_api(app, state))
        return described[0]

    app.openapi = openapi  # type: ignore[method-assign]
    return app


def _wrap(app: FastAPI, state: ServerState) -> None:
    """Add the middleware to `app`. The last one added sees a request first."""
    config = state.config
    app.add_middleware(Guard, state=state)
    app.add_middleware(HeadAsGet)
    app.add_middleware(ReadToTheEnd)
    if config.allowed_origins:
        # CORS stands outside the guard: a browser's preflight request has no key, and the browser shows an error only
        # if it has CORS headers.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=("x-request-id", "x-allotrope-ignored-fields", "retry-after"),
        )
    app.add_middleware(RequestLog, enabled=config.enable_log_requests)


async def _answer_error(request: Request, error: Exception) -> Response:
    return error_response(as_http(error), path=path_of(request.scope))


async def _answer_routing_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    facts = f"{request.method} {request.url.path[:200]}"
    match error.status_code:
        case 404:
            message = f"{facts}: there is no such route."
        case 405:
            message = f"{facts}: this method is not allowed here."
        case _:
            message = f"{facts}: {error.detail}"
    return error_response(HttpError(error.status_code, message), error.headers, path=path_of(request.scope))


async def _answer_disconnected(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)
