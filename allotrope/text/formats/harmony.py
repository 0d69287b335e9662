"""gpt-oss: harmony, whose tokens are read in their text form."""

from __future__ import annotations

from allotrope.text.formats.channels import ChannelTags
from allotrope.text.formats.format import MessageFormat

FORMAT = MessageFormat(
    "harmony",
    channels=ChannelTags(
        start="<|start|>",
        channel="<|channel|>",
        message="<|message|>",
        ends=("<|end|>", "<|return|>", "<|call|>"),
        others=("<|constrain|>",),
        reasoning=("analysis",),
        final="final",
        prefix="functions.",
    ),
)
