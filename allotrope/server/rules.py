"""Rules for request fields: their kinds, and the check of a value.

This module must not know any field; the tables are in `fields` and `foreign_fields`. null means that a field is left
out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from allotrope.errors import InvalidRequest
from allotrope.server.values import describe_value, same_value


@dataclass(frozen=True)
class Honoured:
    """The field has the effect that its help text in `protocol` states."""


@dataclass(frozen=True)
class WithoutEffect:
    """Every value of type `json_type` is accepted, because none changes the answer; `why` says why not."""

    json_type: str
    why: str


@dataclass(frozen=True)
class Only:
    """Only `values` are accepted: they ask for the server's own behaviour. Others are refused; `why` is the reason."""

    values: tuple[Any, ...]
    why: str


@dataclass(frozen=True)
class Renamed:
    """Another engine's name for the field `to`.

    It is accepted if `to` has the same value, or if its value is in `neutral`: values that ask for nothing.
    """

    to: str
    neutral: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Misplaced:
    """A field that another engine reads here. Every value is refused. `advice`: the field to write instead."""

    advice: str


Rule = Honoured | WithoutEffect | Only | Renamed | Misplaced

_PYTHON_TYPES: dict[str, type] = {"string": str, "object": dict, "boolean": bool, "integer": int}


def check_value(name: str, body: Mapping[str, Any], rule: Rule, path: str) -> None:
    """Check field `name` of `body` by its rule.

    `path`: the field's path in the body, such as `messages[0].name`. Raises `InvalidRequest` for a refused value.
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
        case Renamed(to, neutral) if not any(same_value(value, allowed) for allowed in (body.get(to), *neutral)):
            raise InvalidRequest(f"{fact} is not a field of this server: write {to}.", path)
        case Misplaced(advice):
            raise InvalidRequest(f"{fact} is not a field of this server: {advice}.", path)


def schema_of(rule: WithoutEffect | Only) -> dict[str, Any]:
    """The JSON schema of a field that has no effect or a limited one."""
    if isinstance(rule, WithoutEffect):
        return {"type": [rule.json_type, "null"], "description": f"Without effect: {rule.why}."}
    return {"enum": [*rule.values, None], "description": f"Limited: {rule.why}."}
