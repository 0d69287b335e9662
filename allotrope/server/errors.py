"""Writes errors as HTTP answers in the form of the route's API: OpenAI's, or that of the Messages API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from allotrope.errors import AllotropeError, EngineDead, InvalidRequest, Overloaded

_TYPES = {
    400: ("invalid_request_error", None),
    401: ("authentication_error", "invalid_api_key"),
    404: ("not_found_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    408: ("invalid_request_error", "request_timeout"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "queue_full"),
    500: ("server_error", "internal_error"),
    503: ("server_error", "service_unavailable"),
}
# The Messages API has names of its own.
_MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
MESSAGES_PATH = "/v1/messages"
# Field at fault -> the code by which clients know that they have to do without it.
_DETAILS: dict[str | None, str] = {"thread": "thread_unsupported_request"}
_RETRY_SECONDS = "1"


class HttpError(Exception):
    """An error of the HTTP layer, such as a missing key or a server that is loading. It is answered with `status`."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


def as_http(error: Exception) -> HttpError:
    """The HTTP error for an exception. An unknown exception is an internal error (500)."""
    match error:
        case HttpError():
            return error
        case InvalidRequest():
            return HttpError(400, str(error), error.param)
        case Overloaded():
            return HttpError(429, str(error))
        case EngineDead():
            return HttpError(500, f"The engine has ended: {error}.", code="engine_dead")
        case AllotropeError():
            return HttpError(500, f"The request failed: {error}.")
        case _:
            return HttpError(500, f"Internal error: {type(error).__name__}.")


def error_body(error: HttpError) -> dict[str, Any]:
    """`error` as OpenAI's JSON object."""
    kind, code = _TYPES.get(error.status, ("server_error" if error.status >= 500 else "invalid_request_error", None))
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code or code}}


def messages_error_body(error: HttpError) -> dict[str, Any]:
    """`error` as the JSON object of the Messages API."""
    kind = _MESSAGES_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    details = {} if error.param not in _DETAILS else {"details": {"error_code": _DETAILS[error.param]}}
    return {"type": "error", "error": {"type": kind, "message": str(error), **details}}


def error_response(error: HttpError, headers: Mapping[str, str] | None = None, *, path: str = "") -> Response:
    """`error` as an HTTP answer. `path`: of the request; its API decides the form."""
    extra = dict(headers or {})
    if error.status == 401:
        extra["www-authenticate"] = "Bearer"
    if error.status in (429, 503):
        extra["retry-after"] = _RETRY_SECONDS
    if error.status == 413:
        # The connection closes, so that the client stops sending the body.
        extra["connection"] = "close"
    write = messages_error_body if path.startswith(MESSAGES_PATH) else error_body
    body = msgspec.json.encode(write(error))
    return Response(body, status_code=error.status, headers=extra, media_type="application/json")
