"""Types of a tool's parameters by its JSON schema, and values written as text turned into JSON of these types."""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_INTEGER = re.compile(r"-?(?:0|[1-9]\d*)", re.ASCII)
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
# Schemas refer to schemas, in circles too: what lies further says nothing of the type.
_MAX_SCHEMAS = 256
# Python's parser needs far more memory than its text.
_MAX_PYTHON = 1 << 16


class ToolSchemas:
    """The parameters of a request's tools. `tools`: in the form of OpenAI's chat API, or of its responses API."""

    def __init__(self, tools: Iterable[Any] = ()) -> None:
        self._parameters: dict[str, Mapping[str, Any]] = {}
        for tool in tools:
            function = tool.get("function", tool) if isinstance(tool, Mapping) else None
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                parameters = function.get("parameters") or function.get("input_schema")
                self._parameters[function["name"]] = parameters if isinstance(parameters, Mapping) else {}

    def types(self, tool: str, parameter: str) -> frozenset[str]:
        """JSON types of a parameter. Empty if no schema says."""
        schema = self._parameters.get(tool, {})
        properties = schema.get("properties")
        found = properties.get(parameter) if isinstance(properties, Mapping) else None
        return frozenset(_types(found, schema))


def _types(schema: Any, root: Mapping[str, Any]) -> set[str]:
    found: set[str] = set()
    pending, seen = [schema], set[int]()
    while pending and len(seen) < _MAX_SCHEMAS:
        one = pending.pop(0)
        if not isinstance(one, Mapping) or id(one) in seen:
            continue
        seen.add(id(one))
        stated = one.get("type")
        found |= {stated} if isinstance(stated, str) else {kind for kind in _list(stated) if isinstance(kind, str)}
        values = [*_list(one.get("enum")), *([one["const"]] if "const" in one else [])]
        found |= set(map(value_type, values))
        for key in ("anyOf", "oneOf", "allOf"):
            pending += _list(one.get(key))[:_MAX_SCHEMAS]
        if isinstance(one.get("$ref"), str):
            pending.append(referred_schema(one["$ref"], root))
    return found


def value_type(value: Any) -> str:
    """The JSON type of a value."""
    return "null" if value is None else _TYPES.get(type(value), "string")


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, Sequence) and not isinstance(value, str) else ()


def referred_schema(reference: str, root: Mapping[str, Any]) -> Any:
    """The schema that a reference of the form `#/$defs/name` names, or None."""
    start, *path = reference.split("/")
    found: Any = root if start == "#" else None
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def is_text(types: frozenset[str]) -> bool:
    """Whether a value of these types is its text in any case, so that it can be passed on as it comes."""
    return not types or types == {"string"}


def to_json(text: str, types: frozenset[str]) -> str:
    """`text`, a value as a model writes it, as JSON of one of `types`; a JSON string if it is none of them."""
    bare = text.strip()
    word = bare.lower()
    if "null" in types and word in ("null", "none"):
        return "null"
    if types & {"integer", "number"} and _INTEGER.fullmatch(bare):
        return bare
    if "number" in types and _NUMBER.fullmatch(bare) and math.isfinite(float(bare)):
        return bare
    if "integer" in types and _NUMBER.fullmatch(bare) and float(bare).is_integer():
        return str(int(float(bare)))
    if "boolean" in types and word in ("true", "false", "1", "0"):
        return "true" if word in ("true", "1") else "false"
    if types & {"object", "array"} or "string" not in types:
        found = _structured(bare)
        if found is not None:
            return found
    return json.dumps(text, ensure_ascii=False)


def json_or_string(text: str) -> str:
    """`text` if it is JSON, else as a JSON string."""
    bare = text.strip()
    return bare if is_json(bare) else json.dumps(text, ensure_ascii=False)


def is_encodable(text: str) -> bool:
    """Whether `text` can be sent: escapes can name halves of surrogate pairs, which UTF-8 has not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _structured(text: str) -> str | None:
    """JSON, or a Python literal as JSON. None if it is neither."""
    if is_json(text):
        return text
    if not text.startswith(("{", "[", "(")) or len(text) > _MAX_PYTHON:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = ast.literal_eval(text)
        found = json.dumps(value, ensure_ascii=False, allow_nan=False)
        return found if is_encodable(found) else json.dumps(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def is_json(text: str) -> bool:
    """Whether `text` is JSON."""
    try:
        # `json` takes NaN and numbers that are infinite as a float; JSON has neither.
        json.dumps(json.loads(text), allow_nan=False)
    except (ValueError, RecursionError):
        return False
    return True
