"""Gemma 4: `<|tool_call>call:f{p:<|"|>text<|"|>}<tool_call|>`, and reasoning on a channel."""

from __future__ import annotations

from allotrope.text.formats.bodies import Name
from allotrope.text.formats.format import MessageFormat, ReasoningTags, ToolSyntax
from allotrope.text.formats.literals import BraceCall

FORMAT = MessageFormat(
    "gemma4",
    reasoning=ReasoningTags("<|channel>", "<channel|>", header="thought\n", anywhere=True),
    tools=ToolSyntax(
        # Some checkpoints leave `call` out.
        BraceCall(Name(before=("call:", ":"), ends=("{",)), quote='<|"|>'),
        call=("<|tool_call>",),
        call_end=("<tool_call|>",),
    ),
)
