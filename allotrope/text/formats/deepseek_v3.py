"""DeepSeek V3 and R1: a section of calls, each with its type, name and arguments in a block of code."""

from __future__ import annotations

from dataclasses import replace

from allotrope.text.formats.bodies import Name, NamedJson
from allotrope.text.formats.format import MessageFormat, ToolSyntax
from allotrope.text.formats.think import TAGS

CALLS = ToolSyntax(
    NamedJson(Name(before=("function<｜tool▁sep｜>",), ends=("\n```json\n", "\n```json")), fence=("```",)),
    section=("<｜tool▁calls▁begin｜>",),
    call=("<｜tool▁call▁begin｜>",),
    call_end=("<｜tool▁call▁end｜>",),
    section_end=("<｜tool▁calls▁end｜>",),
)
FORMAT = MessageFormat("deepseek_v3", reasoning=TAGS, tools=CALLS)
# V3.1 writes the name and the arguments alone.
FORMAT_31 = MessageFormat(
    "deepseek_v31", reasoning=TAGS, tools=replace(CALLS, body=NamedJson(Name(ends=("<｜tool▁sep｜>",))))
)
