"""What is refused of a grammar's source before anything compiles it: depth, size, and what is no JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from allotrope.errors import InvalidRequest
from allotrope.request import Grammar

# Compiling and walking a schema recurses, and the deepest schemas in use have about 30 levels.
MAX_DEPTH = 64
MAX_REGEX_LENGTH = 1 << 15
MAX_LARK_LENGTH = 1 << 16
MAX_CHOICES = 4096
# Numbers of a schema are 64-bit floats to the library, which reads decimals exactly if they have few digits and a small
# exponent.
_EXACT_DIGITS = 1 << 53
_EXACT_EXPONENT = 22
_MAX_INTEGER = (1 << 63) - 1
_UPPER_BOUNDS = ("maximum", "exclusiveMaximum")
_NUMBERS = (*_UPPER_BOUNDS, "minimum", "exclusiveMinimum", "multipleOf")
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


def read_json(grammar: Grammar, *, exact: bool = False) -> Any:
    """The source of `grammar` as JSON. `exact`: decimals keep their digits. Raises `InvalidRequest`."""
    try:
        return json.loads(grammar.source, parse_float=Decimal if exact else None)
    except RecursionError as error:
        raise refuse(grammar, f"it is nested deeper than {MAX_DEPTH} levels") from error
    except (ValueError, ArithmeticError) as error:
        raise refuse(grammar, f"it is no JSON: {error}") from error


def _check_json(grammar: Grammar) -> None:
    value = read_json(grammar, exact=True)
    if not isinstance(value, dict | bool) or (grammar.kind == "structural_tag" and not isinstance(value, dict)):
        raise refuse(grammar, "a JSON object is needed")
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inner(outer)]
        if not level:
            break
    else:
        raise refuse(grammar, f"it is nested deeper than {MAX_DEPTH} levels")
    for keyword, number in _inexact_numbers(value):
        raise refuse(
            grammar, f"{keyword} has the number {str(number)[:60]}, which a 64-bit float does not hold exactly"
        )


def _inexact_numbers(value: Any) -> Iterator[tuple[str, int | Decimal]]:
    """(keyword, number) of what numbers may be, where the libraries would take another number."""
    if isinstance(value, list):
        for inner in value:
            yield from _inexact_numbers(inner)
    elif isinstance(value, Mapping):
        for keyword, inner in value.items():
            if keyword in ("const", "enum"):
                yield from ((keyword, number) for number in _numbers(inner) if not _is_exact(number))
            elif keyword in _NUMBERS and isinstance(inner, int | Decimal):
                if not (_is_exact(inner) or (keyword in _UPPER_BOUNDS and _is_rounded_down(inner, value))):
                    yield keyword, inner
            else:
                yield from _inexact_numbers(inner)


def _is_rounded_down(bound: int | Decimal, schema: Mapping[str, Any]) -> bool:
    """Whether what is taken for an upper bound lies below it, so that all that fits it fits the schema."""
    # Beyond the largest integer of 64 bits, a bound of integers is this integer.
    is_largest = schema.get("type") == "integer" and bound >= _MAX_INTEGER
    return isinstance(bound, int) and 0 < bound < 1 << 64 and (is_largest or int(float(bound)) <= bound)


def _numbers(value: Any) -> Iterator[int | Decimal]:
    """Every number in a value."""
    if isinstance(value, int | Decimal):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _numbers(inner)


def _is_exact(number: int | Decimal) -> bool:
    """Whether a 64-bit float, and an integer of 64 bits where it is whole, are `number` itself."""
    if isinstance(number, int):
        return abs(number) <= _MAX_INTEGER and int(float(number)) == number
    _, digits, exponent = number.as_tuple()
    assert isinstance(exponent, int)
    return abs(exponent) <= _EXACT_EXPONENT and len(digits) <= 16 and int("".join(map(str, digits))) <= _EXACT_DIGITS


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
