"""What can become of a request field: the kinds of rule, and how a value is held against one.

It must not know any field; the tables are in `fields` and `foreign_fields`. null always means "not given".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from allotrope.errors import InvalidRequest
from allotrope.server.values import describe_value, same_value


@dataclass(frozen=True)
class Honoured:
    """Has the effect that its help text in `protocol` states."""


@dataclass(frozen=True)
class WithoutEffect:
    """Taken in any value of a JSON type, because none could change the answer."""

    json_type: str
    why: str


@dataclass(frozen=True)
class Only:
    """Taken in `values` only, all of which ask for what this server does anyway; others are refused because `why`."""

    values: tuple[Any, ...]
    why: str


@dataclass(frozen=True)
class Renamed:
    """The name that another engine gives to our field `to`; taken beside `to` with the same value, and where `neutral`.

    `neutral`: values that ask for nothing.
    """

    to: str
    neutral: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Misplaced:
    """A field that another engine reads here; refused in any value. `advice`: what to write instead."""

    advice: str


Rule = Honoured | WithoutEffect | Only | Renamed | Misplaced

_PYTHON_TYPES: dict[str, type] = {"string": str, "object": dict, "boolean": bool}


def check_value(name: str, body: Mapping[str, Any], rule: Rule, path: str) -> None:
    """Hold field `name` of `body` against its rule.

    `path`: the field as the client sees it, such as `messages[0].name`. Raises `InvalidRequest` for a value that is
    refused.
    """
    value = body[name]
    if value is None:
        return
    fact = f"{path}={describe_value(value)}"
    match rule:
        case Only(values, why) if not any(same_value(value, neutral) for neutral in values):
            allowed = " or ".join([describe_value(neutral) for neutral in values] + ["leaving it out"])
            raise InvalidRequest(f"{fact} is not supported: {why}. Allowed: {allowed}.", path)
        case WithoutEffect(json_type, _) if not isinstance(value, _PYTHON_TYPES[json_type]):
            raise InvalidRequest(f"{fact} is not valid: a JSON {json_type} is needed.", path)
        case Renamed(to, neutral) if not any(same_value(value, one) for one in (body.get(to), *neutral)):
            raise InvalidRequest(f"{fact} is not a field of this server: write {to}.", path)
        case Misplaced(advice):
            raise InvalidRequest(f"{fact} is not a field of this server: {advice}.", path)


def schema_of(rule: WithoutEffect | Only) -> dict[str, Any]:
    """The JSON schema of a field that is not honoured."""
    if isinstance(rule, WithoutEffect):
        return {"type": [rule.json_type, "null"], "description": f"Without effect: {rule.why}."}
    return {"enum": [*rule.values, None], "description": f"Limited: {rule.why}."}
