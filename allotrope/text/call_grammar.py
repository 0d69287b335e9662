"""Writes the tool calls of a format as parts of a structural tag, so that a grammar can force them.

The parts are those of `allotrope.grammars.structural_tag`. They follow the data of the format's parser, and spell
each tag in its first spelling.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from allotrope.request import MAX_GRAMMAR_LENGTH
from allotrope.text.formats import MessageFormat
from allotrope.text.formats.bodies import (
    Alternatives,
    Body,
    CallList,
    CallObject,
    Name,
    NamedJson,
    NamedParameters,
)
from allotrope.text.formats.parameter_types import ToolSchemas, referred_schema

Json = dict[str, Any]

NOTHING: Json = {"type": "const_string", "value": ""}
ANY_TEXT: Json = {"type": "any_text"}
# Models write newlines between tags or none, as they were trained.
_BREAK: Json = {"type": "or", "elements": [{"type": "const_string", "value": "\n"}, NOTHING]}
# Keywords that a string written as it comes could break.
_OF_STRINGS = ("pattern", "format", "minLength", "maxLength")
# Keywords of a tool's whole schema that its properties, written one by one, cannot keep.
_OF_ALL = (
    *("$ref", "anyOf", "oneOf", "allOf", "not", "if", "const", "enum", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies"),
)
_MAX_CHOICES = 256


@dataclass(frozen=True)
class CalledTool:
    """A tool in a grammar. `schema`: of its arguments; None: any object."""

    name: str
    schema: Mapping[str, Any] | None


class NotWritable(Exception):
    """The format's calls cannot be written as a grammar; the text says why."""


def sequence(*elements: Json) -> Json:
    """The elements, one after another."""
    return {"type": "sequence", "elements": list(elements)}


def either(*elements: Json) -> Json:
    """One of the elements."""
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def text(value: str) -> Json:
    """`value` as it stands."""
    return {"type": "const_string", "value": value}


def forced_calls(format: MessageFormat, tools: Sequence[CalledTool], *, many: bool) -> Json:
    """Calls of `tools` and nothing else: at least one, and if not `many` only one. Raises `NotWritable`."""
    writer = _Writer(format)
    calls = _row([writer.tag(tool) for tool in tools], writer.separator, many)
    return _row([writer.wrapped(calls)], "\n", many) if writer.section else calls


def calls_in_text(format: MessageFormat, tools: Sequence[CalledTool], *, many: bool) -> Json:
    """Any answer, in which what opens a call is a call of `tools`. Raises `NotWritable`."""
    if format.channels is not None:
        return either(forced_calls(format, tools, many=many), answer(format, ANY_TEXT))
    writer = _Writer(format)
    tags = [writer.tag(tool) for tool in tools]
    if writer.section:
        tags = [writer.wrapped(_row(tags, writer.separator, many))]
    opening = writer.section or writer.call
    if len(opening) < 3:
        raise NotWritable(f"{opening!r}, which opens its calls, opens other texts as well")
    return {"type": "triggered_tags", "triggers": [opening], "tags": tags, "stop_after_first": not many}


def answer(format: MessageFormat | None, content: Json) -> Json:
    """An answer without calls: `content`, with the header that the format puts before it."""
    if format is None or format.channels is None:
        return content
    return sequence(text(format.channels.reasoning_end), content)


def after_reasoning(format: MessageFormat, rest: Json) -> Json:
    """Reasoning of `format` or none, then `rest`."""
    if format.channels is not None:
        tags = format.channels
        reasoning = {"type": "tag", "begin": tags.reasoning_start, "content": ANY_TEXT, "end": tags.ends[0]}
        return sequence(either(sequence(reasoning, text(f"{tags.start}assistant")), NOTHING), rest)
    assert format.reasoning is not None
    start, end = format.reasoning.start, format.reasoning.end
    reasoning = sequence({"type": "tag", "begin": start, "content": ANY_TEXT, "end": end}, _BREAK, _BREAK)
    return sequence(either(reasoning, NOTHING), rest)


def _row(tags: list[Json], separator: str | None, many: bool) -> Json:
    """One of the tags, or more with `separator` between them."""
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator or "",
        "at_least_one": True,
        "stop_after_first": not many or separator is None,
    }


