"""Reads the bytes of a request into a checked model. Every fault of a body becomes a 400 or 413 here."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from allotrope.errors import InvalidRequest
from allotrope.server.errors import HttpError
from allotrope.server.fields import Fields, unknown_fields
from allotrope.server.inner import unknown_within
from allotrope.server.values import describe_value

M = TypeVar("M", bound=BaseModel)

_INLINE_BYTES = 64 * 1024
_LISTED_ERRORS = 3
# Of a conversation. Their validation and translation hold up every other request.
_MOST_ITEMS = 65536
# A float represents every integer below this bound exactly.
_LARGEST_EXACT = 2**53


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises `HttpError` 413 as soon as it exceeds `max_bytes`."""
    too_large = HttpError(413, f"The request body is larger than {max_bytes} bytes (--max-body-bytes).")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise too_large
    data = bytearray()
    async for delta in request.stream():
        data += delta
        if len(data) > max_bytes:
            raise too_large
    return bytes(data)


async def parse(data: bytes, model: type[M], fields: Fields, *, strict: bool) -> tuple[M, list[str]]:
    """The body `data` as `model`, and the fields that were ignored.

    `fields`: the rule of each field. `strict`: refuse unknown fields. Raises `InvalidRequest`.
    """
    if len(data) <= _INLINE_BYTES:
        return _parse(data, model, fields, strict)
    return await asyncio.to_thread(_parse, data, model, fields, strict)


def _parse(data: bytes, model: type[M], fields: Fields, strict: bool) -> tuple[M, list[str]]:
    body = _decode(data)
    unknown = unknown_fields(body, fields)
    _check_unknown(unknown, strict)
    _check_items(body)
    try:
        parsed = model.model_validate(body)
    except ValidationError as error:
        raise _as_invalid_request(error, body) from None
    within = list(unknown_within(parsed))
    _check_unknown(within, strict)
    return parsed, unknown + within


def _check_unknown(names: list[str], strict: bool) -> None:
    if names and strict:
        listed = ", ".join(describe_value(name) for name in names[:8])
        raise InvalidRequest(f"unknown fields: {listed}. Leave them out, or run the server without --strict.", names[0])


def _check_items(body: Mapping[str, Any]) -> None:
    """Raise `InvalidRequest` for a conversation of more messages and parts than are read."""
    for name in ("messages", "input"):
        items = body.get(name)
        if not isinstance(items, list):
            continue
        count = len(items)
        if count <= _MOST_ITEMS:
            contents = (item.get("content") for item in items if isinstance(item, dict))
            count += sum(len(content) for content in contents if isinstance(content, list))
        if count > _MOST_ITEMS:
            raise InvalidRequest(f"{name} has {count} messages and parts; at most {_MOST_ITEMS} are allowed.", name)


def _decode(data: bytes) -> dict[str, Any]:
    try:
        body = _decoder.decode(data)
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply to be read.") from None
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not valid UTF-8: {error.reason} at byte {error.start}.") from None
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}.") from None
    if not isinstance(body, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {describe_value(body)}.")
    return body


def _read_float(text: str) -> float:
    """Read 3.0 as the integer 3: JSON has one number type, and some clients write integers so."""
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:40]} is out of range")
    return int(value) if abs(value) < _LARGEST_EXACT and value.is_integer() else value


_decoder = msgspec.json.Decoder(float_hook=_read_float)


def _as_invalid_request(error: ValidationError, body: dict[str, Any]) -> InvalidRequest:
    """One message for the first few faults. The error's `param` is the field of the first one."""
    faults: dict[str, str] = {}
    for detail in error.errors(include_url=False, include_context=False):
        path, value = _locate(detail, body)
        faults.setdefault(path, _sentence(path, value, detail))
    # A union reports every branch. A fault deep inside one branch makes the mismatch of the others redundant.
    for path in [short for short in faults if any(path.startswith((f"{short}.", f"{short}[")) for path in faults)]:
        del faults[path]
    listed = list(faults.values())[:_LISTED_ERRORS]
    more = len(faults) - len(listed)
    return InvalidRequest(" ".join(listed) + (f" And {more} more." if more else ""), next(iter(faults)))


def _locate(detail: ErrorDetails, body: dict[str, Any]) -> tuple[str, Any]:
    """The path of a fault in the client's body (`messages[0].content`), and the value at it."""
    path = ""
    value: Any = body
    missing = len(detail["loc"]) - 1 if detail["type"] == "missing" else None
    for index, part in enumerate(detail["loc"]):
        if isinstance(part, int) and isinstance(value, list) and part < len(value):
            path, value = f"{path}[{part}]", value[part]
        elif isinstance(part, str) and isinstance(value, dict) and (part in value or index == missing):
            path, value = f"{path}.{part}" if path else part, value.get(part)
        # Other parts of `loc` name a branch of a union and are skipped.
    return path, value


def _sentence(path: str, value: Any, detail: ErrorDetails) -> str:
    if detail["type"] == "missing":
        return f"{path} is missing."
    reason = detail["msg"].removeprefix("Value error, ")
    return f"{path}={describe_value(value)} is not valid: {reason[:1].lower()}{reason[1:]}."
