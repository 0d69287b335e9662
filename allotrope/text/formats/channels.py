"""Messages made of parts, each with a header: which channel it is on, and to whom it goes (the harmony format).

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{...}<|call|>`
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from allotrope.text.formats.events import ContentDelta, ReasoningDelta, ToolArgumentsDelta, ToolCallBegin
from allotrope.text.formats.parser import EventStream
from allotrope.text.formats.reader import Reading, marks

_HEADER_LIMIT = 1024
_RECIPIENT = re.compile(r"(?:^|[\s>])to=([^\s<]+)")


@dataclass(frozen=True)
class ChannelTags:
    """The texts of a header and of the end of a part.

    A header is `start`, a role, `channel`, the channel's name and `message`; the first of a reply follows a prompt that
    has `start` and the role. `reasoning`: channels of reasoning. `prefix`: of recipients that are functions.
    """

    start: str
    channel: str
    message: str
    ends: tuple[str, ...]
    others: tuple[str, ...]
    reasoning: tuple[str, ...]
    final: str
    prefix: str

    @property
    def reasoning_start(self) -> str:
        """The header of reasoning, from its channel on."""
        return f"{self.channel}{self.reasoning[0]}{self.message}"

    @property
    def reasoning_end(self) -> str:
        """The header of the answer, from its channel on."""
        return f"{self.channel}{self.final}{self.message}"


class ChannelParser(EventStream):
    """The parser of such a message. Reasoning is always told apart: its channel is no text for the user."""

    def __init__(
        self, tags: ChannelTags, *, tools: bool, prompt_opens_reasoning: bool, special_tokens: Iterable[str]
    ) -> None:
        self._tags = tags
        self._tools = tools
        self._open = prompt_opens_reasoning
        self._calls = 0
        # Kinds of text that have come: parts of one kind are on lines of their own.
        self._seen: set[type] = set()
        own = {tags.start, tags.channel, tags.message, *tags.ends, *tags.others}
        self._marks = marks(frozenset({*own, *(token for token in special_tokens if token)}))
        self._name = re.compile(re.escape(tags.channel) + r"\s*([\w-]+)")
        super().__init__()

    def read(self) -> Reading[None]:
        tags, reader = self._tags, self.reader
        mark = ""
        if self._open:
            mark = yield from self._part(tags.reasoning[0], None)
        elif (yield from reader.optional(marks(frozenset((" to=", "to="))))):
            mark = yield from self._header(" to=")
        while True:
            if mark in (tags.start, tags.channel):
                mark = yield from self._header(mark)
                continue
            if mark == tags.message:
                mark = yield from self._part(None, None)
                continue
            text, mark = yield from reader.until(self._marks)
            if text:
                self._add(ContentDelta, text)
            elif not mark:
                return

    def _header(self, first: str) -> Reading[str]:
        """A header after its `first` text, and its part. Returns the tag that ends them."""
        tags = self._tags
        pieces = [first]
        texts = ["" if first in self._marks.texts else first]
        size = 0
        while True:
            text, mark = yield from self.reader.until(self._marks)
            pieces.append(text)
            texts.append(text)
            size += len(text) + len(mark)
            if mark == tags.message:
                header = "".join(pieces)
                channel, recipient = self._name.search(header), _RECIPIENT.search(header)
                return (yield from self._part(channel and channel[1], recipient and recipient[1]))
            if not (text or mark):
                # A header that the end cuts off is no text.
                return ""
            if size > _HEADER_LIMIT or mark in (tags.start, *tags.ends):
                if any(texts):
                    self._add(ContentDelta, "".join(texts))
                return mark
            pieces.append(mark)

    def _part(self, channel: str | None, recipient: str | None) -> Reading[str]:
        """The text of a part. Returns the tag that ends it."""
        tags = self._tags
        kind: type[ReasoningDelta] | type[ContentDelta] | None = ContentDelta
        if recipient is not None and self._tools and recipient != "assistant":
            kind = None
            self.emit(ToolCallBegin(self._calls, recipient.removeprefix(tags.prefix) or recipient))
        elif channel in tags.reasoning:
            kind = ReasoningDelta
        apart = kind in self._seen
        empty = True
        while True:
            text, mark = yield from self.reader.until(self._marks)
            if text:
                if kind is None:
                    self.emit(ToolArgumentsDelta(self._calls, text))
                else:
                    self._add(kind, f"\n{text}" if apart and empty else text)
                empty = False
            if mark in (tags.start, tags.channel, *tags.ends) or not (text or mark):
                break
        if kind is None:
            if empty:
                self.emit(ToolArgumentsDelta(self._calls, "{}"))
            self._calls += 1
        return mark

    def _add(self, kind: type[ReasoningDelta] | type[ContentDelta], text: str) -> None:
        self._seen.add(kind)
        self.emit(kind(text))
