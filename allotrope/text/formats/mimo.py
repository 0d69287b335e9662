"""MiMo: the tags of Qwen3-Coder in one line, so that a newline in a value is part of it."""

from __future__ import annotations

from dataclasses import replace

from allotrope.text.formats.format import MessageFormat
from allotrope.text.formats.qwen3_coder import CALLS, PARAMETERS
from allotrope.text.formats.think import TAGS

FORMAT = MessageFormat("mimo", reasoning=TAGS, tools=replace(CALLS, body=replace(PARAMETERS, newline=False)))
