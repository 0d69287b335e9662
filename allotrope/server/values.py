"""Describes and compares JSON values for error messages. Descriptions are short, and no value makes them raise."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

_MAX_CHARACTERS = 60
_MAX_NAMES = 16


def describe_value(value: Any) -> str:
    """A short description of `value`, for one line of an error message."""
    match value:
        case bool() | None:
            return json.dumps(value)
        case int() if value.bit_length() > 128:
            return f"(an integer of {value.bit_length()} bits)"
        case int() | float():
            return str(value)
        case str():
            return (
                json.dumps(value)
                if len(value) <= _MAX_CHARACTERS
                else f"{json.dumps(value[:_MAX_CHARACTERS])}... ({len(value)} characters)"
            )
        case list():
            return "[]" if not value else _short(value) or f"(a list of {len(value)})"
        case dict():
            return "{}" if not value else _short(value) or f"(an object of {len(value)} fields)"
        case _:
            return f"(a {type(value).__name__})"


def _short(value: list[Any] | dict[str, Any]) -> str | None:
    """JSON of a small container of plain values. None for larger and nested ones."""
    inner = value if isinstance(value, list) else list(value.values())
    if len(inner) > 4 or any(isinstance(item, list | dict) for item in inner):
        return None
    if isinstance(value, list):
        text = "[" + ", ".join(describe_value(item) for item in value) + "]"
    else:
        text = "{" + ", ".join(f"{describe_value(key)}: {describe_value(item)}" for key, item in value.items()) + "}"
    return text if len(text) <= 2 * _MAX_CHARACTERS else None


def same_value(left: Any, right: Any) -> bool:
    """Whether two JSON values are equal. Unlike Python's ==, true differs from 1."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same_value, left, right))
    return bool(left == right)


def header_value(names: Sequence[str]) -> str:
    """A client's own names as a quoted list that is safe in a header or a log line."""
    listed = [quote(name[:_MAX_CHARACTERS], safe="") or '""' for name in names[:_MAX_NAMES]]
    return ", ".join(listed) + (f", and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else "")
