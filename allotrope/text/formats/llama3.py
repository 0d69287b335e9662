"""Llama 3 and 4: a call is a JSON object with `parameters`, or a list of Python calls."""

from __future__ import annotations

from allotrope.text.formats.bodies import CallList, CallObject
from allotrope.text.formats.format import MessageFormat, ToolSyntax
from allotrope.text.formats.literals import PythonCall

JSON = MessageFormat(
    "llama3_json",
    tools=ToolSyntax(
        CallList(
            CallObject(arguments_required=True),
            ";",
            first=CallObject(brace_is_read=True, arguments_required=True),
        ),
        section=("<|python_tag|>",),
        call=("{",),
        bare=True,
    ),
)
PYTHONIC = MessageFormat(
    "pythonic",
    tools=ToolSyntax(
        CallList(PythonCall(), ",", "]"),
        section=("<|python_start|>",),
        call=("[",),
        section_end=("<|python_end|>",),
        bare=True,
        first=True,
    ),
)
