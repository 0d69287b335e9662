"""`<think>`: the tags around reasoning that most models write, and the format that has nothing else."""

from __future__ import annotations

from allotrope.text.formats.format import MessageFormat, ReasoningTags

TAGS = ReasoningTags("<think>", "</think>")
FORMAT = MessageFormat("think", reasoning=TAGS)
