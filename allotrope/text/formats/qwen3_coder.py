"""Qwen3-Coder and Qwen3.5: `<tool_call><function=f><parameter=p>value</parameter></function></tool_call>`."""

from __future__ import annotations

from allotrope.text.formats.bodies import Name, NamedParameters
from allotrope.text.formats.format import MessageFormat, ToolSyntax
from allotrope.text.formats.think import TAGS

PARAMETERS = NamedParameters(
    Name(ends=(">",)),
    key=("<parameter=",),
    key_end=((">", ""),),
    value_end="</parameter>",
    end=("</function>",),
    implied_ends=("<parameter=", "</function>"),
    newline=True,
)
CALLS = ToolSyntax(
    PARAMETERS,
    section=("<tool_call>",),
    call=("<function=",),
    section_end=("</tool_call>",),
    bare=True,
)
FORMAT = MessageFormat("qwen3_coder", reasoning=TAGS, tools=CALLS)