class _Writer:
    """The texts of one format. `separator`: between calls; None: there is one call. `call`: what each begins with."""

    def __init__(self, format: MessageFormat) -> None:
        self.section = self.section_end = ""
        self.separator: str | None = ""
        self._end = ""
        # Characters of definitions, which each parameter repeats.
        self._repeated = 0
        if format.channels is not None:
            tags = format.channels
            # The part's end is also the end of the answer.
            self.separator = None
            self.call = f"{tags.channel}commentary to={tags.prefix}"
            self._body: Body = NamedJson(Name(ends=(f" {tags.others[0]}json{tags.message}",)))
            return
        syntax = format.tools
        if syntax is None:
            raise NotWritable("it has no calls")
        self.call, self._body = _first(syntax.call), syntax.body
        self._end = _first(syntax.call_end)
        # A section without an end goes on to the end of the answer, or is left out by the format itself.
        if syntax.section_end or not syntax.bare:
            self.section, self.section_end = _first(syntax.section), _first(syntax.section_end)
        if isinstance(self._body, Alternatives):
            self._body = self._body.otherwise
        if isinstance(self._body, CallList):
            self.separator = self._body.separator
            self._body = self._body.first or self._body.item
        elif not self.section and self._end:
            self.separator = "\n"

    def wrapped(self, calls: Json) -> Json:
        """A section with `calls`."""
        return {"begin": self.section, "content": sequence(_BREAK, calls, _BREAK), "end": self.section_end}

    def tag(self, tool: CalledTool) -> Json:
        """One call of `tool`, from its first text to its last."""
        match self._body:
            case CallObject(argument_keys=keys, brace_is_read=read):
                head = f'{"" if read else "{"}"name": {json.dumps(tool.name)}, "{keys[0]}": '
                content = [text(head), _object(tool.schema), text("}")]
            case NamedJson(name=name, fence=fence):
                content = [*_named(name, tool.name), _object(tool.schema)]
                content += [text(f"\n{fence[0]}")] if fence else []
            case NamedParameters():
                return self._with_parameters(self._body, tool)
            case _:
                raise NotWritable("its arguments are no JSON")
        if self._end and isinstance(self._body, CallObject):
            content = [_BREAK, *content, _BREAK]
        return {"begin": self.call, "content": sequence(*content), "end": self._end}

    def _with_parameters(self, body: NamedParameters, tool: CalledTool) -> Json:
        ends = f"{_first(body.end)}", self._end
        name = _named(body.name, tool.name)
        if tool.schema is None:
            end = next(one for one in ends if one)
            rest = [] if end == self._end else [text(self._end)]
            tagged = {"type": "tag", "begin": "", "content": ANY_TEXT, "end": end}
            return {"begin": self.call, "content": sequence(*name, tagged, *rest), "end": ""}
        self._repeated += len(json.dumps(_definitions(tool.schema))) * len(tool.schema.get("properties", ()))
        if self._repeated > MAX_GRAMMAR_LENGTH:
            raise NotWritable(f"the definitions of the tool {tool.name} are too long to stand in each parameter")
        content = [*name, _BREAK, *_parameters(body, tool)]
        if ends[0] and ends[1]:
            content += [text(ends[0]), _BREAK]
        return {"begin": self.call, "content": sequence(*content), "end": ends[1] or ends[0]}


def _named(name: Name, tool: str) -> list[Json]:
    """A name with what stands around it."""
    parts = [text(f"{_first(name.before)}{name.prefix}{tool}")]
    if name.has_id:
        parts += [text(":"), {"type": "regex", "pattern": "[0-9]{1,3}"}]
    return [*parts, text(_first(name.ends))] if name.ends else parts


def _object(schema: Mapping[str, Any] | None) -> Json:
    return {
        "type": "json_schema",
        "json_schema": {"type": "object"} if schema is None else {"type": "object", **schema},
    }


def _parameters(body: NamedParameters, tool: CalledTool) -> list[Json]:
    """The parameters of a schema in its order; those that are not required may be left out."""
    schema = tool.schema or {}
    properties, required = schema.get("properties", {}), schema.get("required", ())
    if missing := [name for name in required if name not in properties]:
        raise NotWritable(f"the tool {tool.name} requires {missing[0]!r}, which is none of its properties")
    if lost := [keyword for keyword in _OF_ALL if keyword in schema]:
        raise NotWritable(f"{lost[0]} of the whole schema of the tool {tool.name} cannot be kept in its parameters")
    types = ToolSchemas([{"name": tool.name, "parameters": schema}])
    parts: list[Json] = []
    for name, inner in properties.items():
        is_text = not (kinds := types.types(tool.name, name)) or "string" in kinds
        kind = {end_kind: end for end, end_kind in reversed(body.key_end)}
        key_end = kind.get("string" if is_text else "json", kind.get("", ""))
        line = "\n" if body.newline else ""
        begin = f"{body.key[0]}{name}{key_end}{body.value}{line}"
        value, end = _value(inner, schema, is_text, tool, name), f"{line}{body.value_end}"
        part = sequence({"type": "tag", "begin": begin, "content": value, "end": end}, _BREAK)
        parts.append(part if name in required else either(part, NOTHING))
    return parts


def _value(inner: Any, schema: Mapping[str, Any], is_text: bool, tool: CalledTool, name: str) -> Json:
    inner = inner if isinstance(inner, Mapping) else {}
    if is_text:
        return _text_value(inner, schema, f"the string {name!r} of the tool {tool.name}")
    return {"type": "json_schema", "json_schema": {**_definitions(schema), **inner}}


def _text_value(inner: Mapping[str, Any], root: Mapping[str, Any], what: str) -> Json:
    """A value that is written as it comes: one of those that its schema lists, or any text."""
    texts: dict[str, None] = {}
    is_any = False
    pending: list[Any] = [inner]
    for _ in range(_MAX_CHOICES):
        if not pending:
            break
        one = pending.pop(0)
        one = one if isinstance(one, Mapping) else {}
        if "$ref" in one:
            pending.append(referred_schema(str(one["$ref"]), root))
        elif found := [keyword for keyword in ("anyOf", "oneOf", "allOf") if keyword in one]:
            if len(found) > 1 or (found[0] == "allOf" and len(one["allOf"]) > 1):
                raise NotWritable(f"{found[-1]} of {what} cannot be kept in it")
            pending += one[found[0]]
        elif "const" in one or "enum" in one:
            choices = [one["const"]] if "const" in one else one["enum"]
            texts |= dict.fromkeys(choice if isinstance(choice, str) else json.dumps(choice) for choice in choices)
        elif one.get("type") == "null":
            texts["null"] = None
        elif broken := [keyword for keyword in _OF_STRINGS if keyword in one]:
            raise NotWritable(f"{broken[0]} of {what} cannot be kept in it")
        else:
            is_any = True
    if pending:
        raise NotWritable(f"the schema of {what} refers to too many others")
    return ANY_TEXT if is_any or not texts else either(*map(text, texts))


def _definitions(schema: Mapping[str, Any]) -> Json:
    return {keyword: schema[keyword] for keyword in ("$defs", "definitions") if keyword in schema}


def _first(spellings: Sequence[str]) -> str:
    return spellings[0] if spellings else ""
