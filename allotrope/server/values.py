"""JSON values as error messages and comparisons see them: always short, never raising."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

_LONGEST = 60
_MOST_NAMES = 16


def describe_value(value: Any) -> str:
    """`value` in a few words, fit for one line of an error message, however large or odd it is."""
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
                if len(value) <= _LONGEST
                else f"{json.dumps(value[:_LONGEST])}... ({len(value)} characters)"
            )
        case list():
            return "[]" if not value else _short(value) or f"(a list of {len(value)})"
        case dict():
            return "{}" if not value else _short(value) or f"(an object of {len(value)} fields)"
        case _:
            return f"(a {type(value).__name__})"


def _short(value: list[Any] | dict[str, Any]) -> str | None:
    """JSON of a small container of plain values, or None."""
    inner = value if isinstance(value, list) else list(value.values())
    if len(inner) > 4 or any(isinstance(item, list | dict) for item in inner):
        return None
    if isinstance(value, list):
        text = "[" + ", ".join(describe_value(item) for item in value) + "]"
    else:
        text = "{" + ", ".join(f"{describe_value(key)}: {describe_value(item)}" for key, item in value.items()) + "}"
    return text if len(text) <= 2 * _LONGEST else None


def same_value(left: Any, right: Any) -> bool:
    """Whether two JSON values are equal; unlike Python's ==, true is not 1."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same_value, left, right))
    return bool(left == right)


def header_value(names: Sequence[str]) -> str:
    """A client's own names, as a list that is safe in a header or a log line whatever they hold."""
    listed = [quote(name[:_LONGEST], safe="") or '""' for name in names[:_MOST_NAMES]]
    return ", ".join(listed) + (f", and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else "")
