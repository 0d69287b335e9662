"""Writes the tool calls of a format as parts of a structural tag, so that a grammar can force them.

The parts are those of `call_parts`. They follow the data of the format's parser, and spell
each tag in its first spelling.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from allotrope.request import MAX_GRAMMAR_LENGTH
from allotrope.text.call_parts import (
    ANY_TEXT,
    BREAK,
    NOTHING,
    CalledTool,
    Json,
    NotWritable,
    either,
    sequence,
    text,
)
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
from allotrope.text.parameter_grammar import definitions_of, parameters_of


def forced_calls(format: MessageFormat, tools: Sequence[CalledTool], *, many: bool) -> Json:
    """Calls of `tools` and nothing else: at least one, and if not `many` only one. Raises `NotWritable`."""
    writer = _Writer(format)
    calls = _row(writer.tags(tools), writer.separator, many)
    return _row([writer.wrapped(calls, *writer.sections[0])], "\n", many) if writer.section else calls


def calls_in_text(format: MessageFormat, tools: Sequence[CalledTool], *, many: bool) -> Json:
    """Any answer, in which what opens a call is a call of `tools`. Raises `NotWritable`."""
    if format.channels is not None:
        return either(forced_calls(format, tools, many=many), answer(format, ANY_TEXT))
    writer = _Writer(format)
    calls = writer.tags(tools)
    tags, openings = calls, {writer.call}
    if writer.section:
        row = _row(calls, writer.separator, many)
        tags = [writer.wrapped(row, section, end) for section, end in writer.sections]
        tags += calls if writer.may_be_bare else []
        openings = {section for section, _ in writer.sections} | ({writer.call} if writer.may_be_bare else set())
    for opening in sorted(openings):
        if len(opening) < 3:
            raise NotWritable(f"{opening!r}, which opens its calls, opens other texts as well")
    return {
        "type": "triggered_tags",
        "triggers": sorted(openings),
        "tags": tags,
        "stop_after_first": not many,
        # Other spellings open calls, too, for the parser.
        "excludes": sorted(writer.all_openings - openings),
    }


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
    reasoning = sequence({"type": "tag", "begin": start, "content": ANY_TEXT, "end": end}, BREAK, BREAK)
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
        self.section = ""
        # (start, end) of a section in each spelling that has both, the first in any case.
        self.sections: list[tuple[str, str]] = []
        self.may_be_bare = False
        # Texts that open a call, or a section of calls.
        self.all_openings: set[str] = set()
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
            self.section = _first(syntax.section)
            self.sections = list(zip(syntax.section, syntax.section_end or ("",), strict=False))
        self.may_be_bare = syntax.bare
        self.all_openings = {*syntax.section, *(syntax.call if syntax.bare or not syntax.section else ())}
        if isinstance(self._body, Alternatives):
            self._body = self._body.otherwise
        if isinstance(self._body, CallList):
            self.separator = self._body.separator
            self._body = self._body.first or self._body.item
        elif not self.section and self._end:
            self.separator = "\n"

    def wrapped(self, calls: Json, section: str, end: str) -> Json:
        """A section with `calls`, in one of its spellings."""
        return {"begin": section, "content": sequence(BREAK, calls, BREAK), "end": end}

    def tags(self, tools: Sequence[CalledTool]) -> list[Json]:
        """The calls of `tools`, each from its first text to its last."""
        if not (self._end and isinstance(self._body, CallObject)):
            return [self._tag(tool) for tool in tools]
        # White space that each call began with would be items of the parser for each, and there may be few of them.
        calls = either(*(self._tag(tool)["content"] for tool in tools))
        return [{"begin": self.call, "content": sequence(BREAK, calls, BREAK), "end": self._end}]

    def _tag(self, tool: CalledTool) -> Json:
        match self._body:
            case CallObject(argument_keys=keys, brace_is_read=read):
                head = f'{"" if read else "{"}"name": {json.dumps(tool.name)}, "{keys[0]}": '
                content = [text(head), _object(tool.schema), text("}")]
            case NamedJson(name=name, fence=fence):
                content = [*_named(name, tool.name), _object(tool.schema)]
                content += [text(f"\n{fence[0]}")] if fence else []
            case NamedParameters():
                return self._withparameters_of(self._body, tool)
            case _:
                raise NotWritable("its arguments are no JSON")
        return {"begin": self.call, "content": sequence(*content), "end": self._end}

    def _withparameters_of(self, body: NamedParameters, tool: CalledTool) -> Json:
        ends = f"{_first(body.end)}", self._end
        name = _named(body.name, tool.name)
        if tool.schema is None:
            end = next(one for one in ends if one)
            rest = [] if end == self._end else [text(self._end)]
            tagged = {"type": "tag", "begin": "", "content": ANY_TEXT, "end": end}
            return {"begin": self.call, "content": sequence(*name, tagged, *rest), "end": ""}
        self._repeated += len(json.dumps(definitions_of(tool.schema))) * len(tool.schema.get("properties", ()))
        if self._repeated > MAX_GRAMMAR_LENGTH:
            raise NotWritable(f"the definitions of the tool {tool.name} are too long to stand in each parameter")
        content = [*name, BREAK, *parameters_of(body, tool)]
        if ends[0] and ends[1]:
            content += [text(ends[0]), BREAK]
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


def _first(spellings: Sequence[str]) -> str:
    return spellings[0] if spellings else ""
