"""Hermes and Qwen3: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from allotrope.text.formats.bodies import CallObject
from allotrope.text.formats.format import MessageFormat, ToolSyntax
from allotrope.text.formats.think import TAGS

FORMAT = MessageFormat(
    "hermes",
    reasoning=TAGS,
    tools=ToolSyntax(CallObject(), call=("<tool_call>",), call_end=("</tool_call>",)),
)
