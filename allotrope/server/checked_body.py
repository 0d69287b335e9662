"""Reads the body of a request whole: its bytes, its fields by their rules, and the model that it names."""

from __future__ import annotations

import logging
from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import Request

from allotrope.server.body import parse, read_body
from allotrope.server.errors import HttpError
from allotrope.server.fields import Fields
from allotrope.server.state import ServerState
from allotrope.server.values import header_value

M = TypeVar("M", bound=BaseModel)
log = logging.getLogger("allotrope.server")


async def read_checked(http: Request, state: ServerState, model: type[M], known: Fields) -> tuple[M, dict[str, str]]:
    """The checked body, and a response header with the names of ignored fields.

    `model`: pydantic model of the body. `known`: rules of the body's fields.
    """
    data = await read_body(http, state.config.max_body_bytes)
    body, ignored = await parse(data, model, known, strict=state.config.strict)
    check_model(state, getattr(body, "model", None))
    if not ignored:
        return body, {}
    names = header_value(ignored)
    log.warning("%s: ignored unknown fields: %s", http.url.path, names)
    return body, {"x-allotrope-ignored-fields": names}


def check_model(state: ServerState, name: str | None) -> None:
    """Raise `HttpError` 404 for a model that the server does not have."""
    if name is not None and name not in state.model_names:
        raise HttpError(
            404,
            f"The model {name[:200]!r} does not exist; this server has {', '.join(map(repr, state.model_names))}.",
            "model",
            "model_not_found",
        )
