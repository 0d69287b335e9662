"""GLM-4.5 to GLM-5: `<tool_call>f<arg_key>p</arg_key><arg_value>value</arg_value></tool_call>`."""

from __future__ import annotations

from allotrope.text.formats.bodies import Name, NamedParameters
from allotrope.text.formats.format import MessageFormat, ToolSyntax
from allotrope.text.formats.think import TAGS

FORMAT = MessageFormat(
    "glm45",
    reasoning=TAGS,
    tools=ToolSyntax(
        NamedParameters(
            Name(stops=("<arg_key>", "</tool_call>")),
            key=("<arg_key>",),
            key_end=(("</arg_key>", ""),),
            value="<arg_value>",
            value_end="</arg_value>",
            implied_ends=("</tool_call>",),
        ),
        call=("<tool_call>",),
        call_end=("</tool_call>",),
    ),
)
