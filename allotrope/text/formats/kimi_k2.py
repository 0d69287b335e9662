"""Kimi-K2: a section of calls, each with its id, `functions.name:0`, and arguments as JSON."""

from __future__ import annotations

from allotrope.text.formats.bodies import Name, NamedJson
from allotrope.text.formats.format import MessageFormat, ToolSyntax
from allotrope.text.formats.think import TAGS

FORMAT = MessageFormat(
    "kimi_k2",
    reasoning=TAGS,
    tools=ToolSyntax(
        NamedJson(Name(ends=("<|tool_call_argument_begin|>",), prefix="functions.", has_id=True)),
        section=("<|tool_calls_section_begin|>",),
        call=("<|tool_call_begin|>",),
        call_end=("<|tool_call_end|>",),
        section_end=("<|tool_calls_section_end|>",),
    ),
)
