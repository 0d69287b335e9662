"""MiniMax-M2: a section of `<invoke name="f"><parameter name="p">value</parameter></invoke>`."""

from __future__ import annotations

from allotrope.text.formats.bodies import Name, NamedParameters
from allotrope.text.formats.format import MessageFormat, ToolSyntax
from allotrope.text.formats.think import TAGS

_ENDS = ('">', "'>", ">")

FORMAT = MessageFormat(
    "minimax_m2",
    reasoning=TAGS,
    tools=ToolSyntax(
        NamedParameters(
            Name(ends=_ENDS),
            key=('<parameter name="', "<parameter name='", "<parameter name="),
            key_end=tuple((end, "") for end in _ENDS),
            value_end="</parameter>",
            end=("</invoke>",),
            implied_ends=("<parameter name=", "</invoke>"),
        ),
        section=("<minimax:tool_call>",),
        # Models leave quotes out, or write single ones.
        call=('<invoke name="', "<invoke name='", "<invoke name="),
        section_end=("</minimax:tool_call>",),
        bare=True,
    ),
)
