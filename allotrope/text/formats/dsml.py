"""DeepSeek V3.2 and V4: DSML, in which every parameter says whether it is a string."""

from __future__ import annotations

from allotrope.text.formats.bodies import Name, NamedParameters
from allotrope.text.formats.format import MessageFormat, ToolSyntax
from allotrope.text.formats.think import TAGS

FORMAT = MessageFormat(
    "dsml",
    reasoning=TAGS,
    tools=ToolSyntax(
        NamedParameters(
            Name(ends=('">',)),
            key=('<｜DSML｜parameter name="',),
            key_end=(('" string="true">', "string"), ('" string="false">', "json"), ('">', "json")),
            value_end="</｜DSML｜parameter>",
            end=("</｜DSML｜invoke>",),
            implied_ends=('<｜DSML｜parameter name="', "</｜DSML｜invoke>"),
        ),
        # V3.2 names its section `function_calls`, V4 `tool_calls`; the two last are slips that V4 makes.
        section=("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>", "<｜DSML｜toolcalls>", "<｜DSML｜tool>"),
        call=('<｜DSML｜invoke name="',),
        section_end=("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
        bare=True,
    ),
)
