"""What is refused of a grammar's source before anything compiles it: depth, size, and what is no JSON."""

from __future__ import annotations

import json
from typing import Any

from allotrope.errors import InvalidRequest
from allotrope.request import Grammar

# Compiling and walking a schema recurses, and the deepest schemas in use have about 30 levels.
MAX_DEPTH = 64
MAX_REGEX_LENGTH = 1 << 15
MAX_LARK_LENGTH = 1 << 16
MAX_CHOICES = 4096
_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


def refuse(grammar: Grammar, reason: str) -> InvalidRequest:
    """The refusal of a grammar, in one sentence."""
    return InvalidRequest(f"{grammar.param} ({grammar.kind}) is not supported: {reason}.", grammar.param)


def check_limits(grammar: Grammar) -> None:
    """Raise `InvalidRequest` if the source of `grammar` is deeper or longer than what may be compiled."""
    match grammar.kind:
        case "json_schema" | "structural_tag":
            _check_json(grammar)
        case "choice":
            choices = read_json(grammar)
            if not isinstance(choices, list) or not choices or not all(isinstance(one, str) for one in choices):
                raise refuse(grammar, "a choice is a list of at least one text")
            if len(choices) > MAX_CHOICES:
                raise refuse(grammar, f"it has {len(choices)} choices; at most {MAX_CHOICES} are allowed")
        case "regex":
            _check_text(grammar, MAX_REGEX_LENGTH)
        case "lark":
            _check_text(grammar, MAX_LARK_LENGTH)
        case "json_object":
            pass


def read_json(grammar: Grammar) -> Any:
    """The source of `grammar` as JSON. Raises `InvalidRequest`."""
    try:
        return json.loads(grammar.source)
    except RecursionError as error:
        raise refuse(grammar, f"it is nested deeper than {MAX_DEPTH} levels") from error
    except ValueError as error:
        raise refuse(grammar, f"it is no JSON: {error}") from error


def _check_json(grammar: Grammar) -> None:
    value = read_json(grammar)
    if not isinstance(value, dict | bool) or (grammar.kind == "structural_tag" and not isinstance(value, dict)):
        raise refuse(grammar, "a JSON object is needed")
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inner(outer)]
        if not level:
            return
    raise refuse(grammar, f"it is nested deeper than {MAX_DEPTH} levels")


def _inner(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [inner for inner in value.values() if isinstance(inner, dict | list)]
    if isinstance(value, list):
        return [inner for inner in value if isinstance(inner, dict | list)]
    return []


def _check_text(grammar: Grammar, limit: int) -> None:
    if len(grammar.source) > limit:
        raise refuse(grammar, f"it has {len(grammar.source)} characters; at most {limit} are allowed")
    depth = deepest = 0
    for character in grammar.source:
        depth = max(0, depth + _BRACKETS.get(character, 0))
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise refuse(grammar, f"it is nested deeper than {MAX_DEPTH} levels")
