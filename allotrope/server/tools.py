"""Tools of a request, whichever API it came by: their names and schemas, and which of them an answer may call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from allotrope.errors import InvalidRequest
from allotrope.server.values import describe_value

MAX_TOOLS = 1024
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_MAX_DEPTH = 64
_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
# Keywords whose value is one schema, a list of schemas, and schemas by name.
_ONE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames", "additionalItems")
_LIST = ("anyOf", "allOf", "oneOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


@dataclass(frozen=True)
class Tool:
    """A function that an answer may call. `parameters`: JSON schema of its arguments. `strict`: they must fit it."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    def as_template_reads(self) -> dict[str, Any]:
        """The tool in the form that chat templates read. A tool without a schema takes no arguments."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class NamedTool:
    """The choice of one tool."""

    name: str


ToolChoice = Literal["auto", "none", "required"] | NamedTool


def check_tools(tools: Sequence[Tool], choice: ToolChoice) -> None:
    """Raise `InvalidRequest` for too many tools, a name twice, a broken schema, or a choice that there is not."""
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(tools)} tools; at most {MAX_TOOLS} are allowed.", "tools")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        if not _NAME.fullmatch(tool.name):
            raise InvalidRequest(
                f"tools[{index}] has the name {describe_value(tool.name)}; 1 to 128 letters, digits, and any of "
                "_ - . : / are allowed.",
                "tools",
            )
        if tool.name in names:
            raise InvalidRequest(f"tools has the name {describe_value(tool.name)} twice.", "tools")
        names.add(tool.name)
        if tool.parameters is not None:
            check_schema(tool.parameters, f"tools[{index}] ({tool.name})")
    if isinstance(choice, NamedTool) and choice.name not in names:
        raise InvalidRequest(f"tool_choice names {describe_value(choice.name)}, which is not in tools.", "tool_choice")
    if choice == "required" and not tools:
        raise InvalidRequest("tool_choice='required' needs tools.", "tool_choice")


def check_schema(schema: Any, what: str) -> None:
    """Raise `InvalidRequest` with param `tools` for what is no JSON schema of an object.

    `what`: the tool, for messages. The time is linear in the size of the schema.
    """
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise InvalidRequest(
            f'{what} has parameters={describe_value(schema)}; a JSON schema of "type": "object" is needed.', "tools"
        )
    pending: list[tuple[Any, str, int]] = [(schema, "parameters", 0)]
    while pending:
        part, path, depth = pending.pop()
        if isinstance(part, bool):
            continue
        if not isinstance(part, Mapping):
            raise _broken(what, path, part, "an object or a boolean")
        if depth > _MAX_DEPTH:
            raise InvalidRequest(f"{what} has parameters that are nested more than {_MAX_DEPTH} deep.", "tools")
        _check_type(part, path, what)
        pending += [(inner, inner_path, depth + 1) for inner, inner_path in _inner_schemas(part, path, what)]


def _check_type(schema: Mapping[str, Any], path: str, what: str) -> None:
    kinds = schema.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if not isinstance(kind, str) or kind not in _TYPES:
            raise _broken(what, f"{path}.type", kinds, f"one of {', '.join(_TYPES)}, or a list of them")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _broken(what, f"{path}.required", required, "a list of strings")
    if not isinstance(schema.get("enum", []), list):
        raise _broken(what, f"{path}.enum", schema["enum"], "a list")


def _inner_schemas(schema: Mapping[str, Any], path: str, what: str) -> list[tuple[Any, str]]:
    found: list[tuple[Any, str]] = []
    for keyword in schema.keys() & {*_ONE, *_LIST, *_NAMED}:
        value, where = schema[keyword], f"{path}.{keyword}"
        if keyword in _NAMED:
            if not isinstance(value, Mapping):
                raise _broken(what, where, value, "an object of schemas")
            found += [(inner, f"{where}.{str(name)[:40]}") for name, inner in value.items()]
        elif isinstance(value, list) and (keyword in _LIST or keyword == "items"):
            found += [(inner, f"{where}[{index}]") for index, inner in enumerate(value)]
        elif keyword in _LIST:
            raise _broken(what, where, value, "a list of schemas")
        else:
            found.append((value, where))
    return found


def _broken(what: str, path: str, value: Any, needed: str) -> InvalidRequest:
    return InvalidRequest(f"{what} has {path[-200:]}={describe_value(value)}; {needed} is needed.", "tools")
