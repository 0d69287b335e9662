"""Mistral: `[TOOL_CALLS]name[ARGS]{...}`, or before tokenizer v11 `[TOOL_CALLS]` and a JSON list of calls."""

from __future__ import annotations

from allotrope.text.formats.bodies import Alternatives, CallList, CallObject, Name, NamedJson, Prefixed
from allotrope.text.formats.format import MessageFormat, ReasoningTags, ToolSyntax

FORMAT = MessageFormat(
    "mistral",
    reasoning=ReasoningTags("[THINK]", "[/THINK]", anywhere=True),
    tools=ToolSyntax(
        Alternatives(
            (("[", Prefixed("[", CallList(CallObject(), ",", "]"), unless=("[TOOL_CALLS]",))), ("{", CallObject())),
            NamedJson(
                Name(ends=("[ARGS]",), stops=("{", "[CALL_ID]")), call_id=Name(before=("[CALL_ID]",), ends=("[ARGS]",))
            ),
        ),
        call=("[TOOL_CALLS]",),
    ),
)
