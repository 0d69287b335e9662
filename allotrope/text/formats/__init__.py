"""Formats of messages: how models write reasoning and tool calls, and what of their text is which."""

from __future__ import annotations

from allotrope.text.formats.events import (
    ContentDelta,
    MessageEvent,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallBegin,
)
from allotrope.text.formats.format import MessageFormat
from allotrope.text.formats.parser import MessageParser
from allotrope.text.formats.registry import (
    FORMATS,
    Choice,
    by_name,
    by_reasoning_parser,
    by_tool_parser,
    for_checkpoint,
)

__all__ = [
    "FORMATS",
    "Choice",
    "ContentDelta",
    "MessageEvent",
    "MessageFormat",
    "MessageParser",
    "ReasoningDelta",
    "ToolArgumentsDelta",
    "ToolCallBegin",
    "by_name",
    "by_reasoning_parser",
    "by_tool_parser",
    "for_checkpoint",
]
